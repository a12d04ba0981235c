"""Rotary angles from token positions. Depth never enters the angle."""

import math

import torch
from torch import Tensor, nn

from fathom.model.config import BackboneConfig


class Rotary(nn.Module):
    """cos and sin ``[rows, head_width / 2]`` for int64 positions ``[rows]``, already times the attention factor.

    The frequencies are computed in fp64 and never saved: they follow from the configuration.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        frequencies, self.factor = rotary_frequencies(config)
        self.frequencies = frequencies

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angles = positions.to(wide)[:, None] * self.frequencies.to(positions.device, wide)[None, :]
        return angles.cos() * self.factor, angles.sin() * self.factor


def rotary_frequencies(config: BackboneConfig) -> tuple[Tensor, float]:
    """Angular frequencies fp32 ``[head_width / 2]`` and the attention factor of the model's rotary scaling."""
    rope, width = config.rope, config.head_width
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    base = 1.0 / (float(rope["rope_theta"]) ** exponents)
    kind = rope["rope_type"]
    if kind == "linear":
        return base / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(base, rope), 1.0
    if kind == "yarn":
        return _yarn(base, rope, width, config.max_positions)
    return base, 1.0


def _llama3(base: Tensor, rope: dict) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, the band between blended."""
    low, high, factor = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["factor"],
    )
    original = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / base
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * base / factor + blend * base


def _yarn(base: Tensor, rope: dict, width: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071), as Qwen uses it: interpolate low frequencies, keep high ones, scale attention."""
    original = rope.get("original_max_position_embeddings") or max_positions
    factor = rope.get("factor") or max_positions / original

    def boundary(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(float(rope["rope_theta"])))

    first, last = (
        boundary(rope.get("beta_fast") or 32.0),
        boundary(rope.get("beta_slow") or 1.0),
    )
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = max(last - first, 0.001)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    frequencies = base / factor * ramp + base * (1 - ramp)
    return frequencies, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: dict, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)
