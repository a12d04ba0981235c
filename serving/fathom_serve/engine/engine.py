"""The engine: requests in, events out, one tick at a time. It has no thread of its own."""

import logging
import time
from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from fathom.errors import ConfigError
from fathom.model.looped import LoopedLM
from fathom_serve.engine.door import Door
from fathom_serve.engine.flight import Flight, Piece
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.memory import Memory
from fathom_serve.engine.request import (
    Alternative,
    Event,
    Failed,
    Finished,
    Progress,
    Request,
    RequestRefused,
    Token,
)
from fathom_serve.engine.runner import Runner
from fathom_serve.engine.sample import choose
from fathom_serve.engine.schedule import POLICIES, order_of
from fathom_serve.text.stream import TextStream

log = logging.getLogger(__name__)

by_order = attrgetter("order")


class Told(NamedTuple):
    """An event and whose it is."""

    request_id: str
    event: Event


class Engine:
    """Continuous batching over depths, for one model.

    A request is let in when the pages that it is expected to need are free. Where more are needed after all, the newest
    request gives its pages up and repeats its rows later: a lack of memory takes time, and never a depth.

    Args:
        model: a looped model in evaluation mode, in its serving dtype.
        limits: sizes.
        decode: token ids to text, special tokens left out.
        stop_ids: tokens that end an answer.
        clock: seconds, for deadlines.
    """

    def __init__(
        self,
        model: LoopedLM,
        limits: EngineLimits,
        decode: Callable[[list[int]], str],
        stop_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if model.routing.reads_targets:
            raise ConfigError(
                f"method {model.method.name!r} decodes with exit rule {model.method.routing!r}, which looks at a whole "
                "sequence or at training data",
                "export the model with a routing that decodes token by token",
            )
        if limits.max_depth is not None:
            model.set_max_depth(limits.max_depth)
        self.model = model.eval()
        self.limits = limits
        self.decode = decode
        self.stop_ids = stop_ids
        self.clock = clock
        self.context = min(limits.context_tokens or model.config.max_positions, model.config.max_positions)
        self.memory = Memory(model, limits, self.context)
        self.pool = self.memory.pool
        self.door = Door(model, limits, self.context, self.pool.pages)
        self.runner = Runner(model, self.pool, limits.head_rows)
        self.policy = POLICIES[limits.policy]
        self.queue: list[Flight] = []
        self.active: list[Flight] = []
        self.ticks = 0
        self.preemptions = 0
        self._submitted = 0

    @property
    def busy(self) -> bool:
        """Whether a tick would do anything."""
        return bool(self.active or self.queue)

    def submit(self, request: Request) -> Flight:
        """Queue a request; returns its first answer, to look at.

        Raises:
            RequestRefused: invalid (400), larger than the pool even alone (400), or the queue is full (503).
        """
        terms, text = self.door.check(request), TextStream(self.decode, request.sampling.stop)
        order = order_of(self.ticks, request.priority, self.limits.ageing_ticks, self._submitted)
        flight = Flight(request, terms, order, self.memory.streams(), text)
        flight.submitted_s = self.clock()
        line = list(self.queue)
        insort(line, flight, key=by_order)
        # Those whom the next tick takes in do not wait: many that arrive between two ticks may fill every place.
        most = self.limits.max_queued
        if len(line) > most and len(line) - self._admissible(line) > most:
            waiting = f"{len(self.queue)} requests are waiting already"
            raise RequestRefused(Failed(503, waiting, None, "queue_full", self._drain_s()))
        self._submitted += 1
        self.queue = line
        return flight

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is; its pages are free at once. Unknown ids are ignored: it may just
        have ended."""
        self.queue = [flight for flight in self.queue if flight.request.id != request_id]
        for flight in [flight for flight in self.active if flight.request.id == request_id]:
            self._end(flight)

    def preempt(self, flight: Flight) -> None:
        """Take an active flight's pages; it waits in the queue, where it was before, and its rows run again."""
        self.active.remove(flight)
        self.memory.keep(flight)
        flight.rewind()
        insort(self.queue, flight, key=by_order)
        self.preemptions += 1
        self.memory.forecast.learn(flight.worst, flight.worst)

    def abandon(self) -> list[str]:
        """Forget everything, after a defect; returns the ids."""
        ids = list(dict.fromkeys(flight.request.id for flight in (*self.active, *self.queue)))
        for request_id in ids:
            self.abort(request_id)
        return ids

    def tick(self) -> list[Told]:
        """Give up what is late, admit, run one forward over rows of all requests in flight, sample what is settled."""
        told = self._expire()
        self._admit()
        if not self.active:
            return told
        pieces = self._plan()
        outcomes = self.runner.execute(pieces)
        self.ticks += 1
        settled: list[Flight] = []
        for piece, outcome in zip(pieces, outcomes, strict=True):
            piece.flight.advance(piece, outcome)
            if piece.flight.wave.done:
                settled += self._choices(piece.flight)
        told += [event for flight in settled for event in self._settle(flight)]
        if self.limits.books == "tick" or not self.active:
            self.check_books()
        return told

    def check_books(self) -> None:
        """Every page that is not free belongs to a living request or to the prefix cache.

        Raises:
            RuntimeError: the books do not balance.
        """
        self.memory.check(self.active)

    def _admissible(self, line: Sequence[Flight]) -> int:
        """How many from the front of the line have a place now. The head waits until what it is expected to need is
        free, beside what those in flight are expected to need yet, and nobody passes it."""
        places = self.limits.max_active - sum(flight.places for flight in self.active)
        room = self.memory.room(self.active)
        for count, flight in enumerate(line):
            places -= flight.places
            room -= self.memory.expected(flight)
            # Alone a request always fits: the door has seen to that.
            if places < 0 or (room < 0 and (self.active or count)):
                return count
        return len(line)

    def _drain_s(self) -> int:
        """A rough time until a place is free: answers in flight at ten tokens per second."""
        left = min(f.request.sampling.max_tokens - len(f.answer_depths) for f in (*self.active, *self.queue))
        return min(60, 1 + left // 10)

    def _expire(self) -> list[Told]:
        now_s = self.clock()
        late = {flight.request.id: why for flight in (*self.active, *self.queue) if (why := flight.late(now_s))}
        for name in late:
            self.abort(name)
        return [Told(name, Failed(504, why, None, "deadline_exceeded")) for name, why in late.items()]

    def _admit(self) -> None:
        count = self._admissible(self.queue) if self.queue else 0
        for flight in self.queue[:count]:
            flight.since = self.ticks
            self.memory.begin(flight)
        self.active += self.queue[:count]
        self.queue = self.queue[count:]

    def _plan(self) -> list[Piece]:
        """The tick's rows: what the policy picks, as far as there are pages for it."""
        while True:
            pieces = self._pieces()
            if pieces:
                return pieces
            if len(self.active) == 1:
                raise RuntimeError(f"request {self.active[0].request.id} has no page although it is alone")
            # Those that were picked lack pages, which others hold: the oldest of all is never the one to go.
            self.preempt(max(self.active, key=by_order))

    def _pieces(self) -> list[Piece]:
        """Pages go to the oldest first, at the cost of the newest."""
        picked = self.policy(self.active, self.limits.rows_per_tick)
        pieces = []
        for flight, rows in sorted(picked, key=lambda pick: pick[0].order):
            fit = self._make_room(flight, rows) if flight in self.active else 0
            if fit:
                pieces.append(flight.piece(fit))
                flight.since = self.ticks + 1
        return pieces

    def _make_room(self, flight: Flight, rows: int) -> int:
        """How many of these rows have pages now. Where not even one has, newer flights are preempted."""
        while True:
            fit = self.memory.fit(flight, rows)
            newest = max(self.active, key=by_order)
            if fit or newest is flight:
                return fit
            self.preempt(newest)

    def _choices(self, flight: Flight) -> list[Flight]:
        """A flight whose wave is done; where that was the prompt, with those that write its other answers."""
        if flight.answering:
            return [flight]
        others = [flight.fork(choice) for choice in range(1, flight.request.sampling.n)]
        self.active += others
        return [flight, *others]

    def _settle(self, flight: Flight) -> list[Told]:
        """Sample a flight whose wave is done. A fault here is one request's own."""
        name = flight.request.id
        if flight not in self.active:
            # Another answer of its request failed in this tick.
            return []
        try:
            return [Told(name, event) for event in self._answer(flight)]
        except Exception as error:
            log.exception("request %s failed while sampling", name)
            self.abort(name)
            return [Told(name, Failed(500, f"sampling failed: {error}", None, "internal_error"))]

    def _answer(self, flight: Flight) -> list[Event]:
        token = self._sample(flight)
        flight.append(token)
        if flight.choice == 0 and len(flight.answer_depths) == 1:
            self.memory.keep(flight)
        sampling = flight.request.sampling
        ends = token.id in self.stop_ids and not sampling.ignore_stop_tokens
        settled = [] if ends else flight.text.push(token)
        stopped = ends or flight.text.stopped
        if not stopped and len(flight.answer_depths) < sampling.max_tokens:
            return [Progress(settled, flight.choice)] if settled else []
        settled += flight.text.finish()
        self.memory.forecast.learn(len(flight.streams.held()), flight.worst)
        self._end(flight)
        left = sum(other.request.id == flight.request.id for other in (*self.active, *self.queue))
        usage = flight.usage(self.model.method.max_depth)
        last = Finished("stop" if stopped else "length", usage, flight.choice, left)
        return [Progress(settled, flight.choice), last] if settled else [last]

    @torch.inference_mode()
    def _sample(self, flight: Flight) -> Token:
        position = len(flight.ids) - 1
        mixture = self.model.mix(flight.log_probs, flight.gates)
        asked = flight.request
        token = choose(mixture, asked.sampling, asked.prompt, flight.answer, flight.choice, position)
        return Token(
            token,
            "",
            flight.depths[position],
            float(mixture[token]),
            self._alternatives(asked, mixture),
        )

    def _alternatives(self, request: Request, mixture: torch.Tensor) -> tuple[Alternative, ...]:
        best = mixture.topk(request.sampling.top_logprobs or 0)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return tuple(Alternative(token, self.decode([token]), value) for token, value in pairs)

    def _end(self, flight: Flight) -> None:
        self.memory.end(flight)
        self.active.remove(flight)
