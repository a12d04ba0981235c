"""The rule, on numbers made for it."""

import math

import pytest

from fathom.claims.verdict import DOES_NOT_HOLD, HOLDS, UNCLEAR, Claimed, compare, interval, overall

LOWER = Claimed(below=0.0)


def verdict(values, claimed=LOWER):
    return compare("a minus b", values, claimed).verdict


def test_the_interval_is_students():
    # Mean 2, standard deviation 1, t(2, 97.5 %) = 4.303.
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert (high - mean, mean - low) == pytest.approx((4.303 / math.sqrt(3), 4.303 / math.sqrt(3)))


def test_one_seed_is_always_unclear():
    for value in (-1e9, 0.0, 1e9):
        assert verdict([value]) == UNCLEAR
    assert "one seed decides nothing" in compare("a minus b", [-5.0], LOWER).why()


def test_seeds_that_agree_decide():
    assert verdict([-0.10, -0.11, -0.12]) == HOLDS
    assert verdict([0.10, 0.11, 0.12]) == DOES_NOT_HOLD


def test_the_best_seed_counts_no_more_than_the_others():
    assert verdict([-5.0, 0.01, 0.01]) == UNCLEAR
    assert verdict([-0.2, -0.1, 0.05]) == UNCLEAR


def test_a_claimed_range_has_two_ends():
    same = Claimed(-0.01, 0.01)
    assert verdict([0.001, -0.001, 0.0], same) == HOLDS
    assert verdict([0.2, 0.21, 0.22], same) == DOES_NOT_HOLD
    assert verdict([-0.2, -0.21, -0.22], same) == DOES_NOT_HOLD
    assert verdict([0.005, 0.02, -0.004], same) == UNCLEAR


def test_a_tie_in_every_seed_is_unclear_and_no_contradiction():
    assert verdict([0.0, 0.0, 0.0]) == UNCLEAR
    assert verdict([1.0, 1.0, 1.0], Claimed(below=1.05)) == HOLDS
    assert verdict([1.1, 1.1, 1.1], Claimed(below=1.05)) == DOES_NOT_HOLD


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_numbers_that_are_none_are_refused(values):
    with pytest.raises(ValueError, match="finite"):
        compare("a minus b", values, LOWER)


def test_a_claim_holds_only_if_all_that_decides_holds():
    good, bad, open_ = ([-0.10, -0.11], [0.10, 0.11], [-1.0, 1.0])
    questions = [compare("q", values, LOWER) for values in (good, bad, open_)]
    assert [one.verdict for one in questions] == [HOLDS, DOES_NOT_HOLD, UNCLEAR]
    assert overall(questions[:1]) == HOLDS
    assert overall([questions[0], questions[2]]) == UNCLEAR
    assert overall(questions) == DOES_NOT_HOLD
    informing = questions[1]._replace(decisive=False)
    assert overall([questions[0], informing]) == HOLDS
    with pytest.raises(ValueError, match="decisive"):
        overall([informing])


def test_the_words_of_a_range():
    assert LOWER.words() == "below 0"
    assert Claimed(above=0.5).words() == "above 0.5"
    assert Claimed(-1, 1).words() == "between -1 and 1"
