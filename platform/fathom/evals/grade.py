"""Grading of worked solutions: an answer is right when its last number equals the reference's."""

import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import NamedTuple

# A minus counts as a sign only where no operand stands before it: "16 - 3" and "16-3" end in 3, "= -3" in -3.
_NUMBER = re.compile(
    r"(?<![\d.])(?:(?<![\w)\]])(?<![\d)\]] )(?P<sign>[-\u2212]))?\$?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)


def final_number(text: str) -> Decimal | None:
    """The last number of a text (``$1,234.50`` is 1234.5), or None if it has none."""
    last: Decimal | None = None
    for match in _NUMBER.finditer(text):
        value = Decimal(match["digits"].replace(",", ""))
        last = -value if match["sign"] else value
    return last


def is_correct(answer: str, reference: str | int | Decimal) -> bool:
    """Whether the answer's last number equals the reference's last number; no number is never right."""
    expected = final_number(str(reference))
    return expected is not None and final_number(answer) == expected


class Graded(NamedTuple):
    """Answers and how many were right, in the order asked."""

    answers: list[str]
    correct: list[bool]

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 for none asked."""
        return sum(self.correct) / len(self.correct) if self.correct else 0.0


def grade(generate: Callable[[str], str], questions: Iterable[tuple[str, str | int | Decimal]]) -> Graded:
    """Ask every question and grade the answers.

    Args:
        generate: question to answer; an endpoint or an engine behind a function.
        questions: (question, reference) pairs; the reference may be a whole worked solution.
    """
    answers: list[str] = []
    correct: list[bool] = []
    for question, reference in questions:
        answer = generate(question)
        answers.append(answer)
        correct.append(is_correct(answer, reference))
    return Graded(answers, correct)
