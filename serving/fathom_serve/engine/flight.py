"""A request in flight: its tokens, its streams, and the wave of positions that is going through the depths.

Prompt and answer are the same thing to a wave: some positions that run depth 1, then those of them that go on run depth
2, and so on. A prompt is a wave of many positions, an answer token a wave of one. A wave may be cut over several ticks;
its levels run one after the other, since depth m sees all depths up to m of earlier positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fathom_serve.engine.request import DepthUsage, Request, Token
from fathom_serve.kv.pool import PagePool
from fathom_serve.kv.streams import RequestStreams
from fathom_serve.text.stream import TextStream


class Piece(NamedTuple):
    """Rows of one flight for one tick: consecutive positions of its wave, all at one depth.

    Attributes:
        hidden: ``[rows, d]`` states of the depth before; None at depth 1.
        predicts: whether the last row is the wave's last position, whose distribution is sampled.
    """

    flight: "Flight"
    depth: int
    positions: list[int]
    ids: list[int]
    hidden: Tensor | None
    predicts: bool


class PieceOutcome(NamedTuple):
    """What a piece's rows did.

    Attributes:
        goes_on: per row.
        hidden: ``[rows, d]``.
        log_probs: ``[V]`` of the predicting row at this depth alone, else None.
        gate: g of the predicting row where it goes on, else None.
    """

    goes_on: list[bool]
    hidden: Tensor
    log_probs: Tensor | None
    gate: Tensor | None


class Wave:
    """Positions on their way through the depths."""

    def __init__(self, positions: list[int]) -> None:
        self.last = positions[-1]
        self.depth = 1
        self.positions = positions
        self.hidden: Tensor | None = None
        self.cursor = 0
        self._next_positions: list[int] = []
        self._next_hidden: list[Tensor] = []

    @property
    def left(self) -> int:
        """Positions of this level that have not run."""
        return len(self.positions) - self.cursor

    @property
    def done(self) -> bool:
        """Whether no position has anything left to run."""
        return self.left == 0

    def advance(self, outcome: PieceOutcome) -> None:
        """Take in what the piece at the cursor did; at the end of a level the survivors form the next."""
        went = [index for index, on in enumerate(outcome.goes_on) if on]
        self._next_positions += [self.positions[self.cursor + index] for index in went]
        if went:
            self._next_hidden.append(outcome.hidden[torch.tensor(went, device=outcome.hidden.device)])
        self.cursor += len(outcome.goes_on)
        if self.left == 0 and self._next_positions:
            self.depth += 1
            self.positions, self.hidden, self.cursor = self._next_positions, torch.cat(self._next_hidden), 0
            self._next_positions, self._next_hidden = [], []


class Flight:
    """A request that the engine is working on.

    Args:
        request: what was asked.
        max_depth: this request's M.
        threshold: this request's tau.
        pool: where its keys and values go.
        reserved: pages of its worst case, set aside until it ends.
        text: turns its tokens into text.
    """

    def __init__(
        self,
        request: Request,
        max_depth: int,
        threshold: float,
        pool: PagePool,
        reserved: int,
        text: TextStream,
    ) -> None:
        self.request = request
        self.max_depth = max_depth
        self.threshold = threshold
        self.streams = RequestStreams(pool)
        self.reserved = reserved
        self.text = text
        self.ids = list(request.prompt)
        self.depths = [0] * len(self.ids)
        self.wave = Wave(list(range(len(self.ids))))
        self.log_probs: list[Tensor] = []
        self.gates: list[Tensor] = []
        self.answer_depths: list[int] = []

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def answering(self) -> bool:
        """Whether the wave is an answer token rather than the prompt."""
        return len(self.ids) > self.prompt_tokens

    def piece(self, rows: int) -> Piece:
        """The wave's next rows, at most so many; makes room for their keys."""
        wave = self.wave
        part = slice(wave.cursor, min(wave.cursor + rows, len(wave.positions)))
        positions = wave.positions[part]
        self.streams.append(wave.depth, positions)
        return Piece(
            self,
            wave.depth,
            positions,
            [self.ids[position] for position in positions],
            None if wave.hidden is None else wave.hidden[part],
            positions[-1] == wave.last,
        )

    def advance(self, piece: Piece, outcome: PieceOutcome) -> None:
        """Take in a tick's outcome."""
        for position in piece.positions:
            self.depths[position] = piece.depth
        if outcome.log_probs is not None:
            self.log_probs.append(outcome.log_probs)
        if outcome.gate is not None:
            self.gates.append(outcome.gate)
        self.wave.advance(outcome)

    def append(self, token: Token) -> None:
        """A sampled token: it is counted with the depth of the row that predicted it, and runs next."""
        self.answer_depths.append(token.depth)
        self.ids.append(token.id)
        self.depths.append(0)
        self.wave = Wave([len(self.ids) - 1])
        self.log_probs, self.gates = [], []

    def usage(self, model_depth: int) -> DepthUsage:
        """Depths so far; the histogram has one entry per depth of the model."""
        histogram = tuple(self.answer_depths.count(depth) for depth in range(1, model_depth + 1))
        prompt = sum(self.depths[: self.prompt_tokens - 1])
        return DepthUsage(histogram, sum(self.answer_depths), prompt, self.prompt_tokens)
