"""Arithmetic word problems with worked solutions: deterministic, without network, of one to four steps.

Which split a problem belongs to is a function of its own story and numbers, so no question can be in two
splits.
"""

import random
import zlib
from typing import NamedTuple, TypedDict

from fathom.data.word_stories import STORIES, Teller

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 8
"""One problem in so many is held out."""


class WordProblem(TypedDict):
    """A row: the question, a worked solution that ends ``The answer is N.``, and N."""

    question: str
    answer: str
    result: int


class Story(NamedTuple):
    """What a story function tells: question, the sentences of the solution, the result."""

    question: str
    steps: list[str]
    result: int


def word_problem(index: int, split: str) -> WordProblem:
    """Problem number ``index`` of a split; the same on every machine and Python.

    Args:
        index: 0 or more.
        split: one of :data:`SPLITS`.

    Returns:
        A problem whose numbers are all integers, none of them negative.
    """
    if split not in SPLITS or index < 0:
        raise ValueError(f"problem {index} of split {split!r}: splits are {', '.join(SPLITS)}")
    for attempt in range(10_000):
        chance = random.Random(f"word-problems/{split}/{index}/{attempt}")
        teller = Teller(chance)
        number = chance.randrange(len(STORIES))
        story = Story(*STORIES[number](teller))
        if split_of(number, teller.numbers) == split:
            answer = " ".join([*story.steps, f"The answer is {story.result}."])
            return WordProblem(question=story.question, answer=answer, result=story.result)
    raise AssertionError("no draw fell into the split")


def split_of(story: int, numbers: list[int]) -> str:
    """The split of every problem with this story and these numbers, whatever its names and wording."""
    code = zlib.crc32(repr((story, numbers)).encode())
    return "heldout" if code % HELDOUT_SHARE == 0 else "train"
