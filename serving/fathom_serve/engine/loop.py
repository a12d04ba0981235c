"""The step loop in its own thread, and what async code sees of it: one generator of events per request."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fathom_serve.engine.engine import Engine
from fathom_serve.engine.request import Accepted, Event, Failed, Request, RequestRefused, closes

log = logging.getLogger(__name__)

STALL_S = 60.0


@dataclass
class _Reader:
    """Who gets a request's events: a queue of an asyncio loop."""

    loop: asyncio.AbstractEventLoop
    queue: "asyncio.Queue[list[Event]]"


class EngineLoop:
    """Ticks an engine as long as there is work.

    Only the loop's thread touches the engine; others leave messages. A fault in a tick is a defect: every request
    gets it as a :class:`Failed`, the loop ends, and ``fault`` says why, so that a health check can have the
    replica replaced.

    Args:
        engine: the engine; nobody else may use it from now on.
        stall_s: a tick that takes longer counts as stuck.
    """

    def __init__(self, engine: Engine, stall_s: float = STALL_S) -> None:
        self.engine = engine
        self.stall_s = stall_s
        self.fault: str | None = None
        self._wake = threading.Condition()
        self._submitted: deque[tuple[Request, _Reader]] = deque()
        self._aborted: deque[str] = deque()
        self._readers: dict[str, _Reader] = {}
        self._closing = False
        self._tick_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def health(self) -> str | None:
        """None when all is well, else what is wrong: the loop has ended, or one tick takes too long."""
        if self.fault is not None:
            return self.fault
        if not self._thread.is_alive():
            return "the engine's step loop has ended"
        began = self._tick_began
        if began is not None and time.monotonic() - began > self.stall_s:
            return f"the engine's step loop has not moved for {time.monotonic() - began:.0f} s"
        return None

    async def stream(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """A request's events, in lists as they come: ``Accepted`` first, ``Failed`` or the ``Finished`` of
        the last of its answers at the end.

        Closing the generator early, or cancelling its reader, aborts the request and frees its pages.
        """
        reader = _Reader(asyncio.get_running_loop(), asyncio.Queue())
        with self._wake:
            fault = self.health() or ("the server is stopping" if self._closing else None)
            if fault is None:
                self._submitted.append((request, reader))
                self._wake.notify()
        if fault is not None:
            yield [Failed(503, fault, None, "unhealthy", 30)]
            return
        ended = False
        try:
            while not ended:
                events = await reader.queue.get()
                ended = closes(events[-1])
                yield events
        finally:
            if not ended:
                self.abort(request.id)

    def abort(self, request_id: str) -> None:
        """Forget a request before its next tick."""
        with self._wake:
            self._aborted.append(request_id)
            self._wake.notify()

    def close(self) -> None:
        """End the loop after the tick that is running; requests in flight are told."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._tick_began = time.monotonic()
                self._deliver([(told.request_id, told.event) for told in self.engine.tick()])
                self._tick_began = None
            self._fail_all(Failed(503, "the server is stopping", None, "stopping", 30))
        except Exception as error:
            log.exception("the engine's step loop failed")
            # Set before anyone is told, so that whoever was told finds the health check red.
            self.fault = f"the engine's step loop failed: {type(error).__name__}: {error}"
            self._fail_all(Failed(500, self.fault, None, "internal_error"))

    def _take_messages(self) -> bool:
        """Wait for work, then take in what others left; False when the loop is to end."""
        with self._wake:
            while not (self._submitted or self._aborted or self._closing or self.engine.busy):
                self._wake.wait()
            submitted, self._submitted = self._submitted, deque()
            aborted, self._aborted = self._aborted, deque()
            closing = self._closing
        for request, reader in submitted:
            self._readers[request.id] = reader
            self._deliver([(request.id, self._admitted(request))])
        for request_id in aborted:
            self._readers.pop(request_id, None)
            self.engine.abort(request_id)
        return not closing

    def _admitted(self, request: Request) -> Event:
        try:
            self.engine.submit(request)
        except RequestRefused as refused:
            return refused.failed
        return Accepted(len(request.prompt))

    def _deliver(self, told: list[tuple[str, Event]]) -> None:
        """Hand events over, with one wake-up per asyncio loop however many requests it reads."""
        batches: dict[str, list[Event]] = {}
        for request_id, event in told:
            batches.setdefault(request_id, []).append(event)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, list[Event]]]] = {}
        for request_id, events in batches.items():
            reader = self._readers.get(request_id)
            if reader is not None:
                by_loop.setdefault(reader.loop, []).append((reader.queue, events))
            if closes(events[-1]):
                self._readers.pop(request_id, None)
        for loop, deliveries in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, deliveries)

    def _fail_all(self, failed: Failed) -> None:
        """Tell everyone, also those whose message nobody has taken, and free every page."""
        with self._wake:
            self._closing = True
            waiting, self._submitted = self._submitted, deque()
        for request, reader in waiting:
            self._readers[request.id] = reader
        self.engine.abandon()
        self._deliver([(request_id, failed) for request_id in list(self._readers)])


def _put_all(deliveries: list[tuple[asyncio.Queue, list[Event]]]) -> None:
    for queue, events in deliveries:
        queue.put_nowait(events)
