"""Every deciding head by name. TaH2's own is in :mod:`fathom.model.decider`."""

import torch
from torch import Tensor, nn

from fathom.model.decider import SCORE_STD, Decider
from fathom.model.deciding import DecidingHead, Plan
from fathom.model.state import Passed
from fathom.model.updater import reset_linears


class ExitGate(DecidingHead):
    """lambda = sigma(w h + b) is the probability to exit; the continue logit is its negative (Ouro, PonderNet, ACT;
    methods 3.1, 8)."""

    def __init__(self, width: int, max_depth: int) -> None:
        super().__init__(width, max_depth)
        self.gate = nn.Linear(width, 1)

    def logit(self, passed: Passed) -> Tensor:
        return -_narrow(self.gate, self.reads(passed))

    def reads(self, passed: Passed) -> Tensor:
        """What the gate looks at, ``[rows, d]``."""
        return passed.h

    def reset(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.gate.weight, std=SCORE_STD, generator=generator)
        nn.init.zeros_(self.gate.bias)

    @property
    def flops(self) -> int:
        return 2 * self.width


class DetachedExitGate(ExitGate):
    """Ouro's stage II: the gate learns on states that it does not change."""

    def reads(self, passed: Passed) -> Tensor:
        return passed.h.detach()


class ActGate(ExitGate):
    """ACT: halting probabilities are summed, not multiplied; what is left after a depth is mass - h."""

    def survive(self, mass: Tensor, continue_prob: Tensor) -> Tensor:
        return (mass - (1 - continue_prob)).clamp_min(0.0)


class Confidence(ExitGate):
    """LoopUS: a linear head on the change that a pass wants to make, before the gate (methods 9.1).

    The exit probability is its confidence: tau is one minus the confidence to stop at.
    """

    def reads(self, passed: Passed) -> Tensor:
        return passed.y - passed.state.u


class BlockDecider(DecidingHead):
    """TaH's decider: inner states and the 100 largest logits through six residual blocks (methods 2.2).

    Everything it reads is detached: the backbone is trained before, without it.
    """

    tap_shares = (0.07, 0.36, 0.64, 0.93)
    blocks, inner, logits = 6, 256, 100

    def __init__(self, width: int, max_depth: int) -> None:
        super().__init__(width, max_depth)
        self.spread = nn.Linear(self.logits, width)
        self.join = nn.Linear((len(self.tap_shares) + 1) * width, self.inner)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(self.inner),
                nn.Linear(self.inner, 4 * self.inner),
                nn.GELU(),
                nn.Linear(4 * self.inner, self.inner),
            )
            for _ in range(self.blocks)
        )
        self.norm = nn.LayerNorm(self.inner)
        self.score = nn.Linear(self.inner, 1)

    @property
    def top_k(self) -> int:
        return self.logits

    def logit(self, passed: Passed) -> Tensor:
        largest = passed.top_logits[:, : self.logits].detach().to(passed.h.dtype)
        parts = [*(tap.detach() for tap in passed.taps), self.spread(largest).to(passed.h.dtype)]
        x = self.join(torch.cat(parts, dim=-1)).to(passed.h.dtype)
        for block in self.layers:
            x = x + block(x).to(x.dtype)
        return _narrow(self.score, self.norm(x))

    def reset(self, generator: torch.Generator) -> None:
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.kaiming_normal_(part.weight, generator=generator)
                nn.init.zeros_(part.bias)

    @property
    def flops(self) -> int:
        joined = (len(self.tap_shares) + 1) * self.width
        return 2 * (self.logits * self.width + joined * self.inner + self.blocks * 8 * self.inner**2 + self.inner)


class ExpertRouter(DecidingHead):
    """MoR with expert choice: per depth a linear router on the state that enters it (methods 7.2).

    The weight of a pass is alpha sigma(logit); whether a row takes the next pass is the routing's business. The first
    pass takes every row (its capacity is all of them).
    """

    gives_gate = True
    alpha = 0.1
    has_depths = True

    def __init__(self, width: int, max_depth: int) -> None:
        super().__init__(width, max_depth)
        self.router = nn.Linear(width, max_depth, bias=False)

    def plan(self, u: Tensor) -> Plan:
        logits = self._logits(u)
        undecided = torch.zeros(u.shape[0], dtype=torch.int64, device=u.device)
        return Plan(logits[:, :1], self.alpha * logits[:, 0].sigmoid(), undecided)

    def logit(self, passed: Passed) -> Tensor:
        return self._logits(passed.x).gather(1, passed.depth[:, None])[:, 0]

    def next_gate(self, passed: Passed, logit: Tensor) -> Tensor:
        return self.alpha * logit.sigmoid()

    def _logits(self, u: Tensor) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            return self.router(u.to(self.router.weight.dtype))

    def reset(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.router.weight, std=SCORE_STD, generator=generator)

    @property
    def flops(self) -> int:
        return 2 * self.width * self.max_depth  # rows of all depths in one product

    @property
    def plan_flops(self) -> int:
        return self.flops


class TokenRouter(DecidingHead):
    """MoR with token choice: a softmax over the M depths on the first input; its top-1 is the row's depth and its
    probability the weight of every pass (methods 7.3)."""

    per_depth = False
    has_depths = True
    gives_gate = gives_depth = True

    def __init__(self, width: int, max_depth: int) -> None:
        super().__init__(width, max_depth)
        self.hidden = nn.Linear(width, 2 * width)
        self.choose = nn.Linear(2 * width, max_depth)

    def plan(self, u: Tensor) -> Plan:
        with torch.autocast(u.device.type, enabled=False):
            wide = u.to(self.hidden.weight.dtype)
            logits = self.choose(nn.functional.gelu(self.hidden(wide)))
        best = logits.softmax(-1).max(-1)
        return Plan(logits, best.values, best.indices + 1)

    def reset(self, generator: torch.Generator) -> None:
        reset_linears(self, generator)
        for part in (self.hidden, self.choose):
            nn.init.zeros_(part.bias)

    @property
    def flops(self) -> int:
        return 0

    @property
    def plan_flops(self) -> int:
        return 4 * self.width**2 + 4 * self.width * self.max_depth


def _narrow(linear: nn.Linear, x: Tensor) -> Tensor:
    """One logit per row ``[rows]``, not under autocast: in bf16 exact ties would be common."""
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.to(linear.weight.dtype))[:, 0]


DECIDERS: dict[str, type[DecidingHead]] = {
    "tah2": Decider,
    "exit_gate": ExitGate,
    "detached_exit_gate": DetachedExitGate,
    "act_gate": ActGate,
    "confidence": Confidence,
    "blocks": BlockDecider,
    "expert_router": ExpertRouter,
    "token_router": TokenRouter,
}
"""By name; a package may add its own (docs/methods.md)."""
