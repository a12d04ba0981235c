"""Deadlines and cancellation in every state: the pages are back at once, and nobody else notices."""

from functools import cache

import pytest

from fathom_serve.engine.engine import Engine
from fathom_serve.engine.request import Failed, Finished, Request, Sampling
from serving.test_engine import LIMITS, expected, prompt_ids, tokens
from support.models import tiny_model

MODEL = tiny_model("tah2", 4).eval()
KEPT = Request("kept", prompt_ids(6, 0), Sampling(temperature=0, max_tokens=14))


@cache
def want() -> list[int]:
    return expected(MODEL, KEPT).ids


class Clocked:
    """An engine that works on one request, with a clock that stands still until told."""

    def __init__(self, **sizes: int) -> None:
        self.now_s = 100.0
        limits = LIMITS.model_copy(update=sizes | {"rows_per_tick": 6, "pages": 300})
        self.engine = Engine(MODEL, limits, lambda ids: "", clock=lambda: self.now_s)
        self.engine.submit(KEPT)
        self.events: dict[str, list] = {"kept": [], "late": []}

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            for each in self.engine.tick():
                self.events[each.request_id].append(each.event)

    def finish(self) -> None:
        """The other request's answer is whole, and every page is free."""
        while self.engine.busy:
            self.tick()
        assert [token.id for token in tokens(self.events["kept"])] == want()
        assert isinstance(self.events["kept"][-1], Finished)
        assert self.engine.pool.free == self.engine.pool.pages


@pytest.mark.parametrize("state", ["queued", "reading", "between depths", "answering", "many answers", "preempted"])
@pytest.mark.parametrize("how", ["deadline", "abort"])
def test_in_every_state(state: str, how: str) -> None:
    run = Clocked(max_active=1 if state == "queued" else 4)
    sampling = Sampling(temperature=0, max_tokens=30, n=3 if state == "many answers" else 1)
    flight = run.engine.submit(Request("late", prompt_ids(15, 1), sampling, total_s=60.0))
    reached = {
        "queued": lambda: flight in run.engine.queue,
        "reading": lambda: flight.reading and flight.wave.cursor > 0,
        "between depths": lambda: flight.begun,
        "answering": lambda: len(flight.answer) > 2,
        "many answers": lambda: len(run.engine.active) == 4,
        "preempted": lambda: len(flight.answer) > 2,
    }[state]
    run.tick()
    while not reached():
        assert run.engine.busy, "the state must come"
        run.tick()
    if state == "preempted":
        run.engine.preempt(flight)
    if how == "abort":
        run.engine.abort("late")
    else:
        run.now_s += 61
        run.tick()
        assert isinstance(run.events["late"][-1], Failed) and run.events["late"][-1].status == 504
        assert "60 s" in run.events["late"][-1].message
    living = (*run.engine.active, *run.engine.queue)
    assert {other.request.id for other in living} == {"kept"}
    assert run.engine.pool.used == sum(len(other.streams.held()) for other in living)
    run.finish()


def test_the_first_token_has_a_deadline_of_its_own() -> None:
    run = Clocked()
    flight = run.engine.submit(Request("late", prompt_ids(15, 1), Sampling(max_tokens=9), first_token_s=5.0))
    while not flight.answer:
        assert run.engine.busy, "a token must come"
        run.tick()
    run.now_s += 6
    run.finish()
    assert isinstance(run.events["late"][-1], Finished), "it came in time"
    again = Clocked()
    again.engine.submit(Request("late", prompt_ids(15, 1), Sampling(max_tokens=9), first_token_s=5.0))
    again.tick()
    again.now_s += 6
    again.finish()
    assert again.events["late"][-1].message.startswith("the first token took longer than the 5 s")
