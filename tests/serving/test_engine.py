"""The engine against the dense oracle: several requests at once, of different lengths, depths and limits."""

import pytest
import torch

from fathom.model.looped import LoopedLM
from fathom_serve.engine.engine import Engine
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.request import Depth, Failed, Finished, Progress, Request, RequestRefused, Sampling
from serving.oracle import generate
from support.models import tiny_model

LIMITS = EngineLimits(max_active=4, rows_per_tick=9, head_rows=3, page_rows=4, pages=120, books="tick")


def prompt_ids(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(97, (length,), generator=generator).tolist())


def drive(engine: Engine, requests: list[Request], stagger: int = 2) -> dict[str, list]:
    """Submit a request every few ticks and run dry; events by request."""
    events: dict[str, list] = {request.id: [] for request in requests}
    waiting, ticks = list(requests), 0
    while waiting or engine.busy:
        if waiting and ticks % stagger == 0:
            engine.submit(waiting.pop(0))
        for told in engine.tick():
            events[told.request_id].append(told.event)
        ticks += 1
    return events


def tokens(events: list) -> list:
    return [token for event in events if isinstance(event, Progress) for token in event.tokens]


def mixed_requests(model: LoopedLM) -> list[Request]:
    """Different prompt and answer lengths, thresholds and depth limits."""
    top = model.method.max_depth
    thresholds = (None, 0.35, 0.65, 0.5) if model.decider is not None else (None,) * 4
    plan = [
        (7, 9, None, 0),
        (1, 6, None, 1),
        (23, 5, max(1, top - 1), 2),
        (12, 8, 1, 3),
        (3, 7, None, 2),
        (16, 4, top, 1),
    ]
    return [
        Request(
            str(number),
            prompt_ids(length, seed=number),
            Sampling(temperature=0, max_tokens=answer, ignore_stop_tokens=True),
            Depth(thresholds[which], limit),
        )
        for number, (length, answer, limit, which) in enumerate(plan)
    ]


def expected(model: LoopedLM, request: Request):
    tau = model.method.threshold if request.depth.tau_exit is None else request.depth.tau_exit
    limit = request.depth.max_depth or model.method.max_depth
    return generate(model, list(request.prompt), request.sampling.max_tokens, tau, limit)


@pytest.mark.parametrize(
    ("method", "depth", "architecture"),
    [
        ("tah2", 2, "llama"),
        ("tah2", 2, "qwen3"),
        ("tah2", 4, "llama"),
        ("tah2-fixed", 2, "llama"),
        ("tah2-fixed", 4, "qwen3"),
        ("standard", 1, "llama"),
    ],
)
def test_equals_the_oracle_in_fp64(method: str, depth: int, architecture: str) -> None:
    model = tiny_model(method, depth, architecture)
    engine = Engine(model, LIMITS, decode=lambda ids: "")
    requests = mixed_requests(model)
    events = drive(engine, requests)
    seen_depths: set[int] = set()
    for request in requests:
        want, got = expected(model, request), tokens(events[request.id])
        usage = events[request.id][-1].usage
        assert [token.id for token in got] == want.ids
        assert [token.depth for token in got] == want.depths
        assert [token.logprob for token in got] == pytest.approx(want.logprobs, abs=1e-9)
        assert usage.iterations == sum(want.depths)
        assert usage.prompt_iterations == sum(want.prompt_depths[:-1])
        seen_depths |= {*want.depths, *want.prompt_depths}
    if method == "tah2":
        assert seen_depths == set(range(1, depth + 1)), "the test must mix all depths"
    assert engine.pool.used == 0


@pytest.mark.parametrize(("method", "depth"), [("tah2", 2), ("tah2", 4), ("tah2-fixed", 2)])
def test_equals_the_oracle_in_fp32_until_a_near_tie(method: str, depth: int) -> None:
    model = tiny_model(method, depth, dtype=torch.float32)
    engine = Engine(model, LIMITS, decode=lambda ids: "")
    requests = mixed_requests(model)
    events = drive(engine, requests)
    compared = 0
    for request in requests:
        want, got = expected(model, request), tokens(events[request.id])
        for index, margin in enumerate(want.margins):
            if margin < 1e-4:
                break
            assert (got[index].id, got[index].depth) == (want.ids[index], want.depths[index])
            assert got[index].logprob == pytest.approx(want.logprobs[index], abs=1e-4)
            compared += 1
    assert compared > 15


def test_rows_of_different_depths_share_a_forward() -> None:
    model = tiny_model("tah2", 2)
    engine = Engine(model, LIMITS, decode=lambda ids: "")
    mixes: list[set[int]] = []
    execute = engine.runner.execute
    engine.runner.execute = lambda pieces: (mixes.append({piece.depth for piece in pieces}), execute(pieces))[1]
    events = drive(engine, mixed_requests(model), stagger=1)
    assert {1, 2} in mixes
    usages = [event[-1].usage for event in events.values()]
    assert engine.runner.rows_run == sum(usage.iterations + usage.prompt_iterations for usage in usages)
    assert engine.runner.forwards == len(mixes)


def test_batch_mates_do_not_change_sampled_answers() -> None:
    model = tiny_model("tah2", 2)
    hot = [
        Request(str(seed), prompt_ids(6, seed), Sampling(1.3, 0.9, seed, 10, ignore_stop_tokens=True))
        for seed in range(4)
    ]
    together = drive(Engine(model, LIMITS, lambda ids: ""), hot, stagger=1)
    answers = set()
    for request in hot:
        alone = drive(Engine(model, LIMITS, lambda ids: ""), [request])
        assert [token[:1] + token[2:3] for token in tokens(alone[request.id])] == [
            token[:1] + token[2:3] for token in tokens(together[request.id])
        ]
        answers.add(tuple(token.id for token in tokens(alone[request.id])))
    assert len(answers) == 4


def test_a_stop_token_ends_the_answer_and_is_not_in_it() -> None:
    model = tiny_model("tah2", 2)
    request = Request("a", prompt_ids(5, 0), Sampling(temperature=0, max_tokens=12))
    free = generate(model, list(request.prompt), 12, 0.5, 2)
    stop = free.ids[3]
    events = drive(Engine(model, LIMITS, lambda ids: "", frozenset({stop})), [request])["a"]
    first = free.ids.index(stop)
    assert [token.id for token in tokens(events)] == free.ids[:first]
    assert events[-1].reason == "stop" and events[-1].usage.tokens == first + 1


@pytest.mark.parametrize("after_ticks", [0, 1, 2, 3, 6])
def test_an_abort_frees_every_page_and_harms_nobody(after_ticks: int) -> None:
    model = tiny_model("tah2", 2)
    engine = Engine(model, LIMITS, lambda ids: "")
    kept, dropped = mixed_requests(model)[0], mixed_requests(model)[2]
    engine.submit(kept)
    engine.submit(dropped)
    events = [told for _ in range(after_ticks) for told in engine.tick()]
    engine.abort(dropped.id)
    engine.check_books()
    while engine.busy:
        events += engine.tick()
    want = expected(model, kept)
    assert [t.id for t in tokens([told.event for told in events if told.request_id == kept.id])] == want.ids
    assert engine.pool.used == 0 and engine.pool.free == engine.pool.pages


def test_what_does_not_fit_now_waits_and_what_never_fits_is_refused() -> None:
    model = tiny_model("tah2", 2)
    limits = LIMITS.model_copy(update={"pages": 12, "max_queued": 3})
    engine = Engine(model, limits, lambda ids: "")
    big = [Request(str(n), prompt_ids(14, n), Sampling(temperature=0, max_tokens=8)) for n in range(5)]
    for request in big[:4]:
        engine.submit(request)
        engine.tick()
    assert (len(engine.active), len(engine.queue)) == (1, 3)
    with pytest.raises(RequestRefused) as full:
        engine.submit(big[4])
    assert full.value.failed.status == 503 and (full.value.failed.retry_after_s or 0) >= 1
    with pytest.raises(RequestRefused) as never:
        engine.submit(Request("huge", prompt_ids(20, 0), Sampling(max_tokens=20)))
    assert never.value.failed[:1] == (400,) and never.value.failed.code == "memory_exceeded"
    finished = []
    while engine.busy:
        finished += [told.request_id for told in engine.tick() if isinstance(told.event, Finished)]
    assert finished == ["0", "1", "2", "3"]


@pytest.mark.parametrize("max_queued", [0, 2])
def test_free_places_are_no_queue(max_queued) -> None:
    """Requests that all arrive between two ticks: the queue's bound counts only those that will have to wait."""
    limits = LIMITS.model_copy(update={"max_active": 4, "max_queued": max_queued})
    engine = Engine(tiny_model("tah2", 2), limits, lambda ids: "")
    line = [Request(str(n), prompt_ids(5, n), Sampling(max_tokens=2)) for n in range(5 + max_queued)]
    for request in line[:-1]:
        engine.submit(request)
    with pytest.raises(RequestRefused) as full:
        engine.submit(line[-1])
    assert full.value.failed.code == "queue_full"
    while engine.busy:
        engine.tick()
    assert engine.ticks > 0 and engine.pool.used == 0


@pytest.mark.parametrize(
    ("method", "prompt", "sampling", "depth", "param"),
    [
        ("tah2", 256, Sampling(max_tokens=1), Depth(), "messages"),
        ("tah2", 250, Sampling(max_tokens=7), Depth(), "max_tokens"),
        ("tah2", 5, Sampling(), Depth(max_depth=3), "depth.max_depth"),
        ("tah2-fixed", 5, Sampling(), Depth(tau_exit=0.5), "depth.tau_exit"),
    ],
)
def test_what_the_model_cannot_do_is_refused(method, prompt, sampling, depth, param) -> None:
    engine = Engine(tiny_model(method, 2), LIMITS, lambda ids: "")
    with pytest.raises(RequestRefused) as refused:
        engine.submit(Request("a", prompt_ids(prompt, 0), sampling, depth))
    assert (refused.value.failed.status, refused.value.failed.param) == (400, param)
    assert not engine.busy


def test_a_fault_in_one_requests_sampling_is_its_own(monkeypatch) -> None:
    model = tiny_model("tah2", 2)
    engine = Engine(model, LIMITS, lambda ids: "")
    good, bad = mixed_requests(model)[:2]
    sample = engine._sample

    def faulty(flight):
        if flight.request.id == bad.id:
            raise ValueError("poison")
        return sample(flight)

    monkeypatch.setattr(engine, "_sample", faulty)
    events = drive(engine, [good, bad])
    assert isinstance(events[bad.id][-1], Failed) and "poison" in events[bad.id][-1].message
    assert [token.id for token in tokens(events[good.id])] == expected(model, good).ids
