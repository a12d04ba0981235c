"""The model: every method of the field is these parts in one loop.

    start      token embeddings through the prelude; the first state
    run        the looped layers once, for rows of any depths
    decide     who goes on
    enter      what they enter the next depth with
    finish     the coda, for rows that have stopped

Training (:mod:`fathom.model.levels`) and serving call the same parts: the former depth by depth for whole documents,
the latter for rows of any depths at once.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fathom.errors import ConfigError
from fathom.model.adapter import LowRankAdapters
from fathom.model.attention import StreamView
from fathom.model.backbone import Backbone
from fathom.model.collectives import LOCAL, Collectives
from fathom.model.config import BackboneConfig
from fathom.model.deciders import DECIDERS
from fathom.model.deciding import DecidingHead, Plan
from fathom.model.fit import check_fit
from fathom.model.levels import LoopOptions, Trace, run_levels
from fathom.model.methods import Method, find_part
from fathom.model.noise import truncated_normal, uniform
from fathom.model.readout import READOUTS, mix
from fathom.model.routing import ROUTINGS, Asked, Comparing, Decision, Routing
from fathom.model.rows import PackedRows
from fathom.model.span import resolve_span
from fathom.model.state import Passed, RowKeys, RowState
from fathom.model.update import Update
from fathom.model.updates import UPDATES
from fathom.model.vocabulary import Comparison, HeadOutput, TokenTable

STATE_SALT, ROUTE_SALT = 1, 2
"""Keys that keep a row's random first state apart from its random decisions."""


class LoopedLM(nn.Module):
    """A pretrained decoder whose layers may run again for the tokens that profit from it.

    Args:
        config: the backbone's shape.
        method: the point in the axes.

    Raises:
        ConfigError: a part of the method is unknown, or two of its parts do not go together.
    """

    def __init__(self, config: BackboneConfig, method: Method) -> None:
        super().__init__()
        d = config.hidden_size
        span = resolve_span(method.span, config.layers)
        self.config = config
        self.method = method
        self.readout = find_part(READOUTS, method.readout, "readout")
        self.routing: Routing = find_part(ROUTINGS, method.routing, "routing")
        self.training_routing: Routing = find_part(ROUTINGS, method.training_routing or method.routing, "routing")
        self.table = TokenTable(config.vocab_size, d, config.tied, d**0.5 if config.embedding_scale else 1.0)
        self.backbone = Backbone(config, span)
        self.update: Update = find_part(UPDATES, method.update, "update")(d)
        self.decider: DecidingHead | None = None
        if method.decider is not None:
            self.decider = find_part(DECIDERS, method.decider, "decider")(d, method.max_depth)
        self.adapters = LowRankAdapters(config, span) if method.adapters else None
        self.tap_layers = tap_layers(self.decider, span.body)
        self.reads_each_depth = not span.coda and not self.readout.mixes_states
        check_fit(self)

    @property
    def reads_tokens(self) -> bool:
        """Whether the update or the decider look at the likeliest tokens of each depth."""
        return bool(self.update.top_k or (self.decider is not None and self.decider.top_k))

    @property
    def exit_rule(self) -> Routing:
        """The routing of this mode: training's or decoding's."""
        return self.training_routing if self.training else self.routing

    @property
    def comparing(self) -> Comparing | None:
        """The exit rule of this mode, if it compares the distributions of consecutive passes."""
        return self.exit_rule if isinstance(self.exit_rule, Comparing) else None

    @property
    def reads_every_pass(self) -> bool:
        """Whether every pass ends in a distribution, through the coda where there is one; else the last alone does."""
        return self.reads_each_depth or self.comparing is not None

    def set_max_depth(self, max_depth: int) -> None:
        """Another M than the trained one, deeper or shallower.

        Raises:
            ConfigError: the method has one depth, or its decider has weights for the trained depths only.
        """
        trained = self.decider.max_depth if self.decider is not None and self.decider.has_depths else None
        if (self.method.update == "none" and max_depth > 1) or (trained is not None and max_depth > trained):
            raise ConfigError(
                f"max_depth {max_depth}: method {self.method.name!r} has weights for {trained or 1} depths only",
                f"ask for at most {trained or 1}",
            )
        self.method = replace(self.method, max_depth=max_depth)

    def reset_added(self, seed: int) -> None:
        """Initialise the parts that the base model lacks, from the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        for part in (self.update, self.decider, self.adapters):
            if part is not None:
                part.reset(generator)

    def start(
        self, ids: Tensor, positions: Tensor, view: StreamView, keys: RowKeys, checkpointing: bool = False
    ) -> tuple[RowState, Plan | None]:
        """Rows as they enter depth 1, and what a router plans for them.

        Args:
            ids: int64 ``[rows]``.
            positions: int64 ``[rows]``.
            view: streams of the prelude.
            keys: of the random first state.
            checkpointing: recompute layers in the backward.
        """
        e = self.table(ids=ids)
        z = self.backbone.prelude(e, positions, view, checkpointing) if self.backbone.span.prelude else e
        noise = None
        if self.update.draws_state:
            draws = uniform(keys.seed, keys.example, keys.position, STATE_SALT, width=e.shape[1], like=ids)
            noise = truncated_normal(draws) * self.table.scale  # as wide as the embeddings (methods 4.1)
        u = self.update.start(z, noise)
        plan = None if self.decider is None else self.decider.plan(u)
        mass = torch.ones(ids.shape, dtype=_wide(e), device=e.device)
        gate, planned = (mass, torch.zeros_like(ids)) if plan is None else (plan.gate.to(mass.dtype), plan.depth)
        width = 0 if self.comparing is None else self.comparing.memory_width(e.shape[1])
        memory = mass.new_zeros(ids.shape[0], width)
        return RowState(e, z, u, torch.zeros_like(e), mass, gate, planned, memory), plan

    def run(
        self, state: RowState, depth: Tensor, positions: Tensor, view: StreamView, checkpointing: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """The looped layers once.

        Args:
            state: the rows.
            depth: int64 ``[rows]``, the depth that each runs.
            positions: int64 ``[rows]``.
            view: streams of the body.
            checkpointing: recompute layers in the backward.

        Returns:
            The body's output y, the state x, its final norm h, all ``[rows, d]``, and the decider's taps.
        """
        deep = depth > 1
        adapted = deep[:, None].to(state.u.dtype) if self.adapters is not None and bool(deep.any()) else None
        y, taps = self.backbone.body(state.u, positions, view, checkpointing, self.adapters, adapted, self.tap_layers)
        x = self.update.carry(state, y, depth)
        return y, x, self.backbone.norm(x), taps

    def pass_of(
        self,
        state: RowState,
        depth: Tensor,
        run: tuple[Tensor, Tensor, Tensor, list[Tensor]],
        head: HeadOutput | None,
    ) -> Passed:
        """Everything that decider and update may look at."""
        y, x, h, taps = run
        top = h.new_zeros(h.shape[0], 0) if head is None else head.top
        change, memory = (torch.zeros_like(state.mass), state.memory) if head is None else (head.change, head.memory)
        logits, embedding = top, None
        if head is not None and top.shape[1]:
            logits = top.clamp_min(torch.finfo(top.dtype).tiny).log() + head.log_sum_exp[:, None]
            if self.update.top_k:
                best = slice(0, self.update.top_k)
                weights = top[:, best] / top[:, best].sum(-1, keepdim=True)
                embedding = self.table(mix=(head.top_ids[:, best], weights)).to(x.dtype)
        return Passed(depth, state, y, x, h, taps, top, logits, embedding, change, memory)

    def continue_logit(self, passed: Passed) -> Tensor | None:
        """The decider's logit ``[rows]``; None for methods that decide without one."""
        return self.decider.logit(passed) if self.decider is not None and self.decider.per_depth else None

    def survival(self, mass: Tensor, continue_prob: Tensor | None) -> Tensor:
        """Mass ``[rows]`` that depths up to this one leave to deeper ones."""
        if self.decider is None or continue_prob is None:
            return mass
        return self.decider.survive(mass, continue_prob.to(mass.dtype))

    def goes_on(
        self,
        passed: Passed,
        continue_prob: Tensor | None,
        survival: Tensor,
        keys: RowKeys,
        asked: Asked,
    ) -> Tensor:
        """The exit rule, bool ``[rows]``.

        Args:
            passed: rows that have just run a depth.
            continue_prob: g ``[rows]``, None for methods that decide without one.
            survival: ``[rows]``, from :meth:`survival`.
            keys: of random decisions.
            asked: what the caller knows of them.
        """
        rule, depth = self.exit_rule, passed.depth
        draw = torch.zeros(depth.shape, dtype=torch.float64, device=depth.device)
        if rule.draws:
            draw = uniform(keys.seed, keys.example, keys.position, ROUTE_SALT, depth, width=1, like=depth)[:, 0]
        change = passed.change
        if rule.reads_change:
            change = ((passed.x - passed.state.u).norm(dim=-1) / passed.x.norm(dim=-1)).to(survival.dtype)
        decision = Decision(
            continue_prob=continue_prob,
            depth=depth,
            survival=survival,
            planned=passed.state.planned,
            draw=draw,
            change=change,
            **asked._asdict(),
        )
        return rule.goes_on(decision) & (depth < asked.max_depth)

    def kept(self, state: RowState, x: Tensor, h: Tensor) -> Tensor:
        """What the readout holds after a pass, ``[rows, d]``, before any weight is known."""
        return state.kept + h if self.readout.sums_hidden else x

    def enter(self, passed: Passed, kept: Tensor, logit: Tensor | None, survival: Tensor) -> RowState:
        """Rows as they enter their next depth."""
        before = passed.state
        u = self.update.enter(passed)
        gate = before.gate
        if self.decider is not None and logit is not None:
            gate = self.decider.next_gate(passed, logit).to(gate.dtype)
        return RowState(before.e, before.z, u, kept, survival, gate, before.planned, passed.memory)

    def stopping(self, state: RowState, x: Tensor, kept: Tensor) -> Tensor:
        """What the readout holds of rows that stop after this pass, ``[rows, d]``."""
        return state.kept + state.mass[:, None].to(x.dtype) * x if self.readout.mixes_states else kept

    def end(
        self, stopping: Tensor, h: Tensor, positions: Tensor, view: StreamView, checkpointing: bool = False
    ) -> Tensor:
        """What the head reads after a pass, ``[rows, d]``, of methods and rules that read every one.

        The coda is then part of the pass: it attends to the body's streams and leaves its keys there.
        """
        if self.reads_each_depth and not self.readout.sums_hidden:
            return h
        return self.finish(stopping, positions, view, checkpointing)

    def finish(self, kept: Tensor, positions: Tensor, view: StreamView, checkpointing: bool = False) -> Tensor:
        """What the head reads of rows that have stopped, ``[rows, d]``.

        Args:
            kept: ``[rows, d]``, as the readout left it.
            positions: int64 ``[rows]``.
            view: streams of the coda: one key per token.
            checkpointing: recompute layers in the backward.
        """
        if self.readout.sums_hidden:
            return kept
        if not self.backbone.span.coda:
            return self.backbone.norm(kept)
        x = self.backbone.norm(kept) if self.update.norm_before_coda else kept
        return self.backbone.norm(self.backbone.coda(x, positions, view, checkpointing))

    def logits(self, h: Tensor) -> Tensor:
        """Full logits ``[rows, V]``, fp32 or wider; for serving, which needs them for few rows."""
        return self.table.logits(h)

    def mix(self, log_probs: list[Tensor], gates: list[Tensor]) -> Tensor:
        """A token's log-probabilities ``[V]`` from those of its executed depths and their continue probabilities."""
        return mix(self.readout, log_probs, gates, self.survival)

    def read_out(
        self, hidden: Tensor, targets: Tensor, k: int, chunk_rows: int, memory: Tensor | None = None
    ) -> HeadOutput:
        """Target log-probabilities, log-sum-exps and top-k probabilities of hidden states ``[rows, d]``, and what the
        exit rule finds who compares them with its ``memory``."""
        rule = self.comparing
        comparison = None if rule is None or memory is None else Comparison(rule.compare, memory)
        return self.table(head=(hidden, targets, k, chunk_rows, comparison))

    def top_k(self) -> int:
        """How many of each depth's likeliest tokens the parts look at."""
        return max(self.update.top_k, self.decider.top_k if self.decider is not None else 0)

    def forward(self, rows: PackedRows, collectives: Collectives = LOCAL, options: LoopOptions | None = None) -> Trace:
        """All depths of whole documents, level by level; see :func:`fathom.model.levels.run_levels`."""
        return run_levels(self, rows, collectives, options or LoopOptions())


def tap_layers(decider: DecidingHead | None, body: int) -> tuple[int, ...]:
    """Which layers of the body the decider reads, counted from the body's first."""
    shares = () if decider is None else decider.tap_shares
    return tuple(min(body - 1, round(share * body)) for share in shares)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
