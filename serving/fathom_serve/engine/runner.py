"""One forward for all rows of a tick, whatever their request and depth, and their decisions."""

from typing import NamedTuple

import torch
from torch import Tensor

from fathom.model.looped import LoopedLM
from fathom.model.routing import Asked
from fathom.model.state import RowKeys, RowState
from fathom.model.visibility import SAME_DEPTH
from fathom.model.vocabulary import HeadOutput, read_logits
from fathom_serve.engine.flight import FINISH, Piece, PieceOutcome
from fathom_serve.kv.pool import PagePool
from fathom_serve.kv.view import PagedStreams, Run


class _Rows(NamedTuple):
    """Rows of a tick that run the body, all ``[rows]``."""

    ids: Tensor
    positions: Tensor
    depth: Tensor
    max_depth: Tensor
    threshold: Tensor
    generates: Tensor
    predicts: Tensor
    seeds: Tensor
    script: Tensor


class _Made(NamedTuple):
    """What a tick's body rows made.

    Attributes:
        goes_on: bool ``[rows]``.
        states: of the rows that go on, in order, as they enter the next depth.
        kept: ``[rows, d]`` for the readout, of methods that read once.
        read: ``[rows, d]``, what the head reads of methods that read every pass; else as ``kept``.
        log_probs: by row, of those that predict, at this depth alone.
        gates: ``[rows]``, NaN where nothing decided.
    """

    goes_on: Tensor
    states: RowState
    kept: Tensor
    read: Tensor
    log_probs: dict[int, Tensor]
    gates: Tensor


class Runner:
    """Runs ticks of a model.

    Args:
        model: in the dtype and on the device it serves with.
        pool: pages of keys and values.
        head_rows: rows whose logits exist at once, beside those that predict.
    """

    def __init__(self, model: LoopedLM, pool: PagePool, head_rows: int) -> None:
        self.model = model
        self.pool = pool
        self.head_rows = head_rows
        self.forwards = 0
        self.rows_run = 0

    @torch.inference_mode()
    def execute(self, pieces: list[Piece]) -> list[PieceOutcome]:
        """Run the pieces, those of any depth in one call of the looped layers; at most one piece per request, since its
        rows may need each other."""
        outcomes: dict[int, PieceOutcome] = {}
        # The first pass of new tokens runs the prelude too: they come first.
        looping = sorted((p for p in pieces if p.depth != FINISH), key=lambda piece: piece.depth > 1)
        finishing = [piece for piece in pieces if piece.depth == FINISH]
        self.forwards += 1
        self.rows_run += sum(len(piece.positions) for piece in pieces)
        for batch, run in ((looping, self._loop), (finishing, self._finish)):
            if batch:
                outcomes |= {id(piece): outcome for piece, outcome in zip(batch, run(batch), strict=True)}
        return [outcomes[id(piece)] for piece in pieces]

    def _loop(self, pieces: list[Piece]) -> list[PieceOutcome]:
        """Depths 1 to M: prelude where it is due, the body, and decisions."""
        rows = self._rows(pieces)
        first = [piece for piece in pieces if piece.depth == 1]
        states = [piece.state for piece in pieces if piece.state is not None]
        if first:
            count = sum(len(piece.positions) for piece in first)
            keys = _keys(rows, slice(0, count))
            view = self._view(SAME_DEPTH, first)
            state, _ = self.model.start(rows.ids[:count], rows.positions[:count], view, keys)
            # A router's plan ends where the request does.
            states.insert(0, state._replace(planned=torch.minimum(state.planned, rows.max_depth[:count])))
        state = RowState(*(torch.cat(fields) for fields in zip(*states, strict=True)))
        view = self._view(self.model.method.visibility, pieces)
        ran = self.model.run(state, rows.depth, rows.positions, view)
        _, x, h, _ = ran
        kept = read = self.model.kept(state, x, h)
        if self.model.reads_every_pass:
            read = self.model.end(self.model.stopping(state, x, kept), h, rows.positions, view)
        made = self._decide(rows, state, ran, kept, read)
        return _split(pieces, made, self.model.reads_every_pass)

    def _finish(self, pieces: list[Piece]) -> list[PieceOutcome]:
        """The coda, for rows that have stopped, and the distribution of the row that predicts."""
        positions = self._positions(pieces)
        kept = torch.cat([piece.kept for piece in pieces if piece.kept is not None])
        hidden = self.model.finish(kept, positions, self._view(SAME_DEPTH, pieces))
        outcomes, end = [], 0
        for piece in pieces:
            end += len(piece.positions)
            log_probs = self.model.logits(hidden[end - 1 : end])[0].log_softmax(-1) if piece.predicts else None
            outcomes.append(PieceOutcome([False] * len(piece.positions), None, None, log_probs, None))
        return outcomes

    def _view(self, rule: str, pieces: list[Piece]) -> PagedStreams:
        # Prelude and coda have one key per token, which lies beside its first pass.
        runs = [Run(piece.flight.streams, max(piece.depth, 1), piece.positions) for piece in pieces]
        return PagedStreams(rule, self.pool, runs)

    def _positions(self, pieces: list[Piece]) -> Tensor:
        return torch.tensor([p for piece in pieces for p in piece.positions], device=self.pool.keys.device)

    def _rows(self, pieces: list[Piece]) -> _Rows:
        device = self.pool.keys.device
        counts = torch.tensor([len(piece.positions) for piece in pieces])

        def spread(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

        positions = self._positions(pieces)
        predicts = torch.zeros_like(positions, dtype=torch.bool)
        ends = counts.cumsum(0) - 1
        predicts[ends.to(device)] = torch.tensor([piece.predicts for piece in pieces], device=device)
        return _Rows(
            torch.tensor([token for piece in pieces for token in piece.ids], device=device),
            positions,
            spread([piece.depth for piece in pieces], torch.int64),
            spread([piece.flight.terms.max_depth for piece in pieces], torch.int64),
            spread([piece.flight.terms.threshold for piece in pieces], torch.float64),
            positions >= spread([piece.flight.prompt_tokens - 1 for piece in pieces], torch.int64),
            predicts,
            spread([piece.flight.request.sampling.seed for piece in pieces], torch.int64),
            torch.tensor([depth for piece in pieces for depth in piece.script], device=device),
        )

    def _decide(
        self,
        rows: _Rows,
        state: RowState,
        ran: tuple[Tensor, Tensor, Tensor, list[Tensor]],
        kept: Tensor,
        read: Tensor,
    ) -> _Made:
        """Readout and exit rule, a tile of rows at a time: logits are made only for rows that sample or gate."""
        model, (y, x, h, taps) = self.model, ran
        made = _Made(
            torch.zeros_like(rows.predicts),
            state.at(slice(0, 0)),
            kept,
            read,
            {},
            torch.full_like(state.mass, torch.nan),
        )
        asked = torch.ones_like(rows.predicts)
        if model.reads_every_pass:
            asked = (rows.depth < rows.max_depth) | rows.predicts
        following = []
        for tile in asked.nonzero()[:, 0].split(self.head_rows):
            part = (y[tile], x[tile], h[tile], [tap[tile] for tap in taps])
            following.append(self._decide_tile(rows, tile, state.at(tile), part, made))
        states = RowState(*(torch.cat(fields) for fields in zip(*following, strict=True))) if following else made.states
        return made._replace(states=states)

    def _read_tile(self, rows: _Rows, tile: Tensor, state: RowState, made: _Made) -> HeadOutput | None:
        """The distributions of rows that predict, into ``made``; returns what the parts look at of every row's, None
        where they look at nothing."""
        model, rule = self.model, self.model.comparing
        if not model.reads_every_pass:
            return None
        looked_at = model.reads_tokens or rule is not None
        wanted = torch.ones_like(rows.predicts[tile]) if looked_at else rows.predicts[tile]
        local = wanted.nonzero()[:, 0]
        logits = model.logits(made.read[tile[local]])
        for place, row in enumerate(tile[local].tolist()):
            if rows.predicts[row]:
                made.log_probs[row] = logits[place].log_softmax(-1)
        if not looked_at:
            return None
        head = read_logits(logits, model.top_k())
        if rule is None:
            return head
        may = rows.depth[tile] < rows.max_depth[tile]
        log_probs, read = logits[may].log_softmax(-1), made.read[tile[may]]
        found = rule.compare(log_probs, read, state.memory[may], lambda hidden: model.logits(hidden).log_softmax(-1))
        change, memory = head.change, state.memory.clone()
        change[may], memory[may] = found
        return head._replace(change=change, memory=memory)

    def _decide_tile(
        self,
        rows: _Rows,
        tile: Tensor,
        state: RowState,
        ran: tuple[Tensor, Tensor, Tensor, list[Tensor]],
        made: _Made,
    ) -> RowState:
        """Decisions of some rows, written into ``made``; returns how those that go on enter their next depth."""
        model, (_, x, _, _), depth = self.model, ran, rows.depth[tile]
        # At a row's last depth nothing decides.
        may = (depth < rows.max_depth[tile]).nonzero()[:, 0]
        asked = tile[may]
        passed = model.pass_of(state, depth, ran, self._read_tile(rows, tile, state, made)).at(may)
        logit = model.continue_logit(passed)
        gate = None if logit is None else logit.to(state.mass.dtype).sigmoid()
        survival = model.survival(state.mass[may], gate)
        keys = _keys(rows, asked)
        goes_on = model.goes_on(passed, gate, survival, keys, _asked(rows, asked, state.mass.dtype))
        # A token that was told with its depth repeats it.
        script = rows.script[asked]
        goes_on = torch.where(script > 0, depth[may] < script, goes_on)
        made.goes_on[asked] = goes_on
        if gate is not None:
            made.gates[asked] = gate
        if model.readout.mixes_states:
            left = torch.zeros_like(state.mass).index_put((may,), survival)
            share = model.readout.weight(state.mass, left, made.goes_on[tile], depth)
            made.kept[tile] = state.kept + share[:, None].to(x.dtype) * x
        on = goes_on.nonzero()[:, 0]
        return model.enter(passed.at(on), made.kept[asked[on]], None if logit is None else logit[on], survival[on])


def _keys(rows: _Rows, which: Tensor | slice) -> RowKeys:
    """What keys the draws of a method that draws. Rows of many requests share a forward, which has one run's seed but
    an example per row: a request's seed takes the example's place.

    All answers of a request have the same keys, unlike their sampling noise, which the choice keys too. They begin on
    one prompt that ran once, and what one of them leaves to the prefix cache serves any request with its seed.
    """
    return RowKeys(0, rows.seeds[which], rows.positions[which])


def _asked(rows: _Rows, which: Tensor, wide: torch.dtype) -> Asked:
    """What each request asked for. Of its sequence as a whole, and of what data might want, serving knows nothing."""
    unknown = torch.zeros_like(which)
    threshold = rows.threshold[which].to(wide)
    return Asked(rows.generates[which], rows.max_depth[which], threshold, unknown, unknown, unknown)


def _split(pieces: list[Piece], made: _Made, reads_each_depth: bool) -> list[PieceOutcome]:
    outcomes, start, entered = [], 0, 0
    for piece in pieces:
        stop = start + len(piece.positions)
        last, goes_on = stop - 1, made.goes_on[start:stop].tolist()
        state = made.states.at(slice(entered, entered + sum(goes_on)))
        entered += sum(goes_on)
        decided = piece.predicts and goes_on[-1] and not bool(made.gates[last].isnan())
        kept = None if reads_each_depth else made.kept[start:stop]
        gate = made.gates[last] if decided else None
        outcomes.append(PieceOutcome(goes_on, state, kept, made.log_probs.get(last), gate))
        start = stop
    return outcomes
