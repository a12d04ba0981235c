"""FLOPs by real depth (methods 1.10): matrix products only, a multiply-accumulate is 2."""

from typing import NamedTuple

from fathom.model.config import BackboneConfig
from fathom.model.methods import Method
from fathom.model.visibility import ROOT_AND_OWN


class RowFlops(NamedTuple):
    """Cost of one row, and of one (query, key) pair."""

    backbone: float
    head: float
    pair: float
    updater: float
    decider: float


def row_flops(config: BackboneConfig) -> RowFlops:
    """Constants of a backbone shape; updater and decider with d_u = d_d = k = d."""
    d, attended = config.hidden_size, config.heads * config.head_width
    stored = config.kv_heads * config.head_width
    layer = 4 * d * attended + 4 * d * stored + 6 * d * config.ffn_width
    return RowFlops(
        backbone=float(config.layers * layer),
        head=float(2 * d * config.vocab_size),
        pair=float(4 * config.layers * attended),
        updater=float(4 * d * d + 6 * d * d),
        decider=float(2 * d * 3 * d + 6 * d * d + 2 * d),
    )


def forward_flops(config: BackboneConfig, method: Method, rows: list[float], pairs: list[float]) -> float:
    """FLOPs of a forward with a head on every row.

    Args:
        rows: how many rows ran each depth, from depth 1.
        pairs: how many (query, key) pairs attention computed at each depth.
    """
    cost = row_flops(config)
    total = sum(rows) * (cost.backbone + cost.head) + sum(pairs) * cost.pair
    total += sum(rows[1:]) * cost.updater if method.update else 0.0
    if method.routing == "decider_threshold":
        total += sum(rows[: method.max_depth - 1]) * cost.decider
    return total


def decode_flops(config: BackboneConfig, method: Method, prompt_depths: list[int], depths: list[int]) -> float:
    """FLOPs of generating a response, prefill excluded.

    Args:
        prompt_depths: executed depth of each prompt token.
        depths: executed depth of each generated token.
    """
    cost = row_flops(config)
    decides = method.routing == "decider_threshold"
    before = [0] * (method.max_depth + 1)  # before[m]: keys of earlier tokens that a depth-m query sees
    for depth in prompt_depths:
        _add_keys(before, depth, method)
    total = 0.0
    for depth in depths:
        total += depth * (cost.backbone + cost.head) + (depth - 1) * cost.updater
        total += sum(before[m] + m for m in range(1, depth + 1)) * cost.pair
        total += min(depth, method.max_depth - 1) * cost.decider if decides else 0.0
        _add_keys(before, depth, method)
    return total


def _add_keys(before: list[int], depth: int, method: Method) -> None:
    for m in range(1, len(before)):
        before[m] += 1 if method.visibility == ROOT_AND_OWN else min(depth, m)
