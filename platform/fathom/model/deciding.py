"""The deciding heads of the routing axis: a continue probability g per row and depth. Stop probabilities are 1 - g."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fathom.model.state import Passed
from fathom.model.updater import reset_linears


class Plan(NamedTuple):
    """What a router decides before the first pass, over its rows.

    Attributes:
        logits: fp32 ``[rows, choices]``.
        gate: fp32 ``[rows]``, weight of the first pass.
        depth: int64 ``[rows]``, the depth chosen for the row, 0 where the router decides depth by depth.
    """

    logits: Tensor
    gate: Tensor
    depth: Tensor


class DecidingHead(nn.Module):
    """A head that gives a continue logit for every row and depth but the last.

    Args:
        width: d.
        max_depth: M.

    Attributes:
        per_depth: whether it is asked after every depth; if not, its plan is all it says.
        has_depths: whether it has weights of its own for each depth, so that M cannot grow after training.
        gives_gate: whether its plan weighs the passes.
        gives_depth: whether its plan chooses each row's depth.
        top_k: how many of the largest probabilities it reads.
        tap_shares: which inner states of the body it reads, as shares of its layers.
    """

    per_depth = True
    has_depths = False
    gives_gate = False
    gives_depth = False
    tap_shares: tuple[float, ...] = ()

    def __init__(self, width: int, max_depth: int) -> None:
        super().__init__()
        self.width, self.max_depth = width, max_depth

    @property
    def top_k(self) -> int:
        return 0

    def plan(self, u: Tensor) -> Plan | None:
        """Decisions before the first pass, from its input u ``[rows, d]``; None for heads that make none."""
        return None

    def logit(self, passed: Passed) -> Tensor:
        """Continue logit ``[rows]``, fp32 or wider."""
        raise NotImplementedError

    def next_gate(self, passed: Passed, logit: Tensor) -> Tensor:
        """Weight ``[rows]`` of the next pass."""
        return passed.state.gate

    def survive(self, mass: Tensor, continue_prob: Tensor) -> Tensor:
        """Mass that deeper depths share, from the mass that reached this one."""
        return mass * continue_prob

    def reset(self, generator: torch.Generator) -> None:
        """Initialise."""
        reset_linears(self, generator)

    @property
    def flops(self) -> int:
        """Of ``logit``, per row."""
        raise NotImplementedError

    @property
    def plan_flops(self) -> int:
        """Of ``plan``, per row."""
        return 0
