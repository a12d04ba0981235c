"""The parts of a Llama, Qwen2 or Qwen3 decoder layer, on rows.

Module names follow the Hugging Face checkpoint names, so a layer's state is a checkpoint's by prefix alone.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathom.model.attention import StreamView
from fathom.model.config import BackboneConfig

Adapter = Callable[[str, Tensor, Tensor], Tensor]
"""What changes a projection at some depths: (its name, its input, its output) to its output."""


def unadapted(_name: str, _x: Tensor, out: Tensor) -> Tensor:
    """The adapter of methods that have none."""
    return out


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) * W_up x), bias-free."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, adapter: Adapter = unadapted) -> Tensor:
        gate = adapter("gate_proj", x, self.gate_proj(x))
        inner = F.silu(gate) * adapter("up_proj", x, self.up_proj(x))
        return adapter("down_proj", inner, self.down_proj(inner))


class SelfAttention(nn.Module):
    """Projections, optional QK norm and rotation; what is attended to is the view's business."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        d, width = config.hidden_size, config.head_width
        self.width = width
        self.q_proj = nn.Linear(d, config.heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d, config.kv_heads * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, config.kv_heads * width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * width, d, bias=config.output_bias)
        self.q_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, view: StreamView, layer: int, adapter: Adapter = unadapted
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.shape[0]
        q = self.q_norm(adapter("q_proj", x, self.q_proj(x)).view(rows, -1, self.width))
        k = self.k_norm(adapter("k_proj", x, self.k_proj(x)).view(rows, -1, self.width))
        v = adapter("v_proj", x, self.v_proj(x)).view(rows, -1, self.width)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = view.attend(layer, q, k, v).reshape(rows, -1).to(v.dtype)
        return adapter("o_proj", mixed, self.o_proj(mixed)), k, v


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU, with a second norm behind each if asked: a pure function of rows and streams."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.ffn_width)
        self.of_sum, second = config.sandwich_norm == "sum", config.sandwich_norm != "none"
        self.input_layernorm_2 = RMSNorm(config.hidden_size, config.norm_eps) if second else None
        self.post_attention_layernorm_2 = RMSNorm(config.hidden_size, config.norm_eps) if second else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, view: StreamView, layer: int, adapter: Adapter = unadapted
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows ``[n, d]`` in; rows out, and the keys and values ``[n, kv_heads, width]`` they made."""
        mixed, k, v = self.self_attn(self.input_layernorm(x), cos, sin, view, layer, adapter)
        x = self._add(x, mixed, self.input_layernorm_2)
        return self._add(x, self.mlp(self.post_attention_layernorm(x), adapter), self.post_attention_layernorm_2), k, v

    def _add(self, x: Tensor, out: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is None:
            return x + out
        return norm(x + out) if self.of_sum else x + norm(out)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[n, heads, w]`` by cos and sin ``[n, w / 2]``, halves paired as Llama does."""
    first, second = x.float().chunk(2, dim=-1) if x.dtype == torch.bfloat16 else x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
