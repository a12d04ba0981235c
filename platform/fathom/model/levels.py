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
from fathom.model.routing import Asked
from fathom.model.rows import PackedRows
from fathom.model.state import Passed, RowKeys, RowState
from fathom.model.visibility import SAME_DEPTH, row_meta
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
        detach_between: a pass's input is a constant, the first one's too: gradients cover one pass, and only passes of
            ``read_depths`` have any (methods 9.2).
        threshold: tau of this forward, if not the method's.
        explore: share of the rows that the rule stops which go on nevertheless.
        narrowed: how far a router's capacities have come down, 0 (every row) to 1 (as designed).
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
    narrowed: float = 1.0
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
        _, document, counts = torch.unique_consecutive(self.rows.sequence, return_inverse=True, return_counts=True)
        self.length = counts[document]
        self.stopped: list[tuple[Tensor, Tensor]] = []  # rows and what the readout holds of them, by their last depth

    def run(self) -> Trace:
        model, rows = self.model, self.rows
        meta = row_meta(rows.sequence, rows.positions, 1)
        keys = RowKeys(self.options.seed, rows.example, rows.positions)
        state, plan = model.start(
            rows.ids, rows.positions, TrainingStreams(SAME_DEPTH).view(meta), keys, self.options.checkpointing
        )
        if plan is not None and self.routes is not None:
            state = state._replace(planned=torch.where(state.planned > 0, self.routes, state.planned))
        state = state._replace(planned=state.planned.clamp_max(self.max_depth))
        everyone = torch.arange(rows.count, device=rows.ids.device)
        level: _Level | None = _Level(everyone, self._entering(state, 1), ghost=not self.count)
        keep_alive = 0.0 * (state.u.sum() + (0.0 if plan is None else plan.logits.sum()))
        depths: list[DepthTrace] = []
        while level is not None:
            depth = len(depths) + 1
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._learns(depth)):
                trace = self._run_depth(depth, level)
            # Outside: what came before keeps its graph, e and z too, and the update before the first pass that learns
            # learns with it.
            keep_alive = keep_alive + 0.0 * _touch(trace)
            depths.append(_without_rows(trace) if level.ghost and depths else trace)
            level = self._next(depth, trace)
        keep_alive = keep_alive + self._touch_added(depths[0])
        executed = torch.zeros_like(rows.ids)
        for trace in depths:
            executed[trace.index] += 1
        if model.reads_every_pass:
            log_prob = self._mixture(depths, executed)
        else:
            log_prob = model.read_out(
                self._finish(self.stopped), rows.targets, 0, self.options.head_chunk_rows
            ).log_prob
        # On every rank: an objective may leave the last readout unused, and backwards must call the same modules.
        keep_alive = keep_alive + 0.0 * log_prob.sum()
        if not self.count:
            log_prob = log_prob[:0]
            plan = None if plan is None else Plan(*(field[:0] for field in plan))
            executed, depths = executed[:0], [_without_rows(trace) for trace in depths]
        return Trace(log_prob, executed, depths, plan, self.streams, keep_alive)

    def _run_depth(self, depth: int, level: _Level) -> DepthTrace:
        """One pass of the body, its readout and its decisions."""
        model, rows, index, state = self.model, self.rows, level.index, level.state
        sequence = torch.full_like(index, GHOST) if level.ghost else rows.sequence[index]
        meta = row_meta(sequence, rows.positions[index], depth)
        view = self.streams.view(meta)
        ran = model.run(state, meta.depth, meta.position, view, self.options.checkpointing)
        _, x, h, _ = ran
        kept = model.kept(state, x, h)
        stopping = model.stopping(state, x, kept)
        deeper = depth < self.max_depth
        head = None
        if model.reads_every_pass:
            read = model.end(stopping, h, meta.position, view, self.options.checkpointing)
            # At depth 1 in any case: `_touch_added` asks decider and update there.
            k = model.top_k() if deeper or depth == 1 else 0
            k = max(k, int(bool(self.options.read_depths & {depth, -1})))
            memory = state.memory if deeper else None
            head = model.read_out(read, rows.targets[index], k, self.options.head_chunk_rows, memory)
        passed = model.pass_of(state, meta.depth, ran, head)
        logit = model.continue_logit(passed) if deeper else None
        gate = None if logit is None else logit.detach().sigmoid()
        weight = None if logit is None else logit.to(state.mass.dtype).sigmoid()
        survival = model.survival(state.mass, weight)
        goes_on = self._goes_on(depth, index, passed, gate, survival.detach()) & (sequence != GHOST)
        self.streams.settle(goes_on)
        if model.readout.mixes_states:
            share = model.readout.weight(state.mass, survival, goes_on, meta.depth)
            kept = state.kept + share[:, None].to(x.dtype) * x
        head = self._probe(depth, level, stopping) if head is None else head
        if not self.count:
            # The one row of a rank without rows takes every pass that others take, and stops with them.
            self.stopped = [(index, kept)]
        elif not level.ghost:
            self.stopped.append((index[~goes_on], kept[~goes_on]))
        return DepthTrace(index, passed, kept, head, logit, survival, goes_on)

    def _goes_on(self, depth: int, index: Tensor, passed: Passed, gate: Tensor | None, survival: Tensor) -> Tensor:
        """Scripted routes or the exit rule, and explored rows besides; bool ``[n]``."""
        if depth == self.max_depth:
            return torch.zeros_like(index, dtype=torch.bool)
        if self.routes is not None:
            return depth < self.routes[index]
        rows, options = self.rows, self.options
        keys = RowKeys(options.seed, rows.example[index], rows.positions[index])
        asked = Asked(
            rows.supervised[index],
            self.max_depth,
            self.threshold,
            rows.oracle[index],
            rows.sequence[index],
            self.length[index],
            options.narrowed,
        )
        goes_on = self.model.goes_on(passed, gate, survival, keys, asked)
        if not options.explore:
            return goes_on
        draw = uniform(keys.seed, keys.example, keys.position, EXPLORE_SALT, depth, width=1, like=index)[:, 0]
        return goes_on | (draw < options.explore)

    def _probe(self, depth: int, level: _Level, kept: Tensor) -> HeadOutput | None:
        """The distribution, its likeliest token too, if every row of this depth stopped here."""
        if not self.options.read_depths & {depth, -1}:
            return None
        if not self.count:
            everyone = [(level.index, kept)]
        else:
            everyone = self.stopped if level.ghost else [*self.stopped, (level.index, kept)]
        hidden = self._finish(everyone)[level.index]
        return self.model.read_out(hidden, self.rows.targets[level.index], 1, self.options.head_chunk_rows)

    def _finish(self, stopped: list[tuple[Tensor, Tensor]]) -> Tensor:
        """What the head reads of all rows ``[rows, d]``: together through the coda, each as it stopped."""
        index, kept = (torch.cat(parts) for parts in zip(*stopped, strict=True))
        view = TrainingStreams(SAME_DEPTH).view(row_meta(self.rows.sequence, self.rows.positions, 1))
        return self.model.finish(kept[index.argsort()], self.rows.positions, view, self.options.checkpointing)

    def _next(self, depth: int, trace: DepthTrace) -> _Level | None:
        """The rows of the next depth; a ghost where only other ranks have some; None where nobody has."""
        if depth == self.max_depth or not self.collectives.any(bool(trace.goes_on.any())):
            return None
        chosen = trace.goes_on.nonzero()[:, 0]
        ghost = chosen.shape[0] == 0
        chosen = chosen.new_zeros(1) if ghost else chosen
        logit = None if trace.continue_logit is None else trace.continue_logit[chosen]
        state = self.model.enter(trace.passed.at(chosen), trace.kept[chosen], logit, trace.survival[chosen])
        return _Level(trace.index[chosen], self._entering(state, depth + 1), ghost)

    def _learns(self, depth: int) -> bool:
        """Whether this pass has a gradient."""
        options = self.options
        unread = options.detach_between and not options.read_depths & {depth, -1}
        return depth > options.constant_depths and not unread

    def _entering(self, state: RowState, depth: int) -> RowState:
        """The state as it enters a pass, a constant where the options say so."""
        if self._learns(depth) and not self.options.detach_between:
            return state
        return state._replace(u=state.u.detach(), kept=state.kept.detach(), mass=state.mass.detach())

    def _touch_added(self, first: DepthTrace) -> Tensor:
        """Zero times what decider, update and adapters make of one row: they have a gradient even when nobody continued
        anywhere, or when this forward was drawn to have one depth."""
        model, one = self.model, slice(0, 1)
        if model.method.max_depth == 1:
            return first.survival.new_zeros(())
        passed = first.passed.at(one)
        logit = model.continue_logit(passed)
        entered = model.enter(passed, first.kept[one], logit, first.survival[one])
        unused = 0.0 if model.adapters is None else model.adapters.idle(passed.x)
        decided = 0.0 if logit is None else logit.sum()
        return 0.0 * (entered.u.sum() + entered.gate.sum() + decided + unused)

    def _mixture(self, depths: list[DepthTrace], executed: Tensor) -> Tensor:
        """Mixture log-probabilities ``[rows]`` of the targets; fp32 or wider."""
        readout, first = self.model.readout, depths[0].log_prob
        mixture = torch.full(executed.shape, -torch.inf, dtype=first.dtype, device=first.device)
        for trace in depths:
            at, single = trace.index, trace.log_prob
            if readout.mixes_distributions:
                survival = None if trace.continue_logit is None else trace.survival
                weight = readout.weight(trace.passed.state.mass, survival, trace.goes_on, executed[at])
                single = torch.logaddexp(mixture[at], log_weight(weight) + single)
            else:
                at, single = at[~trace.goes_on], single[~trace.goes_on]
            mixture = mixture.index_put((at,), single)
        return mixture


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
