"""Every update by name. TaH2's own is in :mod:`fathom.model.updater`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathom.model.state import Passed, RowState
from fathom.model.update import Update
from fathom.model.updater import Updater, reset_linears


class NoUpdate(Update):
    """Methods of one depth."""

    one_depth = True

    def enter(self, passed: Passed) -> Tensor:
        if passed.x.shape[0]:
            raise RuntimeError("this method has one depth: nothing enters a second")
        return passed.x


class TopMix(Update):
    """The mean embedding of the 100 likeliest tokens under the softmax over them alone (TaH, methods 2.1)."""

    top_k = 100

    def enter(self, passed: Passed) -> Tensor:
        if passed.top_embedding is None:
            raise ValueError("the top-k mix needs the embeddings of the likeliest tokens")
        return passed.top_embedding

    @property
    def flops(self) -> int:
        return 2 * self.top_k * self.width


class Normed(Update):
    """The final norm's output (Ouro, methods 3.1)."""

    def enter(self, passed: Passed) -> Tensor:
        return passed.h


class Residual(Update):
    """AbbIE-D, the residual *between* iterations (methods 5.1, reading 2): x = B(u), next u = B(u) + u; r = 1 is the
    plain stack."""

    def enter(self, passed: Passed) -> Tensor:
        return passed.y + passed.state.u


class LiteralResidual(Update):
    """AbbIE-D by the letter of its formula (reading 1): x = B(u) + u, also after the last iteration."""

    def carry(self, state: RowState, y: Tensor, depth: Tensor) -> Tensor:
        return y + state.u


class ConcatAdapter(Update):
    """u = A [x; z] at every step, from a random first state (retrofit, 0pt, Huginn; methods 4.1, 5.4, 6.2).

    The state's standard deviation is Huginn's, sqrt(2 / 5d), cut at three of them.
    """

    draws_state = True

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.adapter = nn.Linear(2 * width, width, bias=False)

    def start(self, z: Tensor, noise: Tensor | None) -> Tensor:
        if noise is None:
            raise ValueError("this update starts from a random state: noise is needed")
        state = noise.to(z.dtype) * math.sqrt(2.0 / (5.0 * self.width))
        return self.adapter(torch.cat((state, z), dim=-1)).to(z.dtype)

    def enter(self, passed: Passed) -> Tensor:
        return self.adapter(torch.cat((passed.x, passed.state.z), dim=-1)).to(passed.x.dtype)

    def reset(self, generator: torch.Generator) -> None:
        reset_linears(self, generator)

    @property
    def flops(self) -> int:
        return 4 * self.width**2

    @property
    def first_flops(self) -> int:
        return self.flops


class HuginnAdapter(ConcatAdapter):
    """As Huginn has it: the final norm also before the coda."""

    norm_before_coda = True


class DiagonalInjection(Update):
    """u = a * x + v * W_in z with v = softplus(b_in), a = exp(-v exp(b_ret)) per channel (methods 1.12, Huginn in
    its post-training form).

    The source gives no initialisation; ours is W_in = 1, v = a = 1/2: the mean of state and input.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inject = nn.Linear(width, width, bias=False)
        self.bias_in = nn.Parameter(torch.empty(width))
        self.bias_retain = nn.Parameter(torch.empty(width))

    def enter(self, passed: Passed) -> Tensor:
        strength = F.softplus(self.bias_in)
        retain = torch.exp(-strength * torch.exp(self.bias_retain))
        return (retain * passed.x + strength * self.inject(passed.state.z)).to(passed.x.dtype)

    def reset(self, generator: torch.Generator) -> None:
        nn.init.eye_(self.inject.weight)
        nn.init.constant_(self.bias_in, math.log(math.expm1(0.5)))
        nn.init.constant_(self.bias_retain, math.log(math.log(2.0) / 0.5))

    @property
    def flops(self) -> int:
        return 2 * self.width**2


class RoutedResidual(Update):
    """x = g f(u) + u with a router's weight g (MoR with expert choice, methods 7.2)."""

    needs_gate = True

    def carry(self, state: RowState, y: Tensor, depth: Tensor) -> Tensor:
        return state.gate[:, None].to(y.dtype) * y + state.u


class PlannedResidual(Update):
    """x = g f(u), and the first input again at the last planned depth (MoR with token choice, methods 7.3)."""

    needs_gate = follows_plan = True

    def carry(self, state: RowState, y: Tensor, depth: Tensor) -> Tensor:
        last = (depth == state.planned)[:, None].to(y.dtype)
        return state.gate[:, None].to(y.dtype) * y + last * state.z


class SelectiveGate(Update):
    """x = A n + (1 - A) u for the body's output n, A = exp(-Delta exp(A_log)), Delta = softplus(W_dt W_low (n - u) + b)
    (LoopUS, methods 9.1).

    Initialised as released: A_log_i = log i, b the inverse softplus of log-uniform numbers in [0.001, 0.1]. One pass is
    then not the base model: the gate of high channels keeps u.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.rank = math.ceil(width / 16)
        self.low = nn.Linear(width, self.rank, bias=False)
        self.time = nn.Linear(self.rank, width)
        self.decay_log = nn.Parameter(torch.empty(width))

    def carry(self, state: RowState, y: Tensor, depth: Tensor) -> Tensor:
        step = F.softplus(self.time(self.low(y - state.u)))
        keep = torch.exp(-step * torch.exp(self.decay_log)).to(y.dtype)
        return keep * y + (1 - keep) * state.u

    def reset(self, generator: torch.Generator) -> None:
        reset_linears(self, generator)
        channels = torch.arange(1, self.width + 1, dtype=self.decay_log.dtype)
        steps = torch.exp(torch.rand(self.width, generator=generator) * math.log(100.0) + math.log(1e-3))
        with torch.no_grad():
            self.decay_log.copy_(channels.log())
            self.time.bias.copy_(torch.log(torch.expm1(steps)))

    @property
    def flops(self) -> int:
        return 4 * self.width * self.rank

    @property
    def first_flops(self) -> int:
        return self.flops


UPDATES: dict[str, type[Update]] = {
    "none": NoUpdate,
    "updater": Updater,
    "top_mix": TopMix,
    "normed": Normed,
    "replace": Update,
    "residual": Residual,
    "residual_literal": LiteralResidual,
    "concat_adapter": ConcatAdapter,
    "huginn_adapter": HuginnAdapter,
    "diagonal_injection": DiagonalInjection,
    "routed_residual": RoutedResidual,
    "planned_residual": PlannedResidual,
    "selective_gate": SelectiveGate,
}
"""By name; a package may add its own (docs/methods.md)."""
