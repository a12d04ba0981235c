"""A head that predicts what one more depth would bring, so that most look-ahead can be left out (ours, off by
default)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathom.config.schema import ObjectiveConfig
from fathom.model.layers import RMSNorm
from fathom.model.levels import Trace
from fathom.model.looped import LoopedLM
from fathom.model.updater import EPS, reset_linears

LARGEST_GAIN = 1.0
"""Nats. Decisions weigh no gain higher (Eq. 25), so none need be told from a higher one."""


class ValueHead(nn.Module):
    """Predicted gain = w . SiLU(W [RN(e); RN(h); q[target]] + b) + c, in nats, of gains within +-1.

    What it reads is constant: it teaches nobody but itself. It may read the target, as the measurement that it replaces
    does. It belongs to training alone: no model folder holds it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_embedding = RMSNorm(width, EPS)
        self.norm_hidden = RMSNorm(width, EPS)
        self.join = nn.Linear(2 * width + 1, width)
        self.score = nn.Linear(width, 1)

    def forward(self, e: Tensor, h: Tensor, target_prob: Tensor) -> Tensor:
        """``[rows]``, fp32 or wider.

        Args:
            e: ``[rows, d]`` original token embeddings.
            h: ``[rows, d]`` hidden states of the depth before.
            target_prob: ``[rows]``, what that depth alone gives the target.
        """
        with torch.autocast(e.device.type, enabled=False):
            wide = self.join.weight.dtype
            streams = (self.norm_embedding(e.to(wide)), self.norm_hidden(h.to(wide)), target_prob[:, None].to(wide))
            return self.score(F.silu(self.join(torch.cat(streams, dim=-1))))[:, 0]


def value_head(model: LoopedLM, objective: ObjectiveConfig, seed: int) -> ValueHead | None:
    """The head, if the objective asks for one; at first it predicts 0 for all."""
    if objective.value_head is None:
        return None
    table = model.table.embedding
    head = ValueHead(model.config.hidden_size)
    reset_linears(head, torch.Generator().manual_seed(seed))
    nn.init.zeros_(head.join.bias)
    nn.init.zeros_(head.score.weight)
    nn.init.zeros_(head.score.bias)
    return head.to(table.device, table.dtype)


def predicted_gains(head: nn.Module | None, trace: Trace, max_depth: int) -> list[Tensor] | None:
    """What the head says of the rows ``[n]`` of every depth that could have continued, with its graph; None without a
    head.

    One call for all depths: sharded modules are called equally often on every rank, also on one without rows.
    """
    if head is None:
        return None
    asked = trace.depths[: max_depth - 1]
    e = torch.cat([ran.passed.state.e for ran in asked])
    h = torch.cat([ran.passed.h for ran in asked])
    target_prob = torch.cat([ran.log_prob for ran in asked]).exp()
    predicted: Tensor = head(e.detach(), h.detach(), target_prob.detach())
    return list(predicted.split([ran.index.shape[0] for ran in asked]))


def value_error(predicted: Tensor, gain: Tensor) -> Tensor:
    """Sum of squares of predicted minus measured gain, both ``[n]``: what the head minimises."""
    return (predicted - gain.clamp(-LARGEST_GAIN, LARGEST_GAIN).to(predicted.dtype)).square().sum()


def value_sums(predicted: Tensor, gain: Tensor) -> Tensor:
    """What explained variance is made of, fp64 ``[4]``, additive: rows, sum of gains and of their squares, error."""
    clipped = gain.double().clamp(-LARGEST_GAIN, LARGEST_GAIN)
    count = clipped.new_tensor(float(clipped.shape[0]))
    return torch.stack((count, clipped.sum(), clipped.square().sum(), value_error(predicted.double(), gain)))


def explained_variance(sums: Tensor) -> float:
    """1 - squared error over the gains' variance: 1 is exact, 0 as good as their mean; 0 where they do not vary."""
    count, total, squares, error = sums.tolist()
    spread = squares - total * total / count if count else 0.0
    return 1.0 - error / spread if spread > 1e-12 * count else 0.0
