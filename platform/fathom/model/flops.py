"""FLOPs by real depth (methods 1.10): matrix products only, a multiply-accumulate is 2."""

from functools import cache
from typing import NamedTuple

import torch

from fathom.model.adapter import LowRankAdapters
from fathom.model.config import BackboneConfig
from fathom.model.deciders import DECIDERS
from fathom.model.methods import Method, find_part
from fathom.model.readout import READOUTS
from fathom.model.routing import ROUTINGS, Comparing
from fathom.model.span import resolve_span
from fathom.model.updates import UPDATES
from fathom.model.visibility import DUO_CAUSAL, ROOT_AND_OWN, SAME_DEPTH


class RowFlops(NamedTuple):
    """Costs of a method on a backbone.

    Attributes:
        once: of the layers that a token runs once: prelude, and coda where no exit rule runs it in every pass.
        body: of the layers of one pass.
        head: of one distribution over the vocabulary.
        pair_once: of a (query, key) pair in the layers that run once.
        pair: of a (query, key) pair in those of a pass.
        first: of the update before the first pass, and of a router's plan.
        update: of the update before every further pass.
        adapters: of the low-rank changes, per pass from depth 2 on.
        decider: of one decision, by a decider or by a comparison with the pass before.
        reads_every_pass: whether every pass has a head, or only the last.
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
    reads_every_pass: bool

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


def row_flops(config: BackboneConfig, method: Method, training: bool = False) -> RowFlops:
    """The costs of a method on a backbone shape, by the exit rule of decoding or of training."""
    d, attended = config.hidden_size, config.heads * config.head_width
    stored = config.kv_heads * config.head_width
    layer = 4 * d * attended + 4 * d * stored + 6 * d * config.ffn_width
    span = resolve_span(method.span, config.layers)
    name = (method.training_routing or method.routing) if training else method.routing
    rule = find_part(ROUTINGS, name, "routing")
    comparing = isinstance(rule, Comparing)
    outer = span.prelude + (0 if comparing else span.coda)
    inner = span.layers - outer
    head = float(2 * d * config.vocab_size)
    first, update, decider = _part_flops(method, d)
    adapters = 0.0
    if method.adapters:
        with torch.device("meta"):
            adapters = float(span.body * LowRankAdapters(config, span).flops)
    return RowFlops(
        once=float(outer * layer),
        body=float(inner * layer),
        head=head,
        pair_once=float(4 * outer * attended),
        pair=float(4 * inner * attended),
        first=first,
        update=update,
        adapters=adapters,
        decider=decider + (rule.further_heads * head if comparing else 0.0),
        reads_every_pass=comparing or not (span.coda or find_part(READOUTS, method.readout, "readout").mixes_states),
    )


def forward_flops(
    config: BackboneConfig, method: Method, rows: list[float], pairs: list[float], training: bool = False
) -> float:
    """FLOPs of a forward with a head on every row that is read.

    Args:
        rows: how many rows ran each depth, from depth 1.
        pairs: how many (query, key) pairs attention computed at each depth.
        training: by the exit rule of training, else of decoding.
    """
    cost = row_flops(config, method, training)
    deeper = sum(rows[1:])
    total = rows[0] * cost.once + sum(rows) * cost.body + pairs[0] * cost.pair_once + sum(pairs) * cost.pair
    total += (sum(rows) if cost.reads_every_pass else rows[0]) * cost.head
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
        total += cost.once + depth * cost.body + (depth if cost.reads_every_pass else 1) * cost.head
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
