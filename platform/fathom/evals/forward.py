"""The forwards that measures need: routed by the model, or with every row forced through all depths."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.errors import ConfigError
from fathom.model.levels import ALL_DEPTHS, LoopOptions
from fathom.model.rows import PackedRows

if TYPE_CHECKING:
    from fathom.model.levels import DepthTrace, Trace
    from fathom.model.looped import LoopedLM

STATE = "as carried to the next depth, before the final norm"
"""What :func:`state_of` gives."""


def routed_trace(model: "LoopedLM", rows: PackedRows, head_chunk_rows: int, read_all: bool = True) -> "Trace":
    """A forward as the model is trained and served: its exit rule chooses every row's depth.

    Args:
        read_all: read every depth that is run, also where the method reads the last alone.
    """
    return model(rows, options=LoopOptions(head_chunk_rows, read_depths=ALL_DEPTHS if read_all else frozenset()))


def forced_trace(model: "LoopedLM", rows: PackedRows, head_chunk_rows: int) -> "Trace":
    """A forward in which every row runs all depths.

    Where rows see the deeper keys of others (duo-causal), these are keys that the exit rule would not have made: such
    losses are those of a model that always goes on, not of single rows that go on alone.
    """
    routes = torch.full_like(rows.ids, model.method.max_depth)
    return model(rows, options=LoopOptions(head_chunk_rows, routes=routes, read_depths=ALL_DEPTHS))


def losses_by_depth(trace: "Trace", count: int) -> Tensor:
    """-log q^(m)[target] of each depth alone, fp64 ``[count, depths]``; NaN where it was not run or not read."""
    device = trace.executed.device
    losses = torch.full((count, len(trace.depths)), torch.nan, dtype=torch.float64, device=device)
    for number, level in enumerate(trace.depths):
        if level.head is not None:
            losses[level.index, number] = -level.log_prob.double()
    return losses


def state_of(level: "DepthTrace") -> Tensor:
    """The looped state ``[n, d]`` of the rows that ran a depth."""
    return level.passed.x


class NotForThisMethod(ConfigError):
    """A measure of something that the model's method does not have."""


@contextlib.contextmanager
def dial(model: "LoopedLM", threshold: float | None = None, max_depth: int | None = None) -> Iterator[None]:
    """The model with another tau or M for a while; None keeps its own."""
    before = model.method
    model.method = replace(
        before,
        threshold=before.threshold if threshold is None else threshold,
        max_depth=before.max_depth if max_depth is None else max_depth,
    )
    try:
        yield
    finally:
        model.method = before


def require_depths(model: "LoopedLM", what: str) -> None:
    """Raise unless the model has depths to compare.

    Raises:
        NotForThisMethod: it has one; names the measure.
    """
    if model.method.max_depth < 2:
        raise NotForThisMethod(
            f"{what} compares depths, and method {model.method.name!r} has one", "measure a model of two depths or more"
        )
