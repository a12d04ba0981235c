"""Losses by depth, whatever the exit rule would have done."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.errors import ConfigError
from fathom.model.rows import PackedRows

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM, Trace


def forced_trace(model: "LoopedLM", rows: PackedRows, head_chunk_rows: int) -> "Trace":
    """A forward in which every row runs all depths.

    Where rows see the deeper keys of others (duo-causal), these are keys that the exit rule would not have made: such
    losses are those of a model that always goes on, not of single rows that go on alone.
    """
    routes = torch.full_like(rows.ids, model.method.max_depth)
    return model(rows, head_chunk_rows=head_chunk_rows, routes=routes)


def losses_by_depth(trace: "Trace", count: int) -> Tensor:
    """-log q^(m)[target] of each depth alone, fp64 ``[count, depths]``; NaN where a row did not run the depth."""
    device = trace.executed.device
    losses = torch.full((count, len(trace.depths)), torch.nan, dtype=torch.float64, device=device)
    for number, level in enumerate(trace.depths):
        losses[level.index, number] = -level.log_prob.double()
    return losses


def require_depths(model: "LoopedLM", what: str) -> None:
    """Raise unless the model has depths to compare.

    Raises:
        ConfigError: it has one; names the measure.
    """
    if model.method.max_depth < 2:
        raise ConfigError(
            f"{what} compares depths, and method {model.method.name!r} has one", "measure a model of two depths or more"
        )
