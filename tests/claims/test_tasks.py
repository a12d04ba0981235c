"""Generators: answers recomputed by other means, held-out prompts never trained on."""

import itertools

import pytest

from fathom.claims.tasks import GROUPS, HELDOUT, TRAIN, Chains, Document, Sums, Text, compose
from fathom.data.word_problems import word_problem
from fathom.errors import DataError


def chains_of(task: Chains, document: Document) -> list[tuple[list[int], int, int]]:
    """(chain, first answer, second answer) of every problem, parsed from the tokens."""
    words = [task.vocabulary[number] for number in document.ids]
    problems, chain = [], []
    while words:
        word = words.pop(0)
        if word != "=":
            chain.append(task.vocabulary.index(word))
            continue
        ans, first, ok, second, end = (words.pop(0) for _ in range(5))
        assert (ans, ok, end) == ("ANS", "OK", ";")
        problems.append((chain, task.vocabulary.index(first), task.vocabulary.index(second)))
        chain = []
    return problems


def test_chains_of_rotations_end_at_the_sum_of_their_steps():
    task = Chains("C5", 6, 96)
    problems = [one for number in range(20) for one in chains_of(task, task.document(TRAIN, 1, number))]
    assert {len(chain) for chain, _, _ in problems} == {1, 2, 3, 4, 5, 6}
    for chain, first, second in problems:
        assert first == second == sum(chain) % 5


def test_chains_of_permutations_move_things_one_after_the_other():
    task = Chains("S3", 5, 96)
    for number in range(10):
        for chain, answer, _ in chains_of(task, task.document(HELDOUT, 1, number)):
            for thing in range(3):
                place = thing
                for element in chain:
                    place = GROUPS["S3"][element][place]
                assert GROUPS["S3"][answer][thing] == place


def test_the_order_matters_in_the_permutations_and_not_in_the_rotations():
    pairs = list(itertools.product(range(5), repeat=2))
    assert all(compose(GROUPS["C5"], [a, b]) == compose(GROUPS["C5"], [b, a]) for a, b in pairs)
    assert any(compose(GROUPS["S3"], [a, b]) != compose(GROUPS["S3"], [b, a]) for a, b in pairs)


def test_a_held_out_chain_is_never_trained_on_and_lengths_from_two_are_held_out():
    task = Chains("C5", 3, 96)
    prompts = {
        split: {
            tuple(chain)
            for seed in (1, 2, 3)
            for number in range(150)
            for chain, _, _ in chains_of(task, task.document(split, seed, number))
        }
        for split in (TRAIN, HELDOUT)
    }
    assert not prompts[TRAIN] & prompts[HELDOUT]
    assert {len(chain) for chain in prompts[HELDOUT]} == {2, 3}
    # Every one of the 5 + 25 + 125 chains is in one of the two splits.
    assert len(prompts[TRAIN] | prompts[HELDOUT]) == 155


def test_kinds_name_the_supervised_tokens():
    task = Chains("C5", 4, 96)
    document = task.document(TRAIN, 1, 0)
    for token, supervised, kind in zip(document.ids, document.mask, document.kinds, strict=True):
        assert supervised == (kind != "prompt")
        if kind in ("copy",) or task.is_hard(kind):
            assert token in task.answers
        elif kind == "template":
            assert task.vocabulary[token] in ("ANS", "OK", ";")


def sums_of(task: Sums, document: Document) -> list[str]:
    return "".join(task.vocabulary[number] for number in document.ids).split(";")[:-1]


def test_sums_are_right_when_read_backwards_and_their_carries_are_marked():
    task = Sums(3, 96)
    document = task.document(TRAIN, 1, 0)
    kinds = [kind for kind in document.kinds if kind != "prompt"]
    for problem in sums_of(task, document):
        question, answer = problem.split("=")
        a, b = map(int, question.split("+"))
        assert int(answer[::-1]) == a + b
        carry = 0
        for x, y in itertools.zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0"):
            assert kinds.pop(0) == ("digit with carry" if carry else "digit")
            carry = int(int(x) + int(y) + carry > 9)
        if carry:
            assert kinds.pop(0) == "digit with carry"
        assert kinds.pop(0) == "template"


def test_a_held_out_sum_is_never_trained_on():
    task = Sums(2, 96)
    asked = {
        split: {one.split("=")[0] for number in range(200) for one in sums_of(task, task.document(split, 1, number))}
        for split in (TRAIN, HELDOUT)
    }
    assert len(asked[HELDOUT]) > 100
    assert not asked[TRAIN] & asked[HELDOUT]


def test_text_is_a_window_of_a_word_problem_of_its_split():
    task = Text(64)
    signs = {number: sign for sign, number in task.alphabet.items()}
    document = task.document(HELDOUT, 1, 0)
    window = "".join(signs.get(number, "") for number in document.ids)
    texts = {
        split: [f"{p['question']}\n{p['answer']}\n" for p in (word_problem(n, split) for n in range(50))]
        for split in (TRAIN, HELDOUT)
    }
    assert len(window) == 64 and all(document.mask)
    assert all(set(text) <= set(task.alphabet) for text in texts[TRAIN])


def test_text_of_a_file_keeps_its_last_eighth_from_training():
    source = "".join(chr(97 + number % 26) for number in range(8 * 512 - 512)) + "#" * 512
    task = Text(64, source)
    rare = task.alphabet.get("#", 0)
    assert all(rare not in task.document(TRAIN, seed, 0).ids for seed in range(20))
    assert set(task.document(HELDOUT, 1, 0).ids) == {rare}


def test_a_text_that_is_too_short_is_refused_with_the_length_that_would_do():
    with pytest.raises(DataError, match="at least 1024 characters"):
        Text(64, "too short")


@pytest.mark.parametrize("task", [Chains("S3", 4, 96), Sums(3, 96), Text(64)], ids=["chains", "sums", "text"])
def test_a_document_follows_from_its_split_seed_and_number(task):
    assert task.document(TRAIN, 3, 7) == task.document(TRAIN, 3, 7)
    others = [task.document(TRAIN, 4, 7), task.document(TRAIN, 3, 8), task.document(HELDOUT, 3, 7)]
    assert all(task.document(TRAIN, 3, 7).ids != other.ids for other in others)
    assert all(0 <= token < task.vocab_size for token in task.document(TRAIN, 3, 7).ids)
