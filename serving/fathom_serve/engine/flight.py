"""A request in flight: its tokens, its streams, and the wave of positions that is going through the depths.

Prompt and answer are the same thing to a wave: some positions that run depth 1, then those of them that go on run depth
2, and so on. A prompt is a wave of many positions, an answer token a wave of one. A wave may be cut over several ticks;
its levels run one after the other, since depth m sees all depths up to m of earlier positions. Methods with a coda run
it as one more level, over all positions, when the last of them has stopped.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.model.state import RowState
from fathom_serve.engine.door import Terms
from fathom_serve.engine.request import DepthUsage, Request, Token
from fathom_serve.engine.schedule import Order
from fathom_serve.kv.prefix import Block
from fathom_serve.kv.streams import RequestStreams
from fathom_serve.text.stream import TextStream

FINISH = 0
"""The depth of pieces that run the coda."""


class Piece(NamedTuple):
    """Rows of one flight for one tick: consecutive positions of its wave, all at one depth.

    Attributes:
        script: per row the depth that it ran to before its flight was preempted, and runs to again; 0 where the exit
            rule decides.
        state: as the rows enter this depth; None at depth 1 and in the coda.
        kept: ``[rows, d]``, what the readout holds of rows that run the coda; None elsewhere.
        predicts: whether the last row is the wave's last position, whose distribution is sampled.
    """

    flight: "Flight"
    depth: int
    positions: list[int]
    ids: list[int]
    script: list[int]
    state: RowState | None
    kept: Tensor | None
    predicts: bool


class PieceOutcome(NamedTuple):
    """What a piece's rows did.

    Attributes:
        goes_on: per row.
        state: of the rows that go on, as they enter the next depth.
        kept: ``[rows, d]`` for the readout, of methods that read once, after the last depth; else None.
        log_probs: ``[V]`` of the predicting row at this depth alone (or after the coda), else None.
        gate: g of the predicting row where it goes on, else None.
    """

    goes_on: list[bool]
    state: RowState | None
    kept: Tensor | None
    log_probs: Tensor | None
    gate: Tensor | None


class Wave:
    """Positions on their way through the depths."""

    def __init__(self, positions: list[int]) -> None:
        self.last = positions[-1]
        self.depth = 1
        self.positions = positions
        self.state: RowState | None = None
        self.kept: Tensor | None = None
        self.cursor = 0
        self._next_positions: list[int] = []
        self._next_states: list[RowState] = []
        self._stopped: list[tuple[int, Tensor]] = []

    @property
    def left(self) -> int:
        """Positions of this level that have not run."""
        return len(self.positions) - self.cursor

    @property
    def done(self) -> bool:
        """Whether no position has anything left to run."""
        return self.left == 0

    def next(self, rows: int) -> list[int]:
        """The positions that run next, at most so many."""
        return self.positions[self.cursor : self.cursor + rows]

    def advance(self, outcome: PieceOutcome) -> None:
        """Take in what the piece at the cursor did; at the end of a level the survivors form the next."""
        here = self.positions[self.cursor : self.cursor + len(outcome.goes_on)]
        self._next_positions += [position for position, on in zip(here, outcome.goes_on, strict=True) if on]
        if any(outcome.goes_on) and outcome.state is not None:
            self._next_states.append(outcome.state)
        if outcome.kept is not None:
            went = zip(here, outcome.goes_on, outcome.kept, strict=True)
            self._stopped += [(position, kept) for position, on, kept in went if not on]
        self.cursor += len(outcome.goes_on)
        if self.left == 0:
            self._next_level()

    def _next_level(self) -> None:
        if self._next_positions:
            self.depth += 1
            self.positions, self.cursor = self._next_positions, 0
            self.state = RowState(*(torch.cat(fields) for fields in zip(*self._next_states, strict=True)))
            self._next_positions, self._next_states = [], []
        elif self._stopped:
            self._stopped.sort(key=lambda pair: pair[0])
            self.depth, self.cursor, self.state = FINISH, 0, None
            self.positions = [position for position, _ in self._stopped]
            self.kept = torch.stack([kept for _, kept in self._stopped])
            self._stopped = []


class Flight:
    """One answer that the engine is working on.

    Args:
        request: what was asked.
        terms: what it got.
        order: who goes first.
        streams: where its keys and values go.
        text: turns its tokens into text.
        choice: which of the request's answers this is.

    Attributes:
        reading: whether it runs positions in bulk: its prompt, or all that was known when it was preempted.
        since: the tick from which its next rows have waited.
        least: pages that it is known to need.
        submitted_s: when it was submitted, on the engine's clock.
        cached: prompt tokens whose keys and values another request had left.
    """

    def __init__(
        self, request: Request, terms: Terms, order: Order, streams: RequestStreams, text: TextStream, choice: int = 0
    ) -> None:
        self.request = request
        self.terms = terms
        self.order = order
        self.choice = choice
        self.streams = streams
        self.text = text
        self.ids = list(request.prompt)
        self.history: list[int] = []
        self.answer_depths: list[int] = []
        self.since = 0
        self.least = 0
        self.submitted_s = 0.0
        self.cached = 0
        self._restart()

    def _restart(self) -> None:
        self.reading = True
        self.depths = [0] * len(self.ids)
        self.wave = Wave(list(range(len(self.ids))))
        self.log_probs: list[Tensor] = []
        self.gates: list[Tensor] = []

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def answer(self) -> list[int]:
        """Tokens generated so far."""
        return self.ids[self.prompt_tokens :]

    @property
    def answering(self) -> bool:
        """Whether the prompt has been read and an answer begun."""
        return len(self.ids) > self.prompt_tokens

    @property
    def begun(self) -> bool:
        """Whether the answer token has run some of its depths and not all."""
        return not self.reading and self.wave.depth != 1

    @property
    def left(self) -> int:
        """Rows that could run now."""
        return self.wave.left

    @property
    def places(self) -> int:
        """How many answers it stands for."""
        return 1 if self.answering else self.request.sampling.n

    @property
    def worst(self) -> int:
        """Pages of the answers it stands for, if all are as long and deep as may be."""
        return self.terms.pages + (self.places - 1) * self.terms.answer_pages

    def late(self, now_s: float) -> str | None:
        """Which of its deadlines has passed, in words."""
        asked, waited_s = self.request, now_s - self.submitted_s
        if asked.total_s is not None and waited_s > asked.total_s:
            return f"the answer took longer than the {asked.total_s:g} s that the request allows"
        if asked.first_token_s is not None and waited_s > asked.first_token_s and not self.answering:
            return f"the first token took longer than the {asked.first_token_s:g} s that the request allows"
        return None

    def fits(self, rows: int, pages: int) -> int:
        """How many of the wave's next rows, at most ``rows``, can run with so many new pages."""
        positions = self.wave.next(rows)
        return len(positions) if self.wave.depth == FINISH else self.streams.fits(self.wave.depth, positions, pages)

    def piece(self, rows: int) -> Piece:
        """The wave's next rows, at most so many; makes room for their keys."""
        wave, known = self.wave, len(self.history)
        positions = wave.next(rows)
        part = slice(wave.cursor, wave.cursor + len(positions))
        if wave.depth != FINISH:
            self.streams.append(wave.depth, positions)
        return Piece(
            self,
            wave.depth,
            positions,
            [self.ids[position] for position in positions],
            [self.history[position] if position < known else 0 for position in positions],
            None if wave.state is None else wave.state.at(part),
            None if wave.kept is None else wave.kept[part],
            positions[-1] == wave.last,
        )

    def advance(self, piece: Piece, outcome: PieceOutcome) -> None:
        """Take in a tick's outcome."""
        if piece.depth != FINISH:
            for position in piece.positions:
                self.depths[position] = piece.depth
        if outcome.log_probs is not None:
            self.log_probs.append(outcome.log_probs)
        if outcome.gate is not None:
            self.gates.append(outcome.gate)
        self.wave.advance(outcome)

    def append(self, token: Token) -> None:
        """A sampled token: it is counted with the depth of the row that predicted it, and runs next."""
        self.history += self.depths[len(self.history) :]
        self.answer_depths.append(token.depth)
        self.ids.append(token.id)
        self.depths.append(0)
        self.reading = False
        self.wave = Wave([len(self.ids) - 1])
        self.log_probs, self.gates = [], []

    def fork(self, choice: int) -> "Flight":
        """Another answer to the same prompt, which has just been read."""
        text = TextStream(self.text.decode, self.text.stop)
        other = Flight(self.request, self.terms, (*self.order[:2], choice), self.streams.fork(), text, choice)
        other.since, other.cached, other.submitted_s = self.since, self.cached, self.submitted_s
        other.depths, other.wave = list(self.depths), self.wave
        other.log_probs, other.gates = self.log_probs, self.gates
        return other

    def adopt(self, blocks: Sequence[Block], size: int) -> None:
        """Begin after these blocks, which another request has left, instead of at the first token."""
        limit = self.terms.max_depth
        for number, block in enumerate(blocks):
            start = number * size
            self.streams.adopt(block.pages[:limit], block.depths, start)
            self.depths[start : start + size] = [min(depth, limit) for depth in block.depths]
        known = len(blocks) * size
        self.wave = Wave(list(range(known, len(self.ids))))
        if not self.answering:
            self.cached = known

    def rewind(self) -> None:
        """Give up every page. All positions run again, those before the newest to the depths that they ran to: what
        was told stays true, whatever rounding does to a decision. The newest token begins anew."""
        # What it holds now, and room to go on at every depth.
        self.least = min(self.worst, len(self.streams.held()) + self.terms.max_depth)
        self.streams.release()
        self._restart()

    def usage(self, model_depth: int) -> DepthUsage:
        """Depths so far; the histogram has one entry per depth of the model."""
        histogram = tuple(self.answer_depths.count(depth) for depth in range(1, model_depth + 1))
        prompt = sum(self.depths[: self.prompt_tokens - 1])
        return DepthUsage(histogram, sum(self.answer_depths), prompt, self.prompt_tokens, self.cached)
