"""Where attention goes: how much softmax weight queries of depth m put on keys of depth j, by layer and head
(paper Fig. 12, 13).

A recording view stands before the real one in every attention module: it computes the weights densely, so it is for
short documents only, checks that they give the output of the real view, and changes nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fathom.evals.batches import SIZES, Documents, evaluating
from fathom.evals.forward import routed_trace
from fathom.evals.plain import plain
from fathom.model.attention import TrainingView
from fathom.model.layers import SelfAttention
from fathom.model.rows import pack_documents
from fathom.model.visibility import visible

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM

LONGEST = 256
DOCUMENTS = 16
AGREE = 1e-2
"""Relative; loose enough for bf16, far below what a wrong mask would give."""


class AttentionMass(NamedTuple):
    """Mean attention weight by depth, ``mass[m-1][j-1][layer][head]``, over queries of depth m; sums to 1 over j.

    Layers that run once for each token (a prelude, a coda) count at depth 1.

    Attributes:
        mass: as said; 0 where a depth-m query sees no key of depth j.
        uniform: ``[m-1][j-1]``, share of the keys that depth-m queries see that are of depth j: what heads without a
            preference would show.
        queries: by depth m, rows.
        documents: how many were read.
        tokens_per_document: longer ones were cut to so many.
    """

    mass: list[list[list[list[float]]]]
    uniform: list[list[float]]
    queries: list[int]
    documents: int
    tokens_per_document: int

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return plain(self)


def attention_mass(
    model: "LoopedLM", documents: Documents, max_documents: int = DOCUMENTS, max_tokens: int = LONGEST
) -> AttentionMass:
    """Run documents one by one, routed by the model, and add up attention weights by depth of the key.

    Args:
        documents: the first ``max_documents``, each cut to ``max_tokens``.
    """
    count = min(max_documents, len(documents))
    record = _Record(model.method.max_depth, model.config.layers, model.config.heads)
    with evaluating(model) as device, recording(model, record):
        for number in range(count):
            ids, mask = documents.document(number)
            rows = pack_documents([(ids[:max_tokens], mask[:max_tokens])], [number])
            routed_trace(model, rows.to(device), SIZES.head_chunk_rows, read_all=False)
    return record.report(count, max_tokens)


@contextlib.contextmanager
def recording(model: "LoopedLM", record: "_Record") -> Iterator[None]:
    """Put a recording view before the view of every attention module, by torch's own hooks."""

    def swap(_module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            RecordingView(value, model.method.visibility, record) if isinstance(value, TrainingView) else value
            for value in inputs
        )

    attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
    hooks = [module.register_forward_pre_hook(swap) for module in attentions]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class RecordingView:
    """A view that also adds up the weights of what it attends to."""

    def __init__(self, view: TrainingView, rule: str, record: "_Record") -> None:
        self.view = view
        self.rule = rule
        self.record = record

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.view.attend(layer, q, k, v)
        assert self.view.own is not None  # the main pass commits its keys
        query = self.view.own.meta
        metas = [*(stream.meta for stream in self.view.earlier), query]
        seen = torch.cat([visible(self.rule, query, meta) for meta in metas], dim=1)
        keys = torch.cat([*(stream.keys[layer] for stream in self.view.earlier), k])
        values = torch.cat([*(stream.values[layer] for stream in self.view.earlier), v])
        weights = attention_weights(q, keys, seen)
        groups = q.shape[1] // v.shape[1]
        again = torch.einsum("hqk,khw->qhw", weights, values.repeat_interleave(groups, 1).double())
        if not torch.allclose(again, out.double(), rtol=AGREE, atol=AGREE * float(out.abs().max())):
            raise RuntimeError(f"layer {layer}: recorded attention weights do not give the layer's output")
        self.record.add(layer, query.depth, torch.cat([meta.depth for meta in metas]), seen, weights)
        return out

    def commit(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.view.commit(layer, k, v)


def attention_weights(q: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Softmax weights fp64 ``[heads, queries, keys]``.

    Args:
        q: ``[queries, heads, w]``.
        keys: ``[keys, kv_heads, w]``.
        seen: bool ``[queries, keys]``.
    """
    wide = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1).double()
    scores = torch.einsum("qhw,khw->hqk", q.double(), wide) / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen[None], -torch.inf).softmax(-1)


class _Record:
    """Sums by depth of query and key."""

    def __init__(self, depths: int, layers: int, heads: int) -> None:
        self.sums = torch.zeros(depths, depths, layers, heads, dtype=torch.float64)
        self.keys = torch.zeros(depths, depths, dtype=torch.float64)
        self.queries = torch.zeros(depths, layers, dtype=torch.int64)

    def add(self, layer: int, query_depth: Tensor, key_depth: Tensor, seen: Tensor, weights: Tensor) -> None:
        for m in query_depth.unique().tolist():
            mine = query_depth == m
            self.queries[m - 1, layer] += int(mine.sum())
            for j in key_depth.unique().tolist():
                column = key_depth == j
                self.sums[m - 1, j - 1, layer] += weights[:, mine][:, :, column].sum((1, 2)).cpu()
                # Counted in every layer alike, so that it only has to be divided by its own sum.
                self.keys[m - 1, j - 1] += int(seen[mine][:, column].sum())

    def report(self, documents: int, max_tokens: int) -> AttentionMass:
        most = self.queries.amax(1)
        reached = [number for number, rows in enumerate(most.tolist()) if rows]
        depths = max(reached) + 1 if reached else 0
        mass = self.sums[:depths, :depths] / self.queries[:depths, None, :, None].clamp_min(1)
        uniform = self.keys[:depths, :depths] / self.keys[:depths, :depths].sum(1, keepdim=True).clamp_min(1)
        return AttentionMass(mass.tolist(), uniform.tolist(), most[:depths].tolist(), documents, max_tokens)
