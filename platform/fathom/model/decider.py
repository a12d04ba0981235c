"""TaH2's decider: whether a token continues (methods 1.1, paper Eq. 10)."""

import torch
from torch import Tensor, nn

from fathom.model.deciding import DecidingHead
from fathom.model.layers import RMSNorm, SwiGLU
from fathom.model.state import Passed
from fathom.model.updater import EPS, reset_linears

SCORE_STD = 0.01


class Decider(DecidingHead):
    """Logit of g = sigma(w . RN_out(SwiGLU(W_d [RN_first(e); RN_last(h); RN_l(TopK(q))]))).

    One decider serves all depths. Its third stream is the k = d largest probabilities, sorted, without token ids. There
    is no norm between W_d and the SwiGLU, unlike in the updater.
    """

    def __init__(self, width: int, max_depth: int) -> None:
        super().__init__(width, max_depth)
        self.norm_embedding = RMSNorm(width, EPS)
        self.norm_hidden = RMSNorm(width, EPS)
        self.norm_top = RMSNorm(width, EPS)
        self.join = nn.Linear(3 * width, width, bias=False)
        self.mlp = SwiGLU(width, width)
        self.norm_out = RMSNorm(width, EPS)
        self.score = nn.Linear(width, 1, bias=False)

    @property
    def top_k(self) -> int:
        return self.width

    def logit(self, passed: Passed) -> Tensor:
        return self(passed.state.e, passed.h, passed.top[:, : self.top_k])

    @property
    def flops(self) -> int:
        return 2 * self.width * 3 * self.width + 6 * self.width**2 + 2 * self.width

    def forward(self, e: Tensor, h: Tensor, top: Tensor) -> Tensor:
        """Continue logit ``[rows]``, fp32 or wider.

        Args:
            e: ``[rows, d]`` original token embeddings.
            h: ``[rows, d]`` hidden states of the current depth.
            top: ``[rows, d]`` the largest probabilities of the current depth's full softmax, descending.
        """
        streams = (
            self.norm_embedding(e),
            self.norm_hidden(h),
            self.norm_top(top.to(e.dtype)),
        )
        mixed = self.norm_out(self.mlp(self.join(torch.cat(streams, dim=-1))).to(e.dtype))
        # Not under autocast: in bf16 the logit is often exactly 0 and ties at tau would be common.
        with torch.autocast(e.device.type, enabled=False):
            return self.score(mixed)[:, 0]

    def reset(self, generator: torch.Generator) -> None:
        """Initialise: linears uniform, score N(0, 0.01^2), so that about half of all tokens continue at first."""
        reset_linears(self, generator)
        nn.init.normal_(self.score.weight, std=SCORE_STD, generator=generator)
