"""The generator: deterministic, its arithmetic right, its splits disjoint."""

import re

import pytest

from fathom.data.word_problems import SPLITS, WordProblem, word_problem
from fathom.data.word_stories import STORIES

MANY = {split: [word_problem(index, split) for index in range(1500)] for split in SPLITS}
EVERY = [problem for split in SPLITS for problem in MANY[split]]
GOLDEN = {
    "question": "Leila has 8 stickers and is given 12 more. How many stickers is that altogether?",
    "answer": "Leila has 8 + 12 = 20 stickers. The answer is 20.",
    "result": 20,
}
EQUATION = re.compile(r"(\d+(?: [-+*/] \d+)+) = (\d+)")


def test_every_equation_is_right_and_the_last_is_the_answer() -> None:
    for problem in EVERY:
        found = EQUATION.findall(problem["answer"])
        assert 1 <= len(found) <= 4, problem
        for left, right in found:
            assert eval(left) == int(right), (left, right)  # noqa: S307 - digits and + - * / only
        assert int(found[-1][1]) == problem["result"]
        assert problem["answer"].endswith(f"The answer is {problem['result']}.")


def test_all_numbers_are_integers_and_none_is_negative() -> None:
    for problem in EVERY:
        text = problem["question"] + " " + problem["answer"]
        assert not re.search(r"\d\.\d|(?<![\d ] )-\d", text), text
        assert problem["result"] >= 0


def test_every_number_of_a_solution_comes_from_the_question_or_an_equation() -> None:
    """A worked solution may use a given number, an earlier result, or the factor a word stands for."""
    for problem in EVERY:
        known = set(re.findall(r"\d+", problem["question"]))
        known |= {"2", "3", "4", "5", "7"}  # twice ... five times, the two sides of a garden, a week
        for left, right in EQUATION.findall(problem["answer"]):
            assert set(re.findall(r"\d+", left)) <= known, problem
            known.add(right)


def test_splits_share_no_question() -> None:
    questions = {split: {problem["question"] for problem in MANY[split]} for split in SPLITS}
    assert not questions["train"] & questions["heldout"]
    numbers = {split: {(skeleton(problem)) for problem in MANY[split]} for split in SPLITS}
    assert not numbers["train"] & numbers["heldout"], "not even the same story and numbers under other names"


def skeleton(problem: WordProblem) -> tuple[str, ...]:
    """The solution without names and things: numbers, signs and small words that tell the stories apart."""
    names = r"\b[A-Z]\w+\b"
    return (re.sub(names, "", re.sub(r"[a-z]{3,}", "", problem["answer"])), shape(problem["question"]))


def shape(question: str) -> str:
    return " ".join(re.findall(r"\$?\d+", question))


def test_it_is_varied() -> None:
    questions = [problem["question"] for problem in MANY["train"]]
    assert len(set(questions)) > 0.99 * len(questions)
    openings = {re.sub(r"\d+|\b[A-Z]\w+", "", question) for question in questions}
    assert len(openings) > 300
    assert len(STORIES) >= 12
    steps = {len(EQUATION.findall(problem["answer"])) for problem in EVERY}
    assert steps == {1, 2, 3, 4}


def test_it_is_the_same_everywhere() -> None:
    assert word_problem(0, "train") == GOLDEN
    assert word_problem(5, "heldout") == word_problem(5, "heldout")


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="splits are train, heldout"):
        word_problem(0, "test")
