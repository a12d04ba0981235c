"""Who runs in a tick: simulated answers and prompts, all policies, and the whole engine under random events."""

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fathom_serve.engine.engine import Engine
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.request import Failed, Finished, Request, RequestRefused, Sampling, closes
from fathom_serve.engine.schedule import POLICIES, Order, order_of, shared
from serving.test_engine import drive, mixed_requests, prompt_ids
from serving.test_preemption import told
from support.models import tiny_model


@dataclass
class Someone:
    """A prompt of some rows, or an answer whose tokens go on with probability 0.23."""

    order: Order
    since: int = 0
    reading: bool = False
    begun: bool = False
    left: int = 1


def simulate(policy: str, answers: int, seed: int, ticks: int = 400) -> int:
    """Ticks until a prompt that arrives beside so many answers runs its first row."""
    rng = random.Random(seed)
    everyone = [Someone((0, number, 0), begun=rng.random() < 0.187) for number in range(answers)]
    prompt = Someone((1, answers, 0), reading=True, left=64)
    for tick in range(ticks):
        picked = POLICIES[policy]([*everyone, prompt], 256)
        if any(each is prompt for each, _ in picked):
            return tick
        for each, _ in picked:
            each.begun = not each.begun and rng.random() < 0.23
    return ticks


@pytest.mark.parametrize("answers", [32, 64])
def test_a_prompt_never_waits_for_answers(answers: int) -> None:
    """At 23% of tokens going on, the published policy all but never starts a prompt beside many answers."""
    assert max(simulate("shared", answers, seed) for seed in range(20)) == 0
    assert max(simulate("prefill_first", answers, seed) for seed in range(20)) == 0
    waits = sorted(simulate("published", answers, seed) for seed in range(20))
    assert waits[10] > 100


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 4), st.integers(0, 6), st.integers(0, 10**6))
def test_everyone_runs_soon_and_no_row_is_left_idle(answers: int, prompts: int, spare: int, seed: int) -> None:
    """With B answers in at most R rows an answer waits for one tick at most, and the oldest prompt for none."""
    rng, rows = random.Random(seed), answers + prompts + spare
    everyone = [Someone((0, number, 0), begun=rng.random() < 0.3) for number in range(answers)]
    everyone += [
        Someone((0, answers + number, 0), reading=True, left=rng.randint(1, 3 * rows)) for number in range(prompts)
    ]
    for tick in range(30):
        picked = shared(everyone, rows)
        used = sum(count for _, count in picked)
        assert used == min(rows, sum(each.left for each in everyone)), "work-conserving"
        assert all(0 < count <= each.left for each, count in picked)
        of_prompts = sum(count for each, count in picked if each.reading)
        assert of_prompts >= min(rows // 4, sum(each.left for each in everyone if each.reading)), "a share of their own"
        if prompts:
            assert any(each is everyone[answers] for each, _ in picked), "the oldest prompt moves in every tick"
        for each, _ in picked:
            each.since = tick + 1
        assert all(tick + 1 - each.since <= 1 for each in everyone if not each.reading)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-2, 2)), min_size=1, max_size=30), st.integers(1, 20))
def test_waiting_makes_up_for_priority(arrivals: list[tuple[int, int]], ageing: int) -> None:
    orders = [order_of(tick, priority, ageing, number) for number, (tick, priority) in enumerate(arrivals)]
    assert len(set(orders)) == len(orders)
    for (tick, priority), order in zip(arrivals, orders, strict=True):
        # Nobody is passed by those who come much later, whatever their class.
        assert order < order_of(tick + 1 + (priority + 2) * ageing, -2, ageing, len(orders))
    for first, second in pairwise(range(len(orders))):
        if arrivals[first][0] == arrivals[second][0]:
            assert (orders[first] < orders[second]) == (arrivals[first][1] <= arrivals[second][1])


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_changes_when_and_never_what(policy: str) -> None:
    model = tiny_model("tah2", 2)
    limits = EngineLimits(max_active=4, rows_per_tick=9, head_rows=3, page_rows=4, pages=120, books="tick")
    engine = Engine(model, limits.model_copy(update={"policy": policy}), lambda ids: "")
    mixes: list[set[bool]] = []
    execute = engine.runner.execute
    engine.runner.execute = lambda pieces: (mixes.append({each.flight.reading for each in pieces}), execute(pieces))[1]
    got = drive(engine, mixed_requests(model), stagger=1)
    want = drive(Engine(model, limits, lambda ids: ""), mixed_requests(model))
    assert {key: told(events) for key, events in got.items()} == {key: told(events) for key, events in want.items()}
    assert ({False, True} in mixes) == (policy == "shared")


MODEL = tiny_model("tah2", 2).eval()
LIMITS = EngineLimits(
    max_active=3,
    max_queued=3,
    rows_per_tick=5,
    head_rows=3,
    page_rows=2,
    cache_block_tokens=4,
    pages=12,
    books="tick",
    ageing_ticks=4,
)
ASKED = [
    Request(
        str(number), prompt_ids(1 + 3 * number % 8, number), Sampling(seed=number, max_tokens=2 + number % 5, n=choices)
    )
    for number, choices in enumerate((1, 2, 1, 1, 3, 1))
]
ALONE: dict[str, list] = {}


def alone(request: Request) -> list:
    """What it is told when nobody else is there and pages abound."""
    if request.id not in ALONE:
        engine = Engine(MODEL, LIMITS.model_copy(update={"pages": 200}), lambda ids: "")
        ALONE[request.id] = told(drive(engine, [request])[request.id])
    return ALONE[request.id]


class EngineUnderEvents(RuleBasedStateMachine):
    """Requests come, go and lose their pages in any order; whoever is not cancelled gets its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.engine = Engine(MODEL, LIMITS, lambda ids: "", clock=lambda: self.now_s)
        self.engine.memory.forecast.share = 0.2
        self.events: dict[str, list] = {}

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def choose_policy(self, policy: str) -> None:
        self.engine.policy = POLICIES[policy]

    def living(self) -> list[str]:
        return sorted({flight.request.id for flight in (*self.engine.active, *self.engine.queue)})

    @rule(
        which=st.sampled_from(ASKED),
        priority=st.integers(-1, 1),
        first_token_s=st.none() | st.integers(1, 9),
        total_s=st.none() | st.integers(1, 9),
    )
    def submit(self, which: Request, **fields) -> None:
        if which.id in self.living():
            return
        asked = replace(which, **fields)
        try:
            self.engine.submit(asked)
        except RequestRefused as refused:
            assert refused.failed.code == "queue_full" and len(self.engine.queue) >= LIMITS.max_queued
        else:
            self.events[which.id] = []

    @rule(ticks=st.integers(1, 4))
    def tick(self, ticks: int) -> None:
        for _ in range(ticks):
            for each in self.engine.tick():
                self.events[each.request_id].append(each.event)

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.living())
    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        living = self.living()
        name = living[number % len(living)]
        self.engine.abort(name)
        del self.events[name]
        assert name not in self.living()

    @precondition(lambda self: self.engine.active)
    @rule(number=st.integers(0, 9))
    def preempt(self, number: int) -> None:
        self.engine.preempt(self.engine.active[number % len(self.engine.active)])

    @invariant()
    def books_balance(self) -> None:
        self.engine.check_books()
        assert sum(flight.places for flight in self.engine.active) <= LIMITS.max_active
        assert self.engine.queue == sorted(self.engine.queue, key=lambda flight: flight.order)

    def teardown(self) -> None:
        for _ in range(400):
            self.tick(1)
        assert not self.engine.busy, "no deadlock"
        assert self.engine.pool.used == 0
        for name, events in self.events.items():
            assert [closes(event) for event in events].count(True) == 1 and closes(events[-1])
            want = alone(ASKED[int(name)])
            if isinstance(events[-1], Failed):
                assert events[-1].code == "deadline_exceeded"
                assert all(each in want for each in told(events)), "what was told until then is true"
            else:
                assert isinstance(events[-1], Finished) and told(events) == want


EngineUnderEvents.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestEngineUnderEvents = EngineUnderEvents.TestCase
