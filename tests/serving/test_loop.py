"""The step loop's thread: streams, aborts, faults."""

import asyncio
import contextlib
import time

import pytest

from fathom_serve.engine.engine import Engine
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.loop import EngineLoop
from fathom_serve.engine.request import Accepted, Depth, Failed, Finished, Progress, Request, Sampling
from serving.oracle import generate
from support.models import tiny_model

LIMITS = EngineLimits(max_active=4, rows_per_tick=16, page_rows=4, pages=120, books="tick")


@pytest.fixture
def loop():
    made = EngineLoop(Engine(tiny_model("tah2", 2), LIMITS, lambda ids: ""))
    yield made
    made.close()


def ask(name: str, tokens: int = 6) -> Request:
    prompt = tuple(hash((name, n)) % 97 for n in range(5))
    return Request(name, prompt, Sampling(temperature=0, max_tokens=tokens), Depth())


async def read(loop: EngineLoop, request: Request) -> list:
    return [event async for batch in loop.stream(request) for event in batch]


def settled(loop: EngineLoop) -> None:
    """Wait until the thread is idle."""
    deadline = time.monotonic() + 10
    while (loop.engine.busy or loop._aborted or loop._submitted) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not loop.engine.busy


def test_concurrent_streams_equal_the_oracle(loop) -> None:
    requests = [ask(f"r{n}", 4 + n) for n in range(6)]

    async def all_of_them() -> list:
        return await asyncio.gather(*(read(loop, request) for request in requests))

    for request, events in zip(requests, asyncio.run(all_of_them()), strict=True):
        want = generate(loop.engine.model, list(request.prompt), request.sampling.max_tokens, 0.5, 2)
        assert isinstance(events[0], Accepted) and isinstance(events[-1], Finished)
        got = [token.id for event in events if isinstance(event, Progress) for token in event.tokens]
        assert got == want.ids
    settled(loop)
    assert loop.engine.pool.used == 0


def test_a_reader_that_leaves_frees_its_pages(loop) -> None:
    async def leave() -> None:
        async def consume() -> None:
            await read(loop, ask("long", 200))

        task = asyncio.create_task(consume())
        while not loop.engine.active:
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    settled(loop)
    assert loop.engine.pool.used == 0 and loop.engine.ticks < 200


def test_a_fault_reaches_every_request_and_turns_health_red(loop, monkeypatch) -> None:
    assert loop.health() is None
    calls = iter(range(100))

    def broken(pieces):
        if next(calls) >= 3:
            raise RuntimeError("the device is gone")
        return execute(pieces)

    execute = loop.engine.runner.execute
    monkeypatch.setattr(loop.engine.runner, "execute", broken)

    async def both() -> tuple:
        return await asyncio.gather(read(loop, ask("a", 50)), read(loop, ask("b", 50)))

    for events in asyncio.run(both()):
        assert isinstance(events[-1], Failed) and events[-1].status in (500, 503)
        assert "the device is gone" in events[-1].message
    assert "the device is gone" in (loop.health() or "")
    assert loop.engine.pool.used == 0
    late = asyncio.run(read(loop, ask("late")))
    assert [event.status for event in late] == [503]


def test_a_stuck_tick_turns_health_red(monkeypatch) -> None:
    loop = EngineLoop(Engine(tiny_model("tah2", 2), LIMITS, lambda ids: ""), stall_s=0.05)
    tick = loop.engine.tick

    def slow():
        time.sleep(0.5)
        return tick()

    monkeypatch.setattr(loop.engine, "tick", slow)

    async def watch() -> str | None:
        task = asyncio.create_task(read(loop, ask("a", 1)))
        await asyncio.sleep(0.2)
        fault = loop.health()
        await task
        return fault

    assert "has not moved" in (asyncio.run(watch()) or "")
    loop.close()
