"""Intervals and curves against formulas written out and loops."""

import math

import numpy as np
import pytest

from fathom.errors import DataError
from fathom.evals.curve import Measured, make_curve, match, y_at
from fathom.evals.intervals import draws, share
from fathom.evals.plain import plain


def test_greedy_share_has_wilsons_interval():
    found = share([1.0] * 7 + [0.0] * 3)
    # Newcombe 1998: (2np + z^2 -+ z sqrt(z^2 + 4 n p q)) / 2 (n + z^2)
    n, p, z = 10, 0.7, 1.959963984540054
    ends = [
        (2 * n * p + z * z + sign * z * math.sqrt(z * z + 4 * n * p * (1 - p))) / (2 * (n + z * z)) for sign in (-1, 1)
    ]
    assert found.value == pytest.approx(0.7)
    # The spread of ten 0/1 scores is n / (n - 1) p q, so they are worth nine tenths of ten; never less than ten.
    assert [found.low, found.high] == pytest.approx(ends)


def test_all_right_is_not_certain():
    found = share([1.0] * 5)
    assert share([0.0] * 6).low == 0.0
    assert found.value == 1.0 and found.low == pytest.approx(1 / (1 + 1.959963984540054**2 / 5)) and found.high == 1.0


def test_samples_that_agree_add_nothing_and_independent_ones_do():
    agreeing = share([1.0, 0.0] * 20, samples=8)
    assert agreeing == share([1.0, 0.0] * 20)
    mixed = share([0.5, 0.375, 0.625, 0.5] * 10, samples=8)
    assert mixed.high - mixed.low < 0.5 * (agreeing.high - agreeing.low)


@pytest.mark.parametrize(("samples", "between"), [(1, 0.0), (4, 0.3), (16, 0.1)])
def test_the_interval_covers_the_truth_about_95_times_in_100(samples: int, between: float):
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        rates = np.clip(0.6 + between * generator.choice([-1, 1], size=30), 0, 1)
        found = share(list(generator.binomial(samples, rates) / samples), samples)
        covered += found.low <= 0.6 <= found.high
    assert 0.91 <= covered / 400 <= 0.995


def noisy(seed: int, items: int = 40, slope: float = 3.0) -> list[Measured]:
    """y = slope log2(flops) + an item's own level + noise."""
    generator = np.random.default_rng(seed)
    level = generator.normal(0, 5, items)
    settings = []
    for setting in (1, 2, 4, 8, 16):
        y = slope * math.log2(setting) + level + generator.normal(0, 1, items)
        settings.append(Measured(setting, [float(setting)] * items, y.tolist(), [1.0] * items))
    return settings


def test_slope_and_r_squared_are_those_of_least_squares_written_out():
    settings = noisy(0)
    curve = make_curve("model", "y", "answer", "cutoff", settings)
    xs = [math.log2(sum(s.flops) / len(s.flops)) for s in settings]
    ys = [sum(s.totals) / len(s.totals) for s in settings]
    mx, my = sum(xs) / 5, sum(ys) / 5
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)
    left = sum((y - my - slope * (x - mx)) ** 2 for x, y in zip(xs, ys, strict=True))
    assert curve.slope.value == pytest.approx(slope)
    assert curve.r_squared == pytest.approx(1 - left / sum((y - my) ** 2 for y in ys))
    assert curve.intercept == pytest.approx(my - slope * mx)
    assert [point.y.value for point in curve.points] == pytest.approx(ys)
    assert [point.flops for point in curve.points] == pytest.approx([1, 2, 4, 8, 16])


def test_the_bootstrap_is_a_loop_over_drawn_items():
    settings = noisy(3, items=6)
    curve = make_curve("model", "y", "answer", "cutoff", settings, seed=5)
    slopes = []
    for counts in draws(6, 5):
        drawn = [item for item, count in enumerate(counts) for _ in range(int(count))]
        xs = [math.log2(sum(s.flops[item] for item in drawn) / len(drawn)) for s in settings]
        ys = [sum(s.totals[item] for item in drawn) / len(drawn) for s in settings]
        slopes.append(np.polyfit(xs, ys, 1)[0])
    assert [curve.slope.low, curve.slope.high] == pytest.approx(np.quantile(slopes, [0.025, 0.975]).tolist())
    assert make_curve("model", "y", "answer", "cutoff", settings, seed=5) == curve


def test_the_slopes_interval_covers_the_true_slope():
    curves = [make_curve("m", "y", "answer", "cutoff", noisy(seed)) for seed in range(40)]
    covered = sum(curve.slope.low <= 3.0 <= curve.slope.high for curve in curves)
    assert covered >= 34, "95% intervals of 40 draws should cover about 38 times"
    assert all(curve.slope.low < curve.slope.value < curve.slope.high for curve in curves)


def test_units_weigh_items():
    settings = [Measured(tau, [10.0 * tau, 90.0 * tau], [1.0 * tau, 6.0], [1.0, 3.0]) for tau in (1, 2)]
    curve = make_curve("m", "NLL", "token", "threshold", settings)
    assert [point.flops for point in curve.points] == pytest.approx([25, 50])
    assert [point.y.value for point in curve.points] == pytest.approx([7 / 4, 2])
    assert curve.slope.value == pytest.approx(0.25)


def test_interpolation_is_linear_in_log2_flops_and_never_beyond():
    settings = [Measured(f, [f], [y], [1.0]) for f, y in ((4.0, 10.0), (16.0, 30.0), (64.0, 30.0))]
    curve = make_curve("m", "y", "answer", "cutoff", settings)
    assert y_at(curve, 8.0) == pytest.approx(20) and y_at(curve, 32.0) == pytest.approx(30)
    assert y_at(curve, 4.0) == pytest.approx(10) and y_at(curve, 64.0) == pytest.approx(30)
    with pytest.raises(DataError, match="spans 4 to 64"):
        y_at(curve, 65.0)
    assert math.isnan(curve.slope.low), "one item has no interval"


def test_matched_compute_pairs_the_items():
    first = noisy(0)
    second = [s._replace(totals=[y + 2 for y in s.totals], flops=[2 * f for f in s.flops]) for s in first]
    found = match(first, second)
    assert [found[0].flops, found[-1].flops] == pytest.approx([2, 16])
    lines = [make_curve(name, "y", "answer", "cutoff", settings) for name, settings in (("a", first), ("b", second))]
    for entry in found:
        apart = y_at(lines[1], entry.flops) - y_at(lines[0], entry.flops)
        assert entry.difference.value == pytest.approx(apart)
        assert entry.difference.low <= apart <= entry.difference.high
        # The items' own levels (spread 5) cancel; unpaired, the interval would be about 4 wide.
        assert entry.difference.high - entry.difference.low < 2


def test_curves_that_share_no_compute_are_refused():
    first = noisy(0)
    far = [s._replace(flops=[1000 * f for f in s.flops]) for s in first]
    with pytest.raises(DataError, match="do not overlap"):
        match(first, far)
    with pytest.raises(DataError, match="same items"):
        match(first, noisy(0, items=3))
    with pytest.raises(DataError, match="do not overlap"):
        match(first, first, at=[17.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "0 settings"),
        ([Measured(1, [1.0], [1.0], [1.0])], "1 settings"),
        ([Measured(1, [1.0], [1.0], [1.0]), Measured(2, [1.0, 2.0], [1.0, 1.0], [1.0, 1.0])], "items"),
        ([Measured(1, [], [], []), Measured(2, [], [], [])], "items"),
        ([Measured(1, [1.0], [1.0], [1.0]), Measured(2, [0.0], [1.0], [1.0])], "cost no FLOPs"),
    ],
)
def test_a_curve_without_two_points_is_refused(settings: list[Measured], message: str):
    with pytest.raises(DataError, match=message):
        make_curve("m", "y", "answer", "cutoff", settings)


def test_settings_of_one_cost_have_no_slope_and_json_says_null():
    curve = make_curve("m", "y", "answer", "cutoff", [Measured(t, [5.0], [1.0], [1.0]) for t in (1, 2)])
    assert math.isnan(curve.slope.value)
    assert plain(curve)["slope"] == {"value": None, "low": None, "high": None}
    assert plain({1: (2.0, math.inf)}) == {"1": [2.0, None]}
