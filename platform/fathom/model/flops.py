"""FLOPs by real depth (methods 1.10): matrix products only, a multiply-accumulate is 2."""

from functools import cache
from typing import NamedTuple

import torch

from fathom.model.adapter import LowRankAdapters
from fathom.model.config import BackboneConfig
from fathom.model.deciders import DECIDERS
from fathom.model.methods import Method, find_part
from fathom.model.readout import READOUTS
from fathom.model.span import resolve_span
from fathom.model.updates import UPDATES
from fathom.model.visibility import DUO_CAUSAL, ROOT_AND_OWN, SAME_DEPTH


class RowFlops(NamedTuple):
    """Costs of a method on a backbone.

    Attributes:
        once: of the layers that a token runs once (prelude and coda).
        body: of one pass of the looped layers.
        head: of one distribution over the vocabulary.
        pair_once: of a (query, key) pair in prelude and coda.
        pair: of a (query, key) pair in the body.
        first: of the update before the first pass, and of a router's plan.
        update: of the update before every further pass.
        adapters: of the low-rank changes, per pass from depth 2 on.
        decider: of one decision.
        reads_each_depth: whether every pass has a head, or only the last.
    """

    once: float
    body: float
    head: float
    pair_once: float
    pair: float
    first: float
    update: float
    adapters: float
    decider: float
    reads_each_depth: bool

    @property
    def backbone(self) -> float:
        """One pass of the whole stack."""
        return self.once + self.body


@cache
def _part_flops(method: Method, width: int) -> tuple[float, float, float]:
    """(first, update, decider) from the parts themselves, made without memory."""
    with torch.device("meta"):
        update = find_part(UPDATES, method.update, "update")(width)
        decider = None
        if method.decider is not None:
            decider = find_part(DECIDERS, method.decider, "decider")(width, method.max_depth)
    first = update.first_flops + (decider.plan_flops if decider else 0)
    return float(first), float(update.flops), float(decider.flops if decider else 0)


def row_flops(config: BackboneConfig, method: Method) -> RowFlops:
    """The costs of a method on a backbone shape."""
    d, attended = config.hidden_size, config.heads * config.head_width
    stored = config.kv_heads * config.head_width
    layer = 4 * d * attended + 4 * d * stored + 6 * d * config.ffn_width
    span = resolve_span(method.span, config.layers)
    outer = span.prelude + span.coda
    first, update, decider = _part_flops(method, d)
    adapters = 0.0
    if method.adapters:
        with torch.device("meta"):
            adapters = float(span.body * LowRankAdapters(config, span).flops)
    return RowFlops(
        once=float(outer * layer),
        body=float(span.body * layer),
        head=float(2 * d * config.vocab_size),
        pair_once=float(4 * outer * attended),
        pair=float(4 * span.body * attended),
        first=first,
        update=update,
        adapters=adapters,
        decider=decider,
        reads_each_depth=not span.coda and not find_part(READOUTS, method.readout, "readout").mixes_states,
    )


def forward_flops(config: BackboneConfig, method: Method, rows: list[float], pairs: list[float]) -> float:
    """FLOPs of a forward with a head on every row that is read.

    Args:
        rows: how many rows ran each depth, from depth 1.
        pairs: how many (query, key) pairs attention computed at each depth.
    """
    cost = row_flops(config, method)
    deeper = sum(rows[1:])
    total = rows[0] * cost.once + sum(rows) * cost.body + pairs[0] * cost.pair_once + sum(pairs) * cost.pair
    total += (sum(rows) if cost.reads_each_depth else rows[0]) * cost.head
    total += rows[0] * cost.first + deeper * (cost.update + cost.adapters)
    return total + sum(rows[: method.max_depth - 1]) * cost.decider


def decode_flops(config: BackboneConfig, method: Method, prompt_depths: list[int], depths: list[int]) -> float:
    """FLOPs of generating a response, prefill excluded.

    Args:
        prompt_depths: executed depth of each prompt token.
        depths: executed depth of each generated token.
    """
    cost = row_flops(config, method)
    deepest = max((*prompt_depths, *depths, 1))
    before = [0] * (deepest + 1)  # before[m]: keys of earlier tokens that a depth-m query sees
    tokens = len(prompt_depths)
    for depth in prompt_depths:
        _add_keys(before, depth, method.visibility)
    total = 0.0
    for depth in depths:
        tokens += 1
        total += cost.once + depth * cost.body + (depth if cost.reads_each_depth else 1) * cost.head
        total += cost.first + (depth - 1) * (cost.update + cost.adapters)
        total += tokens * cost.pair_once
        total += sum(before[m] + _own_keys(m, method.visibility) for m in range(1, depth + 1)) * cost.pair
        total += min(depth, method.max_depth - 1) * cost.decider
        _add_keys(before, depth, method.visibility)
    return total


def _own_keys(m: int, rule: str) -> int:
    """Keys of its own token that a depth-m query sees."""
    return m if rule in (DUO_CAUSAL, ROOT_AND_OWN) else 1


def _add_keys(before: list[int], depth: int, rule: str) -> None:
    """Count a token that ran ``depth``: what later queries of each depth see of it."""
    for m in range(1, len(before)):
        if rule == DUO_CAUSAL:
            before[m] += min(depth, m)
        elif rule == SAME_DEPTH:
            before[m] += depth >= m
        else:  # depth 1 alone, or one key that stands in for the rest
            before[m] += 1
