"""Low-rank changes of the looped layers' projections that only some depths feel (TaH, methods 2.1, 2.2)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fathom.model.config import BackboneConfig
from fathom.model.span import Span

RANK, ALPHA = 16, 32
"""Of the TaH authors' 0.6B model."""


class LowRankAdapters(nn.Module):
    """W x + (alpha / rank) B A x on every projection of the body, shared by all depths from the second on.

    B starts at zero, so that an adapted depth starts as the base model.
    """

    def __init__(self, config: BackboneConfig, span: Span) -> None:
        super().__init__()
        d, ffn = config.hidden_size, config.ffn_width
        attended, stored = config.heads * config.head_width, config.kv_heads * config.head_width
        self.sizes = {
            "q_proj": (d, attended),
            "k_proj": (d, stored),
            "v_proj": (d, stored),
            "o_proj": (attended, d),
            "gate_proj": (d, ffn),
            "up_proj": (d, ffn),
            "down_proj": (ffn, d),
        }
        self.first = span.prelude
        self.down = nn.ModuleList(self._linears(into=True) for _ in range(span.body))
        self.up = nn.ModuleList(self._linears(into=False) for _ in range(span.body))

    def _linears(self, into: bool) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                name: nn.Linear(width, RANK, bias=False) if into else nn.Linear(RANK, out, bias=False)
                for name, (width, out) in self.sizes.items()
            }
        )

    def of_layer(self, number: int, adapted: Tensor) -> Callable[[str, Tensor, Tensor], Tensor]:
        """The ``Adapter`` of one layer for rows ``adapted`` (``[rows, 1]``, 0 or 1)."""
        down: Any = self.down[number - self.first]
        up: Any = self.up[number - self.first]

        def change(name: str, x: Tensor, out: Tensor) -> Tensor:
            return out + (adapted * (ALPHA / RANK)).to(out.dtype) * up[name](down[name](x))

        return change

    def idle(self, like: Tensor) -> Tensor:
        """0 from a call of every part, so that each has a gradient where nobody runs a second depth."""
        total = like.new_zeros(())
        for down, up in zip(self.down, self.up, strict=True):
            parts: Any = (down, up)
            for name, (width, _) in self.sizes.items():
                total = total + parts[1][name](parts[0][name](like.new_zeros(1, width))).sum()
        return total

    def reset(self, generator: torch.Generator) -> None:
        """A uniform in +-1/sqrt(fan_in), B zero."""
        for part in self.down.modules():
            if isinstance(part, nn.Linear):
                bound = part.in_features**-0.5
                nn.init.uniform_(part.weight, -bound, bound, generator=generator)
        for part in self.up.modules():
            if isinstance(part, nn.Linear):
                nn.init.zeros_(part.weight)

    @property
    def flops(self) -> int:
        """FLOPs per adapted row and layer."""
        return sum(2 * RANK * (width + out) for width, out in self.sizes.values())
