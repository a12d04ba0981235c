"""Does the looped state settle? How far it moves and turns from depth to depth, and what that does to NLL."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fathom.evals.batches import SIZES, Documents, Sizes, batches, evaluating, nothing_supervised
from fathom.evals.forward import STATE, forced_trace, losses_by_depth, require_depths, state_of
from fathom.evals.plain import plain

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM


class Spread(NamedTuple):
    """Of one number over tokens."""

    mean: float
    median: float
    p90: float


class Iteration(NamedTuple):
    """Supervised rows at one depth, all forced through all depths.

    Attributes:
        depth: m.
        norm: |x_m|.
        relative_change: |x_m - x_{m-1}| / |x_m|; None at the first depth.
        direction_change: 1 - cos(x_m, x_{m-1}); None at the first depth.
        nll: mean NLL of this depth alone, nats; NaN where the depth is not read out.
    """

    depth: int
    norm: Spread
    relative_change: Spread | None
    direction_change: Spread | None
    nll: float


class Convergence(NamedTuple):
    """Iterations of the looped state.

    Attributes:
        state: which state it is.
        iterations: by depth.
        rows: supervised rows.
    """

    state: str
    iterations: list[Iteration]
    rows: int

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return plain(self)


def convergence(
    model: "LoopedLM",
    documents: Documents,
    sizes: Sizes = SIZES,
) -> Convergence:
    """Run every row through all depths and follow the state of supervised rows.

    Raises:
        NotForThisMethod: the model has one depth.
        DataError: no token is supervised.
    """
    require_depths(model, "convergence")
    norms: dict[int, list[Tensor]] = {}
    moved: dict[int, list[Tensor]] = {}
    turned: dict[int, list[Tensor]] = {}
    losses: list[Tensor] = []
    with evaluating(model) as device:
        for batch in batches(documents, sizes.tokens_per_forward):
            rows = batch.rows.to(device)
            trace = forced_trace(model, rows, sizes.head_chunk_rows)
            losses.append(losses_by_depth(trace, rows.count)[rows.supervised].cpu())
            previous: Tensor | None = None
            for depth, level in enumerate(trace.depths, start=1):
                state = state_of(level)[rows.supervised[level.index]].double().cpu()
                norms.setdefault(depth, []).append(state.norm(dim=-1))
                if previous is not None:
                    moved.setdefault(depth, []).append((state - previous).norm(dim=-1) / state.norm(dim=-1))
                    turned.setdefault(depth, []).append(1 - torch.cosine_similarity(state, previous, dim=-1))
                previous = state
    nll = torch.cat(losses) if losses else torch.empty(0, 0)
    if nll.shape[0] == 0:
        raise nothing_supervised(len(documents))
    iterations = [
        Iteration(
            depth,
            spread(torch.cat(norms[depth])),
            spread(torch.cat(moved[depth])) if depth in moved else None,
            spread(torch.cat(turned[depth])) if depth in turned else None,
            float(nll[:, depth - 1].nanmean()),
        )
        for depth in sorted(norms)
    ]
    return Convergence(STATE, iterations, nll.shape[0])


def spread(values: Tensor) -> Spread:
    """Mean, median and 90% quantile of ``[rows]``."""
    median, p90 = (float(torch.quantile(values, share)) for share in (0.5, 0.9))
    return Spread(float(values.mean()), median, p90)
