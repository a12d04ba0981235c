"""The rule by which a claim is judged: paired over seeds, with an interval, never by the best run.

Each seed gives one number, usually the difference between two models that share the seed's base weights and data. The
95 % t-interval of its mean is laid against the range that the claim allows:

* all of the interval inside: **holds**;
* all of it outside: **does not hold**;
* anything else, and any single seed: **unclear at this scale**.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

Verdict = Literal["holds", "does not hold", "unclear at this scale"]
HOLDS: Verdict = "holds"
DOES_NOT_HOLD: Verdict = "does not hold"
UNCLEAR: Verdict = "unclear at this scale"

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 % by degrees of freedom from 1; with more than 30 the last is a little too wide."""


class Claimed(NamedTuple):
    """The values that a claim allows, without the ends."""

    above: float = -math.inf
    below: float = math.inf

    def words(self) -> str:
        """For the report: ``above 0``, ``between -0.01 and 0.01``."""
        if math.isinf(self.below):
            return f"above {self.above:g}"
        if math.isinf(self.above):
            return f"below {self.below:g}"
        return f"between {self.above:g} and {self.below:g}"


class Comparison(NamedTuple):
    """One question put to every seed.

    Attributes:
        question: what the number says, for example ``NLL of TaH2 minus Standard``.
        values: one per seed, in the order of the seeds.
        claimed: where the claim says that they are.
        mean, low, high: their mean and the interval of the mean; with one seed the interval is infinite.
        verdict: by the rule above.
        decisive: whether the claim's own verdict depends on it; others inform.
    """

    question: str
    values: list[float]
    claimed: Claimed
    mean: float
    low: float
    high: float
    verdict: Verdict
    decisive: bool

    def why(self) -> str:
        """One sentence with the numbers."""
        if len(self.values) < 2:
            return f"{self.question}: {self.mean:.4g} in the only seed; one seed decides nothing"
        return (
            f"{self.question}: {self.mean:.4g} on average, between {self.low:.4g} and {self.high:.4g} with 95 % "
            f"confidence over {len(self.values)} seeds; claimed {self.claimed.words()}"
        )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and the two ends of its 95 % t-interval; infinite for one value.

    Raises:
        ValueError: no value, or one that is no number.
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"a comparison needs finite numbers, one per seed, not {list(values)}")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return mean, -math.inf, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = T_975[min(count - 1, len(T_975)) - 1] * math.sqrt(variance / count)
    return mean, mean - half, mean + half


def compare(question: str, values: Sequence[float], claimed: Claimed, decisive: bool = True) -> Comparison:
    """Judge one number per seed by the rule."""
    mean, low, high = interval(values)
    verdict = UNCLEAR
    if low > claimed.above and high < claimed.below:
        verdict = HOLDS
    elif high <= claimed.above or low >= claimed.below:
        # An interval without width that touches the end is a tie in every seed: it contradicts nothing.
        verdict = UNCLEAR if low == high and low in claimed else DOES_NOT_HOLD
    return Comparison(question, list(values), claimed, mean, low, high, verdict, decisive)


def overall(comparisons: Sequence[Comparison]) -> Verdict:
    """A claim holds if all its decisive comparisons do, and does not hold as soon as one of them does not."""
    verdicts = {comparison.verdict for comparison in comparisons if comparison.decisive}
    if not verdicts:
        raise ValueError("a claim needs at least one decisive comparison")
    if DOES_NOT_HOLD in verdicts:
        return DOES_NOT_HOLD
    return HOLDS if verdicts == {HOLDS} else UNCLEAR
