"""Exit rules: which rows go on to the next depth. Decisions are constants; no gradient passes through them."""

from typing import Protocol

import torch
from torch import Tensor


class Routing(Protocol):
    """An exit rule."""

    needs_decider: bool

    def goes_on(
        self,
        continue_prob: Tensor | None,
        depth: Tensor,
        generates: Tensor,
        max_depth: Tensor | int,
        threshold: Tensor | float,
    ) -> Tensor:
        """Bool ``[rows]``: continue to ``depth + 1``.

        Args:
            continue_prob: g ``[rows]`` at this depth, None for methods without a decider.
            depth: int64 ``[rows]``, the depth just run.
            generates: bool ``[rows]``, rows whose next token is a training target or will be sampled.
            max_depth: M, one for all or per row.
            threshold: tau, one for all or per row.
        """
        ...


class DeciderThreshold:
    """Continue iff g > tau, strictly, and m < M (methods 1.1)."""

    needs_decider = True

    def goes_on(
        self,
        continue_prob: Tensor | None,
        depth: Tensor,
        generates: Tensor,
        max_depth: Tensor | int,
        threshold: Tensor | float,
    ) -> Tensor:
        if continue_prob is None:
            raise ValueError("the decider's threshold needs continue probabilities")
        return (continue_prob > threshold) & (depth < max_depth)


class GeneratingRows:
    """All M depths for rows that generate, one for other prompt tokens (TaH2-fixed, methods 1.12)."""

    needs_decider = False

    def goes_on(
        self,
        continue_prob: Tensor | None,
        depth: Tensor,
        generates: Tensor,
        max_depth: Tensor | int,
        threshold: Tensor | float,
    ) -> Tensor:
        return generates & (depth < max_depth)


class OnePass:
    """Nobody goes on: the base model."""

    needs_decider = False

    def goes_on(
        self,
        continue_prob: Tensor | None,
        depth: Tensor,
        generates: Tensor,
        max_depth: Tensor | int,
        threshold: Tensor | float,
    ) -> Tensor:
        return torch.zeros_like(generates)


ROUTINGS: dict[str, Routing] = {
    "decider_threshold": DeciderThreshold(),
    "generating_rows": GeneratingRows(),
    "one_pass": OnePass(),
}
