"""The loop: every method of the field is this one, with other parts."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fathom.model.attention import StreamView, TrainingStreams
from fathom.model.backbone import Backbone
from fathom.model.collectives import LOCAL, Collectives
from fathom.model.config import BackboneConfig
from fathom.model.decider import Decider
from fathom.model.methods import Method
from fathom.model.readout import READOUTS, log_weight, mix
from fathom.model.routing import ROUTINGS, Decision
from fathom.model.rows import PackedRows
from fathom.model.updater import Updater, reset_linears
from fathom.model.visibility import RowMeta
from fathom.model.vocabulary import HeadOutput, TokenTable, top_probabilities

GHOST = -1
"""Sequence number of a row that keeps collectives aligned: it sees itself, nobody sees it."""


class DepthTrace(NamedTuple):
    """What one depth did. ``n`` rows executed it; every tensor is over them.

    Attributes:
        index: int64 ``[n]``, row numbers in the packed rows, increasing.
        hidden: ``[n, d]`` after the final norm.
        log_prob: ``[n]``, log q^(m)[target] of this depth alone.
        continue_logit: ``[n]``, or None at the last depth and for methods without a decider.
        goes_on: bool ``[n]``.
    """

    index: Tensor
    hidden: Tensor
    log_prob: Tensor
    continue_logit: Tensor | None
    goes_on: Tensor


class Trace(NamedTuple):
    """One level-synchronous forward.

    Attributes:
        log_prob: ``[rows]``, log q[target] of the mixture.
        executed: int64 ``[rows]``, how many depths each row ran.
        depths: one entry per depth that any rank ran; the number is the same on all ranks.
        embedding: ``[rows, d]``, the original token embeddings.
        streams: keys and values of all depths, for look-ahead.
        keep_alive: scalar 0 that touches every output, so that every parameter has a gradient on every rank.
    """

    log_prob: Tensor
    executed: Tensor
    depths: list[DepthTrace]
    embedding: Tensor
    streams: TrainingStreams
    keep_alive: Tensor


class _Pass(NamedTuple):
    """Rows about to run a depth. With ``ghost``, the one row is nobody's."""

    index: Tensor
    entered: Tensor
    embedding: Tensor
    ghost: bool


class LoopedLM(nn.Module):
    """A pretrained decoder whose layers may run again for the tokens that profit from it.

    Args:
        config: the backbone's shape.
        method: the point in the axes.
    """

    def __init__(self, config: BackboneConfig, method: Method) -> None:
        super().__init__()
        self.config = config
        self.method = method
        self.routing = ROUTINGS[method.routing]
        self.readout = READOUTS[method.readout]
        self.table = TokenTable(config.vocab_size, config.hidden_size, config.tied)
        self.backbone = Backbone(config)
        self.update = Updater(config.hidden_size) if method.update == "updater" else None
        self.decider = Decider(config.hidden_size) if self.routing.needs_decider else None

    def reset_added(self, seed: int) -> None:
        """Initialise the parts that the base model lacks (methods 1.8 a), from the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        if self.update is not None:
            reset_linears(self.update, generator)
        if self.decider is not None:
            self.decider.reset(generator)

    def embed(self, ids: Tensor) -> Tensor:
        """Original token embeddings e ``[rows, d]``."""
        return self.table(ids=ids)

    def enter(self, e: Tensor, h: Tensor) -> Tensor:
        """What rows enter their next depth with, ``[rows, d]``, from e and the last hidden states h."""
        if self.update is None:
            raise RuntimeError(f"method {self.method.name!r} has one depth: nothing enters a second")
        return self.update(e, h)

    def logits(self, h: Tensor) -> Tensor:
        """Full logits ``[rows, V]``, fp32 or wider; for serving, which needs them for few rows."""
        return self.table.logits(h)

    def continue_logit(self, e: Tensor, h: Tensor, logits: Tensor) -> Tensor:
        """The decider's logit ``[rows]`` from full logits ``[rows, V]``."""
        if self.decider is None:
            raise RuntimeError(f"method {self.method.name!r} has no decider")
        return self.decider(e, h, top_probabilities(logits, self.decider.top_k))

    def mix(self, log_probs: list[Tensor], gates: list[Tensor]) -> Tensor:
        """A token's log-probabilities ``[V]`` from those of its executed depths and their continue probabilities."""
        return mix(self.readout, log_probs, gates)

    def read_out(self, hidden: Tensor, targets: Tensor, k: int, chunk_rows: int) -> HeadOutput:
        """Target log-probabilities, log-sum-exps and top-k probabilities of hidden states ``[rows, d]``."""
        return self.table(head=(hidden, targets, k, chunk_rows))

    def run_span(
        self,
        u: Tensor,
        positions: Tensor,
        view: StreamView,
        checkpointing: bool = False,
    ) -> Tensor:
        """One pass of the looped span: ``[rows, d]`` in, hidden states after the final norm out."""
        return self.backbone(u, positions, view, checkpointing)

    def forward(
        self,
        rows: PackedRows,
        collectives: Collectives = LOCAL,
        head_chunk_rows: int = 1024,
        checkpointing: bool = False,
        routes: Tensor | None = None,
    ) -> Trace:
        """Run all depths, level by level: equal to decoding token by token, since depth m sees depths <= m only.

        Args:
            rows: whole documents; may be empty.
            collectives: the ranks that must run the same number of depths.
            head_chunk_rows: rows whose logits exist at once.
            checkpointing: recompute layers in the backward.
            routes: int64 ``[rows]``, depths to execute instead of the exit rule's (scripted routes).
        """
        kept = rows.count
        rows = rows if kept else _one_ghost(rows)
        embedding = self.embed(rows.ids)
        everyone = torch.arange(rows.count, device=rows.ids.device)
        step: _Pass | None = _Pass(everyone, embedding, embedding, ghost=not kept)
        streams, depths = TrainingStreams(self.method.visibility), []
        keep_alive = embedding.new_zeros(())
        depth = 0
        while step is not None:
            depth += 1
            trace = self._run_depth(depth, step, rows, streams, head_chunk_rows, checkpointing, routes)
            keep_alive = keep_alive + 0.0 * _touch(trace)
            depths.append(_without_rows(trace) if step.ghost else trace)
            step = self._next(depth, step, trace, embedding, collectives)
        keep_alive = keep_alive + self._touch_added(embedding)
        log_prob, executed = self._mixture(rows, depths)
        return Trace(
            log_prob[:kept],
            executed[:kept],
            depths,
            embedding[:kept],
            streams,
            keep_alive,
        )

    def _run_depth(
        self,
        depth: int,
        step: _Pass,
        rows: PackedRows,
        streams: TrainingStreams,
        head_chunk_rows: int,
        checkpointing: bool,
        routes: Tensor | None,
    ) -> DepthTrace:
        """One pass of the span, its readout and its decisions."""
        index = step.index
        sequence = torch.full_like(index, GHOST) if step.ghost else rows.sequence[index]
        meta = RowMeta(sequence, rows.positions[index], torch.full_like(index, depth))
        hidden = self.run_span(step.entered, meta.position, streams.view(meta), checkpointing)
        decides = self.decider is not None and depth < self.method.max_depth
        top_k = self.decider.top_k if self.decider is not None and decides else 0
        head = self.read_out(hidden, rows.targets[index], top_k, head_chunk_rows)
        logit = self.decider(step.embedding, hidden, head.top) if self.decider is not None and decides else None
        goes_on = self._decide(
            meta.depth,
            logit,
            rows.supervised[index],
            None if routes is None else routes[index],
        )
        return DepthTrace(index, hidden, head.log_prob, logit, goes_on & (sequence != GHOST))

    def _decide(
        self,
        depth: Tensor,
        logit: Tensor | None,
        generates: Tensor,
        routes: Tensor | None,
    ) -> Tensor:
        if routes is not None:
            return (depth < routes) & (depth < self.method.max_depth)
        at_last_depth = logit is None and self.decider is not None
        if at_last_depth:
            return torch.zeros_like(generates)
        gate = None if logit is None else logit.detach().sigmoid()
        return self.routing.goes_on(Decision(gate, depth, generates, self.method.max_depth, self.method.threshold))

    def _next(
        self,
        depth: int,
        step: _Pass,
        trace: DepthTrace,
        embedding: Tensor,
        collectives: Collectives,
    ) -> _Pass | None:
        """The rows of the next depth; a ghost where only other ranks have some; None where nobody has."""
        if depth == self.method.max_depth or not collectives.any(bool(trace.goes_on.any())):
            return None
        chosen = trace.goes_on.nonzero()[:, 0]
        ghost = chosen.shape[0] == 0
        chosen = chosen.new_zeros(1) if ghost else chosen
        index = trace.index[chosen]
        e = embedding[index]
        return _Pass(index, self.enter(e, trace.hidden[chosen]), e, ghost)

    def _touch_added(self, embedding: Tensor) -> Tensor:
        """Zero times the updater's output: it has a gradient even when nobody continued anywhere."""
        if self.update is None:
            return embedding.new_zeros(())
        return 0.0 * self.enter(embedding[:1], embedding[:1]).sum()

    def _mixture(self, rows: PackedRows, depths: list[DepthTrace]) -> tuple[Tensor, Tensor]:
        """Mixture log-probabilities of the targets and executed depths, both ``[rows]``; fp32 or wider."""
        executed = torch.zeros_like(rows.ids)
        for trace in depths:
            executed[trace.index] += 1
        wide = depths[0].log_prob.dtype
        mixture = torch.full(rows.ids.shape, -torch.inf, dtype=wide, device=rows.ids.device)
        remaining = torch.ones_like(mixture)
        for trace in depths:
            at = trace.index
            gate = None if trace.continue_logit is None else trace.continue_logit.to(wide).sigmoid()
            weight = self.readout.weight(remaining[at], gate, trace.goes_on, executed[at])
            mixture = mixture.index_put((at,), torch.logaddexp(mixture[at], log_weight(weight) + trace.log_prob))
            if gate is not None:
                remaining = remaining.index_put((at,), remaining[at] * gate)
        return mixture, executed


def _one_ghost(rows: PackedRows) -> PackedRows:
    """A rank without rows runs one that nobody sees and nobody learns from."""
    zero = rows.ids.new_zeros(1)
    return PackedRows(zero, zero, zero + GHOST, zero, torch.zeros_like(zero, dtype=torch.bool))


def _touch(trace: DepthTrace) -> Tensor:
    total = trace.hidden.sum() + trace.log_prob.sum()
    return total if trace.continue_logit is None else total + trace.continue_logit.sum()


def _without_rows(trace: DepthTrace) -> DepthTrace:
    """What a pass leaves whose one row was a ghost."""
    logit = trace.continue_logit
    return DepthTrace(
        trace.index[:0],
        trace.hidden[:0],
        trace.log_prob[:0],
        None if logit is None else logit[:0],
        trace.goes_on[:0],
    )
