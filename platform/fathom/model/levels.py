"""The level-synchronous forward: all depths of whole documents, depth by depth.

It equals decoding token by token, since depth m sees depths up to m only, and every rank runs the same number of
depths: a rank without rows at a depth runs one *ghost* row, which sees itself and which nobody sees.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fathom.model.attention import TrainingStreams
from fathom.model.collectives import Collectives
from fathom.model.deciding import Plan
from fathom.model.noise import uniform
from fathom.model.readout import log_weight
from fathom.model.rows import PackedRows
from fathom.model.state import Passed, RowKeys, RowState
from fathom.model.visibility import SAME_DEPTH, RowMeta, row_meta
from fathom.model.vocabulary import HeadOutput

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM

GHOST = -1
"""Sequence number of a row that keeps collectives aligned."""
EXPLORE_SALT = 3


class LoopOptions(NamedTuple):
    """How a forward is run.

    Attributes:
        head_chunk_rows: rows whose logits exist at once.
        checkpointing: recompute layers in the backward.
        routes: int64 ``[rows]``, depths to execute instead of the exit rule's (scripted routes).
        max_depth: M of this forward, if not the method's; the same on all ranks.
        constant_depths: how many depths run without gradient before the others (truncated backprop, methods 4.2).
        read_depths: depths whose distribution is wanted although only the last one's is used (-1: all of them).
        detach_between: a pass's input is a constant: gradients cover one pass (methods 9.2).
        threshold: tau of this forward, if not the method's.
        explore: share of the rows that the rule stops which go on nevertheless.
        seed: keys the randomness, with the rows' examples and positions.
    """

    head_chunk_rows: int = 1024
    checkpointing: bool = False
    routes: Tensor | None = None
    max_depth: int | None = None
    constant_depths: int = 0
    read_depths: frozenset[int] = frozenset()
    detach_between: bool = False
    threshold: float | None = None
    explore: float = 0.0
    seed: int = 0


ALL_DEPTHS = frozenset((-1,))


class DepthTrace(NamedTuple):
    """What one depth did. ``n`` rows executed it; every tensor is over them.

    Attributes:
        index: int64 ``[n]``, row numbers in the packed rows, increasing.
        passed: what they left; ``passed.h`` is the final norm of their state.
        kept: ``[n, d]``, what the readout holds of them.
        head: what was read of this depth's distribution; None where nobody read it.
        continue_logit: ``[n]``, or None at the last depth and for methods without a decider.
        survival: ``[n]``, share of the distribution left to deeper depths.
        goes_on: bool ``[n]``.
    """

    index: Tensor
    passed: Passed
    kept: Tensor
    head: HeadOutput | None
    continue_logit: Tensor | None
    survival: Tensor
    goes_on: Tensor

    @property
    def hidden(self) -> Tensor:
        """``[n, d]`` after the final norm."""
        return self.passed.h

    @property
    def log_prob(self) -> Tensor:
        """``[n]``, log q^(m)[target] of this depth alone, fp32 or wider."""
        if self.head is None:
            raise ValueError("this depth's distribution was not read: name it in LoopOptions.read_depths")
        return self.head.log_prob


class Trace(NamedTuple):
    """One level-synchronous forward.

    Attributes:
        log_prob: ``[rows]``, log q[target] of the readout.
        executed: int64 ``[rows]``, how many depths each row ran.
        depths: one entry per depth that any rank ran; the number is the same on all ranks.
        plan: what a router planned, over all rows; None without one.
        streams: keys and values of all depths, for look-ahead.
        keep_alive: scalar 0 that touches every output, so that every parameter has a gradient on every rank.
    """

    log_prob: Tensor
    executed: Tensor
    depths: list[DepthTrace]
    plan: Plan | None
    streams: TrainingStreams
    keep_alive: Tensor


class _Level(NamedTuple):
    """Rows about to run a depth. With ``ghost``, the one row is nobody's."""

    index: Tensor
    state: RowState
    ghost: bool


def run_levels(model: "LoopedLM", rows: PackedRows, collectives: Collectives, options: LoopOptions) -> Trace:
    """Run whole documents through all depths.

    Args:
        model: the parts.
        rows: whole documents; may be empty.
        collectives: the ranks that must run the same number of depths.
        options: how.
    """
    return _Levels(model, rows, collectives, options).run()


class _Levels:
    """One forward."""

    def __init__(self, model: "LoopedLM", rows: PackedRows, collectives: Collectives, options: LoopOptions) -> None:
        self.model = model
        self.count = rows.count
        self.rows = rows if rows.count else _one_ghost(rows)
        self.collectives = collectives
        self.options = options
        self.max_depth = options.max_depth or model.method.max_depth
        self.threshold = model.method.threshold if options.threshold is None else options.threshold
        routes = options.routes
        self.routes = routes if routes is None or rows.count else routes.new_ones(1)
        self.streams = TrainingStreams(model.method.visibility)

    def run(self) -> Trace:
        model, rows = self.model, self.rows
        meta = row_meta(rows.sequence, rows.positions, 1)
        keys = RowKeys(self.options.seed, rows.example, rows.positions)
        state, plan = model.start(
            rows.ids, rows.positions, TrainingStreams(SAME_DEPTH).view(meta), keys, self.options.checkpointing
        )
        everyone = torch.arange(rows.count, device=rows.ids.device)
        level: _Level | None = _Level(everyone, state, ghost=not self.count)
        keep_alive = 0.0 * (state.u.sum() + (0.0 if plan is None else plan.logits.sum()))
        depths: list[DepthTrace] = []
        while level is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and len(depths) >= self.options.constant_depths):
                trace = self._run_depth(len(depths) + 1, level)
                keep_alive = keep_alive + 0.0 * _touch(trace)
                following = self._next(len(depths) + 1, trace)
            depths.append(_without_rows(trace) if level.ghost and depths else trace)
            level = following
        keep_alive = keep_alive + self._touch_added(depths[0])
        executed = torch.zeros_like(rows.ids)
        for trace in depths:
            executed[trace.index] += 1
        log_prob = self._mixture(depths, executed) if model.reads_each_depth else self._final(depths)
        if not self.count:
            log_prob, keep_alive = log_prob[:0], keep_alive + 0.0 * log_prob.sum()
            plan = None if plan is None else Plan(*(field[:0] for field in plan))
            executed, depths = executed[:0], [_without_rows(trace) for trace in depths]
        return Trace(log_prob, executed, depths, plan, self.streams, keep_alive)

    def _run_depth(self, depth: int, level: _Level) -> DepthTrace:
        """One pass of the body, its readout and its decisions."""
        model, rows, index, state = self.model, self.rows, level.index, level.state
        sequence = torch.full_like(index, GHOST) if level.ghost else rows.sequence[index]
        meta = row_meta(sequence, rows.positions[index], depth)
        ran = model.run(state, meta.depth, meta.position, self.streams.view(meta), self.options.checkpointing)
        _, x, h, _ = ran
        kept = model.kept(state, x, h)
        deeper = depth < self.max_depth
        head = None
        if model.reads_each_depth:
            read = kept if model.readout.sums_hidden else h
            k = model.top_k() if deeper else 0
            head = model.read_out(read, rows.targets[index], k, self.options.head_chunk_rows)
        passed = model.pass_of(state, meta.depth, ran, head)
        logit = model.continue_logit(passed) if deeper else None
        gate = None if logit is None else logit.detach().sigmoid()
        weight = None if logit is None else logit.to(state.mass.dtype).sigmoid()
        survival = model.survival(state.mass, weight)
        if self.routes is not None:
            goes_on = (depth < self.routes[index]) & deeper
        elif not deeper:
            goes_on = torch.zeros_like(index, dtype=torch.bool)
        else:
            keys = RowKeys(self.options.seed, rows.example[index], meta.position)
            goes_on = model.goes_on(
                passed, gate, survival.detach(), rows.supervised[index], sequence, rows.oracle[index], keys,
                self.max_depth, self.threshold,
            )  # fmt: skip
            if self.options.explore:
                draw = uniform(*keys[:1], *keys[1:], EXPLORE_SALT, depth, width=1, like=index)[:, 0]
                goes_on = goes_on | (draw < self.options.explore)
        goes_on = goes_on & (sequence != GHOST)
        self.streams.settle(goes_on)
        if model.readout.mixes_states:
            share = model.readout.weight(state.mass, survival, goes_on, meta.depth)
            kept = state.kept + share[:, None].to(x.dtype) * x
        head = self._probe(depth, index, meta, kept) if head is None else head
        return DepthTrace(index, passed, kept, head, logit, survival, goes_on)

    def _probe(self, depth: int, index: Tensor, meta: RowMeta, kept: Tensor) -> HeadOutput | None:
        """The distribution, its likeliest token too, if every row stopped here: the coda over its rows alone."""
        if not self.options.read_depths & {depth, -1}:
            return None
        view = TrainingStreams(SAME_DEPTH).view(meta)
        hidden = self.model.finish(kept, meta.position, view, self.options.checkpointing)
        return self.model.read_out(hidden, self.rows.targets[index], 1, self.options.head_chunk_rows)

    def _next(self, depth: int, trace: DepthTrace) -> _Level | None:
        """The rows of the next depth; a ghost where only other ranks have some; None where nobody has."""
        if depth == self.max_depth or not self.collectives.any(bool(trace.goes_on.any())):
            return None
        chosen = trace.goes_on.nonzero()[:, 0]
        ghost = chosen.shape[0] == 0
        chosen = chosen.new_zeros(1) if ghost else chosen
        logit = None if trace.continue_logit is None else trace.continue_logit[chosen]
        state = self.model.enter(trace.passed.at(chosen), trace.kept[chosen], logit, trace.survival[chosen])
        if self.options.detach_between:
            state = state._replace(u=state.u.detach(), kept=state.kept.detach(), mass=state.mass.detach())
        return _Level(trace.index[chosen], state, ghost)

    def _touch_added(self, first: DepthTrace) -> Tensor:
        """Zero times the update's output and the adapters: they have a gradient even when nobody continued anywhere."""
        if self.max_depth == 1:
            return first.survival.new_zeros(())
        adapters = self.model.adapters
        unused = 0.0 if adapters is None else sum(weight.sum() for weight in adapters.parameters())
        one = slice(0, 1)
        logit = None if first.continue_logit is None else first.continue_logit[one]
        entered = self.model.enter(first.passed.at(one), first.kept[one], logit, first.survival[one])
        return 0.0 * (entered.u.sum() + entered.gate.sum() + unused)

    def _mixture(self, depths: list[DepthTrace], executed: Tensor) -> Tensor:
        """Mixture log-probabilities ``[rows]`` of the targets; fp32 or wider."""
        mixture: Tensor | None = None
        for trace in depths:
            at, single = trace.index, trace.log_prob
            if mixture is None:
                mixture = torch.full(executed.shape, -torch.inf, dtype=single.dtype, device=single.device)
            survival = None if trace.continue_logit is None else trace.survival
            weight = self.model.readout.weight(trace.passed.state.mass, survival, trace.goes_on, executed[at])
            mixture = mixture.index_put((at,), torch.logaddexp(mixture[at], log_weight(weight) + single))
        assert mixture is not None
        return mixture

    def _final(self, depths: list[DepthTrace]) -> Tensor:
        """The readout of methods that read once: rows as they stopped, through the coda, all together."""
        rows = self.rows
        stopped = [~trace.goes_on for trace in depths]
        index = torch.cat([trace.index[mine] for trace, mine in zip(depths, stopped, strict=True)])
        kept = torch.cat([trace.kept[mine] for trace, mine in zip(depths, stopped, strict=True)])
        view = TrainingStreams(SAME_DEPTH).view(row_meta(rows.sequence, rows.positions, 1))
        hidden = self.model.finish(kept[index.argsort()], rows.positions, view, self.options.checkpointing)
        return self.model.read_out(hidden, rows.targets, 0, self.options.head_chunk_rows).log_prob


def _one_ghost(rows: PackedRows) -> PackedRows:
    """A rank without rows runs one that nobody sees and nobody learns from."""
    zero = rows.ids.new_zeros(1)
    return PackedRows(zero, zero, zero + GHOST, zero, torch.zeros_like(zero, dtype=torch.bool), zero, zero)


def _touch(trace: DepthTrace) -> Tensor:
    total = trace.hidden.sum()
    total = total if trace.head is None else total + trace.head.log_prob.sum()
    return total if trace.continue_logit is None else total + trace.continue_logit.sum()


def _without_rows(trace: DepthTrace) -> DepthTrace:
    """What a pass leaves whose one row was a ghost."""
    none, logit = slice(0, 0), trace.continue_logit
    return DepthTrace(
        trace.index[none],
        trace.passed.at(none),
        trace.kept[none],
        None if trace.head is None else HeadOutput(*(field[none] for field in trace.head)),
        None if logit is None else logit[none],
        trace.survival[none],
        trace.goes_on[none],
    )
