"""Memory pressure takes time, never a depth: requests that gave up their pages repeat what they did."""

from dataclasses import replace
from typing import Any

import pytest

from fathom_serve.engine.engine import Engine
from fathom_serve.engine.request import Depth, Finished, Progress, Request, Sampling
from fathom_serve.engine.schedule import shared
from model.test_methods import model_of
from serving.test_engine import LIMITS, drive, expected, mixed_requests, prompt_ids, tokens
from support.models import tiny_model


def told(events: list) -> list[tuple]:
    """What a reader of one request learns, with log-probabilities to eight digits, and nothing of what was cached."""
    found: list[tuple] = []
    for event in events:
        if isinstance(event, Progress):
            found += [(event.choice, t.id, t.depth, round(t.logprob, 8)) for t in event.tokens]
        elif isinstance(event, Finished):
            found.append((event.choice, event.reason, replace(event.usage, cached_tokens=0)))
    return sorted(found, key=lambda each: each[0])


def watched(engine: Engine) -> dict[str, Any]:
    """Notes the most pages ever used, whether the oldest flight was ever preempted, and whether one came back before
    the pages that it had held were free."""
    seen: dict[str, Any] = {"peak": 0, "oldest_went": False, "too_early": False}
    held: dict[Any, int] = {}
    execute, preempt, begin = engine.runner.execute, engine.preempt, engine.memory.begin

    def executed(pieces):
        seen["peak"] = max(seen["peak"], engine.pool.used)
        return execute(pieces)

    def preempted(flight):
        seen["oldest_went"] |= flight.order == min(other.order for other in engine.active)
        held[flight] = len(flight.streams.held())
        preempt(flight)

    def began(flight):
        seen["too_early"] |= bool(engine.active) and held.get(flight, 0) > engine.pool.free
        begin(flight)

    engine.runner.execute, engine.preempt, engine.memory.begin = executed, preempted, began
    return seen


NAMES = ["tah2", "ouro-adaptive", "huginn", "mor-token", "tah2-fixed", "loopus", "divergence, coda", "token, coda"]


@pytest.mark.parametrize("name", NAMES)
def test_a_quarter_of_the_pages_gives_the_same_answers(name: str) -> None:
    model = model_of(name).eval()
    requests = [
        Request(str(number), prompt_ids(9 + number % 3, number), Sampling(seed=number, max_tokens=7, n=1 + number % 2))
        for number in range(12)
    ]
    sizes = {"max_active": 18, "rows_per_tick": 30, "pages": 500}
    roomy = Engine(model, LIMITS.model_copy(update=sizes), lambda ids: "")
    seen = watched(roomy)
    want = drive(roomy, requests, stagger=1)
    assert roomy.preemptions == 0
    tight = Engine(model, LIMITS.model_copy(update=sizes | {"pages": seen["peak"] // 4}), lambda ids: "")
    tight.memory.forecast.share = 0.1
    seen = watched(tight)
    got = drive(tight, requests, stagger=1)
    assert {key: told(events) for key, events in got.items()} == {key: told(events) for key, events in want.items()}
    assert tight.preemptions > 2 and not seen["oldest_went"] and not seen["too_early"]
    assert tight.pool.used == 0


@pytest.mark.parametrize("after_ticks", range(1, 8))
def test_a_preemption_in_any_state_changes_nothing(after_ticks: int) -> None:
    model = tiny_model("tah2", 4)
    request = mixed_requests(model)[0]
    engine = Engine(model, LIMITS.model_copy(update={"rows_per_tick": 4}), lambda ids: "")
    engine.submit(request)
    events = [each.event for _ in range(after_ticks) for each in engine.tick()]
    for pause in (1, 3):
        engine.preempt(engine.active[0])
        engine.check_books()
        assert engine.pool.used == 0 and not engine.active
        events += [each.event for _ in range(pause) for each in engine.tick()]
    while engine.busy:
        events += [each.event for each in engine.tick()]
    want = expected(model, request)
    assert [(token.id, token.depth) for token in tokens(events)] == list(zip(want.ids, want.depths, strict=True))
    assert [token.logprob for token in tokens(events)] == pytest.approx(want.logprobs, abs=1e-9)
    assert events[-1].usage.prompt_iterations == sum(want.prompt_depths[:-1])


def test_told_depths_are_repeated_whatever_the_exit_rule_says_now() -> None:
    model = tiny_model("tah2", 2)
    engine = Engine(model, LIMITS, lambda ids: "")
    flight = engine.submit(Request("a", prompt_ids(12, 3), Sampling(temperature=0, max_tokens=9)))
    while len(flight.answer) < 5:
        engine.tick()
    before = list(flight.history)
    assert set(before) == {1, 2}, "the test must mix depths"
    engine.preempt(flight)
    flight.terms = flight.terms._replace(threshold=1.0)
    held = len(flight.history)
    while len(flight.answer) < 6:
        engine.tick()
    assert flight.depths[:held] == before
    assert flight.streams.by_depth[1].positions.tolist() == [at for at, depth in enumerate(before) if depth == 2]


def test_requests_are_let_in_by_what_requests_have_needed() -> None:
    """Answers that end early teach the engine to take in more at once than their worst cases allow."""
    model = tiny_model("tah2", 2)
    engine = Engine(model, LIMITS.model_copy(update={"pages": 30, "max_active": 4}), lambda ids: "")
    long = [Request(str(number), prompt_ids(6, number), Sampling(max_tokens=34)) for number in range(2)]
    assert engine.door.check(long[0]).pages == 20
    for request in long:
        engine.submit(request)
    engine.tick()
    assert len(engine.active) == 1, "the first time the worst case is set aside"
    engine.abandon()
    engine.memory.forecast.learn(2, 20)
    assert engine.memory.forecast.share == pytest.approx(0.91)
    for _ in range(20):
        engine.memory.forecast.learn(2, 20)
    for request in long:
        engine.submit(request)
    engine.tick()
    assert len(engine.active) == 2


def test_a_policy_that_picks_only_flights_without_pages_does_not_stall() -> None:
    """An older prompt holds the last pages, and the policy insists on the newer answer."""
    sizes = {"page_rows": 2, "cache_block_tokens": 4, "pages": 14, "rows_per_tick": 8}
    engine = Engine(tiny_model("tah2", 2), LIMITS.model_copy(update=sizes), lambda ids: "")
    engine.memory.forecast.share = 0.1
    always = Depth(tau_exit=0.0)
    answer = engine.submit(Request("answer", prompt_ids(2, 0), Sampling(temperature=0, max_tokens=12), always))
    while len(answer.answer) < 4:
        engine.tick()
    prompt = engine.submit(Request("prompt", prompt_ids(13, 1), Sampling(max_tokens=1), always, priority=-1))
    while engine.pool.free:
        engine.tick()
    engine.policy = lambda ready, rows: [(each, 1) for each in ready if each is answer] or shared(ready, rows)
    for _ in range(6):
        engine.tick()
    assert engine.preemptions == 1 and prompt.order < answer.order
    while engine.busy:
        engine.tick()
    assert answer.answer_depths == [2] * 12 and prompt.answer_depths == [2]
