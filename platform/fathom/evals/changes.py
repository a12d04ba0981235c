"""What another depth changes: shares of tokens whose loss stays the same, and whose loss gets worse (methods 1.11)."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fathom.evals.batches import SIZES, Documents, Sizes, batches, evaluating, nothing_supervised
from fathom.evals.forward import NotForThisMethod, forced_trace, losses_by_depth, require_depths
from fathom.evals.plain import plain

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM

TOLERANCE = 1e-3
"""Nats; the published measure of a wasted loop."""


class Change(NamedTuple):
    """Loss at one depth against loss at another, over supervised rows that were read out at both.

    Attributes:
        from_depth: the shallower.
        to_depth: the deeper.
        rows: how many.
        unchanged: share with a change of at most the tolerance.
        worse: share with a higher loss, by however little.
        worse_beyond: share with a loss higher by more than the tolerance.
        better_beyond: share with a loss lower by more than the tolerance.
        mean_change: mean of loss at ``to_depth`` minus loss at ``from_depth``, nats.
    """

    from_depth: int
    to_depth: int
    rows: int
    unchanged: float
    worse: float
    worse_beyond: float
    better_beyond: float
    mean_change: float


class DepthChanges(NamedTuple):
    """Changes from each depth to the next, and from the first to the last.

    Attributes:
        tolerance: nats.
        routes: ``forced``: every row ran all depths, so deeper keys of all tokens were visible.
        steps: from m to m+1.
        whole: from the first depth to the last that any row was read out at.
    """

    tolerance: float
    routes: str
    steps: list[Change]
    whole: Change

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return plain(self)


def compare(losses: Tensor, from_depth: int, to_depth: int, tolerance: float = TOLERANCE) -> Change:
    """Compare two columns of losses ``[rows, depths]`` (NaN: not read out); depths count from 1."""
    change = losses[:, to_depth - 1] - losses[:, from_depth - 1]
    change = change[torch.isfinite(change)]
    rows = change.numel()

    def part(mask: Tensor) -> float:
        return float(mask.double().mean()) if rows else 0.0

    return Change(
        from_depth,
        to_depth,
        rows,
        unchanged=part(change.abs() <= tolerance),
        worse=part(change > 0),
        worse_beyond=part(change > tolerance),
        better_beyond=part(change < -tolerance),
        mean_change=float(change.mean()) if rows else 0.0,
    )


def depth_changes(
    model: "LoopedLM",
    documents: Documents,
    sizes: Sizes = SIZES,
    tolerance: float = TOLERANCE,
) -> DepthChanges:
    """Run every supervised row through all depths and compare its losses.

    Raises:
        NotForThisMethod: the model has one depth, or reads out one only.
        DataError: no token is supervised.
    """
    require_depths(model, "the share of unchanged tokens")
    parts = []
    with evaluating(model) as device:
        for batch in batches(documents, sizes.tokens_per_forward):
            rows = batch.rows.to(device)
            losses = losses_by_depth(forced_trace(model, rows, sizes.head_chunk_rows), rows.count)
            parts.append(losses[rows.supervised].cpu())
    losses = torch.cat(parts) if parts else torch.empty(0, model.method.max_depth)
    if losses.shape[0] == 0:
        raise nothing_supervised(len(documents))
    read = [number + 1 for number in range(losses.shape[1]) if bool(torch.isfinite(losses[:, number]).any())]
    if len(read) < 2:
        raise NotForThisMethod(
            f"method {model.method.name!r} reads out one depth only: {read}", "measure a method that reads out several"
        )
    steps = [compare(losses, depth, depth + 1, tolerance) for depth in read if depth + 1 in read]
    return DepthChanges(tolerance, "forced", steps, compare(losses, read[0], read[-1], tolerance))
