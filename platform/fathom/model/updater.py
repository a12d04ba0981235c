"""TaH2's updater: what a token enters its next depth with (methods 1.1, paper Eq. 9)."""

import torch
from torch import Tensor, nn

from fathom.model.layers import RMSNorm, SwiGLU
from fathom.model.state import Passed
from fathom.model.update import Update

EPS = 1e-6


class Updater(Update):
    """u = RN_out(SwiGLU(RN_pre(W_u [RN_prev(e); RN_last(h)]))). It replaces the input; there is no skip around it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm_embedding = RMSNorm(width, EPS)
        self.norm_hidden = RMSNorm(width, EPS)
        self.join = nn.Linear(2 * width, width, bias=False)
        self.norm_joined = RMSNorm(width, EPS)
        self.mlp = SwiGLU(width, width)
        self.norm_out = RMSNorm(width, EPS)

    def forward(self, e: Tensor, h: Tensor) -> Tensor:
        """``[rows, d]`` from the original embeddings e and the last hidden states h, both ``[rows, d]``."""
        joined = self.join(torch.cat((self.norm_embedding(e), self.norm_hidden(h)), dim=-1))
        # fp32 outside autocast's matrix products, so that depth 2 enters in the residual stream's own dtype.
        return self.norm_out(self.mlp(self.norm_joined(joined)).to(e.dtype))

    def enter(self, passed: Passed) -> Tensor:
        return self(passed.state.e, passed.h)

    def reset(self, generator: torch.Generator) -> None:
        reset_linears(self, generator)

    @property
    def flops(self) -> int:
        return 4 * self.width**2 + 6 * self.width**2


def reset_linears(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise every linear weight uniformly in +-1/sqrt(fan_in) (methods 1.8 a), from a generator of its own."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            bound = part.in_features**-0.5
            nn.init.uniform_(part.weight, -bound, bound, generator=generator)
