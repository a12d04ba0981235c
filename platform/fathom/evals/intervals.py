"""Intervals of 95% over items: what another draw of the same kind of items could have shown."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.959963984540054
DRAWS = 2000


class Estimate(NamedTuple):
    """A value with the ends of its 95% interval; NaN ends where the data cannot give one."""

    value: float
    low: float
    high: float


def share(scores: Sequence[float], samples: int = 1) -> Estimate:
    """Mean of scores in 0..1, one per item, with Wilson's interval.

    Wilson's interval, unlike a bootstrap, stays honest where all items are right or all wrong. Its number of
    observations is what the spread between items is worth, p (1 - p) / s^2 times the items: between the number of items
    (samples of an item always agree; also where s = 0) and items times samples (they are independent).

    Args:
        scores: mean score of each item over its samples.
        samples: how many samples a score is the mean of.
    """
    if not scores:
        return Estimate(math.nan, math.nan, math.nan)
    values = np.asarray(scores, dtype=np.float64)
    items, p = len(values), float(values.mean())
    spread = float(values.var(ddof=1)) if items > 1 else 0.0
    worth = items * p * (1 - p) / spread if spread > 0 else float(items)
    n = min(max(worth, float(items)), float(items * samples))
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    # Exact at the ends, where the difference of equal numbers would leave a rounding error.
    return Estimate(p, centre - half if p > 0 else 0.0, centre + half if p < 1 else 1.0)


def draws(items: int, seed: int, count: int = DRAWS) -> np.ndarray:
    """Bootstrap draws of items with replacement, as how often each was drawn: float64 ``[count, items]``."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(items, np.full(items, 1.0 / items), size=count).astype(np.float64)


def percentile_interval(value: float, resampled: np.ndarray) -> Estimate:
    """A value and the 2.5% and 97.5% quantiles of what it was in bootstrap draws; NaN draws are left out."""
    finite = resampled[np.isfinite(resampled)]
    if len(finite) == 0:
        return Estimate(value, math.nan, math.nan)
    low, high = np.quantile(finite, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
