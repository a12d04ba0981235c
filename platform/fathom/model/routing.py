"""Exit rules: which rows go on to the next depth. Decisions are constants; no gradient passes through them."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Decision(NamedTuple):
    """What an exit rule may look at, about rows that have just run a depth.

    Attributes:
        continue_prob: g ``[rows]`` at this depth, None for methods without a decider.
        depth: int64 ``[rows]``, the depth just run.
        generates: bool ``[rows]``, rows whose next token is a training target or will be sampled.
        max_depth: M, one for all or per row.
        threshold: tau, one for all or per row.
    """

    continue_prob: Tensor | None
    depth: Tensor
    generates: Tensor
    max_depth: Tensor | int
    threshold: Tensor | float


class Routing(Protocol):
    """An exit rule."""

    needs_decider: bool

    def goes_on(self, rows: Decision) -> Tensor:
        """Bool ``[rows]``: continue to the next depth."""
        ...


class DeciderThreshold:
    """Continue iff g > tau, strictly, and m < M (methods 1.1)."""

    needs_decider = True

    def goes_on(self, rows: Decision) -> Tensor:
        if rows.continue_prob is None:
            raise ValueError("the decider's threshold needs continue probabilities")
        return (rows.continue_prob > rows.threshold) & (rows.depth < rows.max_depth)


class GeneratingRows:
    """All M depths for rows that generate, one for other prompt tokens (TaH2-fixed, methods 1.12)."""

    needs_decider = False

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.generates & (rows.depth < rows.max_depth)


class OnePass:
    """Nobody goes on: the base model."""

    needs_decider = False

    def goes_on(self, rows: Decision) -> Tensor:
        return torch.zeros_like(rows.generates)


ROUTINGS: dict[str, Routing] = {
    "decider_threshold": DeciderThreshold(),
    "generating_rows": GeneratingRows(),
    "one_pass": OnePass(),
}
