"""Does the continue probability say what another depth is worth? Gain against g in bins (paper Fig. 6).

The gain of a row at depth m is its loss at m minus its loss at m+1. For rows that continued, the forward itself has
both. For rows that stopped, it depends on what is asked, and the report says which it was:

* ``lookahead``: each stopped row as if it alone had continued, everyone else's route as it was. This is what training
  labels measure, and what a decision is about.
* ``forced``: all rows run all depths. With visibility across depths this changes the keys that everyone sees.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fathom.evals.batches import SIZES, Documents, Sizes, batches, evaluating, nothing_supervised
from fathom.evals.forward import NotForThisMethod, forced_trace, losses_by_depth, require_depths, routed_trace
from fathom.evals.plain import plain
from fathom.model.rows import PackedRows

if TYPE_CHECKING:
    from fathom.model.levels import Trace
    from fathom.model.looped import LoopedLM

BINS = 10

Lookahead = Callable[["LoopedLM", "Trace", PackedRows, int, Tensor], Tensor]
"""(model, trace, rows, depth, chosen) to log q^(depth+1)[target] of the chosen rows of that depth, each as if it alone
had continued: ``fathom.objectives.lookahead`` behind a function."""


class Bin(NamedTuple):
    """Rows with a continue probability from ``low`` to ``high`` (the last bin holds 1 too).

    Attributes:
        rows: how many.
        probability: their mean g.
        gain: their mean gain, nats.
        standard_error: of that mean, rows taken as independent.
    """

    low: float
    high: float
    rows: int
    probability: float
    gain: float
    standard_error: float


class Calibration(NamedTuple):
    """Gain against continue probability.

    Attributes:
        gains: ``lookahead`` or ``forced``.
        threshold: tau.
        bins: over the decisions of all depths; bins without rows are left out.
        by_depth: the same for the decisions after each depth m.
        crossings: where the mean gain crosses zero, linear in g between neighbouring bins; several mean noise, none
            that it never does.
        rows: decisions in all.
    """

    gains: str
    threshold: float
    bins: list[Bin]
    by_depth: dict[int, list[Bin]]
    crossings: list[float]
    rows: int

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return plain(self)


def calibration(
    model: "LoopedLM",
    documents: Documents,
    lookahead: Lookahead | None,
    sizes: Sizes = SIZES,
    bins: int = BINS,
) -> Calibration:
    """Measure the gain of every supervised row at every depth it could have gone on from.

    Args:
        lookahead: measures rows that stopped; None forces all rows through all depths instead.

    Raises:
        NotForThisMethod: the method decides nothing by a continue probability.
        DataError: no token is supervised.
    """
    require_depths(model, "calibration")
    found: dict[int, list[Tensor]] = {}
    with evaluating(model) as device:
        for batch in batches(documents, sizes.tokens_per_forward):
            rows = batch.rows.to(device)
            run = forced_trace if lookahead is None else routed_trace
            trace = run(model, rows, sizes.head_chunk_rows)
            for depth, pairs in _decisions(model, trace, rows, lookahead).items():
                found.setdefault(depth, []).append(pairs.cpu())
    if not found:
        raise NotForThisMethod(
            f"method {model.method.name!r} has no continue probability to calibrate", "measure a method with a decider"
        )
    by_depth = {depth: torch.cat(parts) for depth, parts in sorted(found.items())}
    pooled = torch.cat(list(by_depth.values()))
    if pooled.shape[0] == 0:
        raise nothing_supervised(len(documents))
    filled = fill_bins(pooled, bins)
    return Calibration(
        gains="forced" if lookahead is None else "lookahead",
        threshold=model.method.threshold,
        bins=filled,
        by_depth={depth: fill_bins(pairs, bins) for depth, pairs in by_depth.items()},
        crossings=crossings(filled),
        rows=pooled.shape[0],
    )


def fill_bins(pairs: Tensor, bins: int = BINS) -> list[Bin]:
    """Bins of equal width over (g, gain) pairs ``[rows, 2]``, fp64; those without rows are left out."""
    number = (pairs[:, 0] * bins).long().clamp(0, bins - 1)
    filled = []
    for at in range(bins):
        mine = pairs[number == at]
        rows = mine.shape[0]
        if rows:
            spread = float(mine[:, 1].std()) if rows > 1 else math.nan
            probability, gain = mine.mean(0).tolist()
            filled.append(Bin(at / bins, (at + 1) / bins, rows, probability, gain, spread / math.sqrt(rows)))
    return filled


def crossings(bins: Sequence[Bin]) -> list[float]:
    """Where the mean gain changes its sign, linear between the (mean g, mean gain) of neighbouring bins."""
    found = []
    for left, right in itertools.pairwise(bins):
        if (left.gain < 0) != (right.gain < 0):
            along = left.gain / (left.gain - right.gain)
            found.append(left.probability + along * (right.probability - left.probability))
    return found


def _decisions(model: "LoopedLM", trace: "Trace", rows: PackedRows, lookahead: Lookahead | None) -> dict[int, Tensor]:
    """By depth, (g, gain) ``[n, 2]`` of the supervised rows that executed it and had a continue probability there."""
    losses = losses_by_depth(trace, rows.count)
    found = {}
    for depth, level in enumerate(trace.depths, start=1):
        if level.continue_logit is None or depth == model.method.max_depth:
            continue
        here = losses[level.index, depth - 1]
        deeper = torch.full_like(here, torch.nan)
        if depth < losses.shape[1]:
            deeper = losses[level.index, depth]
        scored = rows.supervised[level.index]
        if lookahead is not None:
            stopped = scored & ~level.goes_on
            deeper = deeper.index_put((stopped,), -lookahead(model, trace, rows, depth, stopped).double())
        pairs = torch.stack((level.continue_logit.double().sigmoid(), here - deeper), dim=1)[scored]
        found[depth] = pairs[torch.isfinite(pairs[:, 1])]
    return found
