"""Grading: which number counts as the answer."""

from decimal import Decimal

import pytest

from fathom.evals.grade import final_number, grade, is_correct


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("16 - 3 - 4 = 9 eggs, so $18", "18"),
        ("She pays $1,234.50 in all", "1234.50"),
        ("5-3", "3"),
        ("5 - 3", "3"),
        ("(2)-3", "3"),
        ("5 - 8 = -3", "-3"),
        ("it is -$4", "-4"),
        ("\u22127 degrees", "-7"),
        ("half is .5", "0.5"),
        ("lists 1,2,3", "3"),
        ("25%", "25"),
        ("2 apples and 3.", "3"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


def test_no_number_is_none_and_never_right() -> None:
    assert final_number("none at all") is None
    assert not is_correct("none at all", "none either")
    assert not is_correct("none at all", 3)


def test_numbers_compare_by_value() -> None:
    assert is_correct("so 18.00", 18)
    assert is_correct("so 1,800", "a * b = 1800")
    assert not is_correct("18 then 19", 18)


def test_grade_asks_in_order() -> None:
    replies = {"a?": "It is 4.", "b?": "It is 5."}
    graded = grade(replies.__getitem__, [("a?", 4), ("b?", "The answer is 6.")])
    assert graded.answers == ["It is 4.", "It is 5."]
    assert graded.correct == [True, False] and graded.accuracy == 0.5
    assert grade(replies.__getitem__, []).accuracy == 0.0
