"""Quality against compute: y over log2 of mean decode FLOPs, its slope, and y at matched compute (methods 12).

A point of a curve is one setting of a dial (a cutoff of the answer's length, a threshold). All points are over the same
items, so the bootstrap resamples items and moves every point of a draw together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fathom.errors import DataError
from fathom.evals.intervals import Estimate, draws, percentile_interval
from fathom.evals.plain import plain


class Measured(NamedTuple):
    """One setting, item by item; the point is (log2 of sum of FLOPs over sum of units, sum of totals over it).

    Attributes:
        setting: of the dial.
        flops: ``[items]`` decode FLOPs.
        totals: ``[items]`` sum of scores, or of NLL.
        units: ``[items]`` what the totals are divided by: answers, or tokens.
    """

    setting: float
    flops: Sequence[float]
    totals: Sequence[float]
    units: Sequence[float]


class Point(NamedTuple):
    """A setting, mean decode FLOPs per unit, and y with its interval."""

    setting: float
    flops: float
    y: Estimate


class Curve(NamedTuple):
    """y against log2 of mean decode FLOPs.

    Attributes:
        name: of the model or method.
        y_name: what y is, with its unit.
        unit: what FLOPs are a mean over: ``answer`` or ``token``.
        dial: what the settings are.
        points: by growing FLOPs.
        slope: y per doubling of decode FLOPs, ordinary least squares, interval by bootstrap over items.
        intercept: y at 1 FLOP, the line's other number.
        r_squared: of that line; NaN where y is constant.
        items: how many were resampled.
        seed: of the bootstrap.
    """

    name: str
    y_name: str
    unit: str
    dial: str
    points: list[Point]
    slope: Estimate
    intercept: float
    r_squared: float
    items: int
    seed: int

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return plain(self)


class Matched(NamedTuple):
    """Two curves at the same mean decode FLOPs; ``difference`` is second minus first."""

    flops: float
    first: float
    second: float
    difference: Estimate


class Line(NamedTuple):
    """An ordinary least squares fit; each is ``[...]``, one per fitted series."""

    slope: np.ndarray
    intercept: np.ndarray
    r_squared: np.ndarray


def fit(x: np.ndarray, y: np.ndarray) -> Line:
    """Least squares of y on x, both ``[..., points]``; NaN slope where all x are the same."""
    dx = x - x.mean(-1, keepdims=True)
    dy = y - y.mean(-1, keepdims=True)
    xx, xy, yy = (dx * dx).sum(-1), (dx * dy).sum(-1), (dy * dy).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = xy / xx
        r_squared = xy * xy / (xx * yy)
    return Line(slope, y.mean(-1) - slope * x.mean(-1), r_squared)


def make_curve(name: str, y_name: str, unit: str, dial: str, settings: Sequence[Measured], seed: int = 0) -> Curve:
    """The curve through several settings.

    Raises:
        DataError: fewer than two settings, no items, items that differ in number, or a setting that cost nothing.
    """
    _check(name, settings)
    ordered = sorted(settings, key=lambda measured: sum(measured.flops) / sum(measured.units))
    items = len(ordered[0].flops)
    x, y = _points(ordered, np.ones((1, items)))
    drawn_x, drawn_y = _points(ordered, draws(items, seed))
    line = fit(x[0], y[0])
    # One item drawn again and again is always itself: no interval.
    spread = items > 1
    slopes = fit(drawn_x, drawn_y).slope if spread else np.empty(0)
    return Curve(
        name=name,
        y_name=y_name,
        unit=unit,
        dial=dial,
        points=[
            Point(
                measured.setting,
                float(2 ** x[0, number]),
                percentile_interval(float(y[0, number]), drawn_y[:, number] if spread else np.empty(0)),
            )
            for number, measured in enumerate(ordered)
        ],
        slope=percentile_interval(float(line.slope), slopes),
        intercept=float(line.intercept),
        r_squared=float(line.r_squared),
        items=items,
        seed=seed,
    )


def y_at(curve: Curve, flops: float) -> float:
    """y at that many mean decode FLOPs, linear in log2 FLOPs between the two neighbouring points.

    Raises:
        DataError: outside the curve: nothing was measured there.
    """
    x = np.log2([point.flops for point in curve.points])
    at = float(np.log2(flops))
    # Rounding of log2 there and back may not push an end point out.
    if not x[0] - 1e-9 <= at <= x[-1] + 1e-9:
        raise DataError(
            f"curve {curve.name!r} has no point at {flops:.4g} FLOPs: it spans {2 ** x[0]:.4g} to {2 ** x[-1]:.4g}",
            "compare where the curves overlap, or measure more settings",
        )
    return float(np.interp(at, x, [point.y.value for point in curve.points]))


def match(
    first: Sequence[Measured],
    second: Sequence[Measured],
    names: tuple[str, str] = ("first", "second"),
    at: Sequence[float] | None = None,
    seed: int = 0,
) -> list[Matched]:
    """Two models on the same items at matched compute, with a paired bootstrap over items.

    A draw in which a curve's own FLOPs moved past the point keeps the curve's end value.

    Args:
        first: settings of the first model.
        second: of the second, items in the same order.
        names: for messages.
        at: mean decode FLOPs per unit; default five, evenly spaced in log2 over the overlap.

    Raises:
        DataError: other items, or curves that do not overlap at these FLOPs.
    """
    for name, settings in zip(names, (first, second), strict=True):
        _check(name, settings)
    items = len(first[0].flops)
    if len(second[0].flops) != items:
        raise DataError(
            f"{names[0]!r} was measured on {items} items, {names[1]!r} on {len(second[0].flops)}",
            "measure both on the same items",
        )
    weights = np.concatenate([np.ones((1, items)), draws(items, seed)])
    series = [_sorted(*_points(settings, weights)) for settings in (first, second)]
    low = max(x[0, 0] for x, _ in series)
    high = min(x[0, -1] for x, _ in series)
    wanted = np.linspace(low, high, 5) if at is None else np.log2(np.asarray(at, dtype=np.float64))
    if low > high or (wanted < low - 1e-9).any() or (wanted > high + 1e-9).any():
        spans = ", ".join(
            f"{name!r} {2 ** x[0, 0]:.4g} to {2 ** x[0, -1]:.4g}" for name, (x, _) in zip(names, series, strict=True)
        )
        raise DataError(f"the curves do not overlap there; FLOPs: {spans}", "measure settings of a common cost")
    ys = [np.stack([np.interp(wanted, row, y[number]) for number, row in enumerate(x)]) for x, y in series]
    found = []
    for number, x in enumerate(wanted):
        difference = ys[1][:, number] - ys[0][:, number]
        resampled = difference[1:] if items > 1 else np.empty(0)
        interval = percentile_interval(float(difference[0]), resampled)
        found.append(Matched(float(2**x), float(ys[0][0, number]), float(ys[1][0, number]), interval))
    return found


def _points(settings: Sequence[Measured], weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and y ``[draws, settings]`` under item weights ``[draws, items]``; a draw without units gives NaN."""
    flops, totals, units = (
        weights @ np.asarray([getattr(measured, field) for measured in settings], dtype=np.float64).T
        for field in ("flops", "totals", "units")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(flops / units), totals / units


def _sorted(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(x, axis=-1, kind="stable")
    return np.take_along_axis(x, order, -1), np.take_along_axis(y, order, -1)


def _check(name: str, settings: Sequence[Measured]) -> None:
    if len(settings) < 2:
        raise DataError(f"curve {name!r} has {len(settings)} settings", "give at least two cutoffs or thresholds")
    counts = {len(column) for measured in settings for column in (measured.flops, measured.totals, measured.units)}
    if len(counts) != 1 or counts == {0}:
        raise DataError(f"curve {name!r} has settings over {sorted(counts)} items", "measure each on the same items")
    for measured in settings:
        if sum(measured.units) <= 0 or sum(measured.flops) <= 0:
            raise DataError(
                f"curve {name!r}: setting {measured.setting:g} cost no FLOPs at all", "leave this setting out"
            )
