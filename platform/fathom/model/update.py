"""The update axis: what a row enters its first and its next depth with, and the state that it leaves a depth with."""

import torch
from torch import Tensor, nn

from fathom.model.state import Passed, RowState


class Update(nn.Module):
    """An update; this one enters every depth with the body's last output (AbbIE-C, methods 5.1).

    Attributes:
        draws_state: whether the first state is random (``start`` gets noise).
        norm_before_coda: whether the coda reads the final norm of the state.
        top_k: how many of the likeliest tokens' embeddings ``enter`` mixes.
        needs_gate: whether it reads a router's weight of the pass (``state.gate``).
        follows_plan: whether a state is whole only at the depth that a router planned.
        one_depth: whether nothing can enter a second depth.
    """

    draws_state = False
    norm_before_coda = False
    top_k = 0
    needs_gate = False
    follows_plan = False
    one_depth = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def start(self, z: Tensor, noise: Tensor | None) -> Tensor:
        """u^(1) ``[rows, d]`` from the prelude's output z and standard normal noise, both ``[rows, d]``."""
        return z

    def carry(self, state: RowState, y: Tensor, depth: Tensor) -> Tensor:
        """The state x ``[rows, d]`` after a pass whose output is y ``[rows, d]``."""
        return y

    def enter(self, passed: Passed) -> Tensor:
        """u^(m+1) ``[rows, d]`` of rows that continue."""
        return passed.x

    def reset(self, generator: torch.Generator) -> None:
        """Initialise the added parameters."""

    @property
    def flops(self) -> int:
        """Of ``enter``, per row (and of the pass before it, where ``carry`` has products)."""
        return 0

    @property
    def first_flops(self) -> int:
        """Of ``start``, per row (and of the first ``carry``)."""
        return 0
