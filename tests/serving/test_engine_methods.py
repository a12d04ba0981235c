"""The engine serves every method: several requests at once equal the slow reference, token by token."""

from dataclasses import replace

import pytest
import torch

from fathom.errors import ConfigError
from fathom.model.levels import LoopOptions
from fathom.model.rows import pack_documents
from fathom_serve.engine.engine import Engine
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.request import Depth, Finished, Progress, Request, Sampling
from model.test_methods import CASES, model_of
from support.reference import decode

LIMITS = EngineLimits(max_active=3, rows_per_tick=7, head_rows=3, page_rows=4, pages=200, books="tick")


def ask(number: int, length: int, answer: int) -> Request:
    ids = torch.randint(97, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    sampling = Sampling(temperature=0, max_tokens=answer, seed=number, ignore_stop_tokens=True)
    return Request(str(number), tuple(ids), sampling)


@pytest.mark.parametrize("name", CASES)
def test_answers_equal_the_reference(name: str) -> None:
    model = model_of(name).eval()
    engine = Engine(model, LIMITS, decode=lambda ids: "")
    requests = [ask(1, 9, 6), ask(2, 1, 5), ask(3, 17, 4), ask(4, 4, 7)]
    for request in requests[:2]:
        engine.submit(request)
    told = engine.tick()
    for request in requests[2:]:
        engine.submit(request)
    while engine.busy:
        told += engine.tick()
    for request in requests:
        events = [each.event for each in told if each.request_id == request.id]
        got = [token for event in events if isinstance(event, Progress) for token in event.tokens]
        assert isinstance(events[-1], Finished) and len(got) == request.sampling.max_tokens
        ids = [*request.prompt, *(token.id for token in got)]
        first = len(request.prompt) - 1
        mask = [position > first for position in range(len(ids))]
        rows = pack_documents([(ids, mask)], [request.sampling.seed or 0])
        with torch.no_grad():
            want = decode(model, rows)
            # Greedy: no other token is more probable than the one chosen.
            others = torch.stack(
                [model(rows._replace(targets=torch.full_like(rows.ids, token))).log_prob for token in range(0, 97, 8)]
            )
        for place, token in enumerate(got):
            row = first + place
            assert token.depth == int(want["executed"][row])
            assert token.logprob == pytest.approx(float(want["log_prob"][row]), abs=1e-9)
            assert token.logprob >= float(others[:, row].max()) - 1e-9
        assert events[-1].usage.prompt_iterations == int(want["executed"][:first].sum())
    assert engine.pool.used == 0


def test_a_rule_that_sees_the_future_is_refused() -> None:
    with pytest.raises(ConfigError, match="expert_choice"):
        Engine(model_of("mor-expert", axes={"routing": "expert_choice"}), LIMITS, decode=lambda ids: "")


def test_a_request_may_use_fewer_depths_than_the_model() -> None:
    model = model_of("abbie-d").eval()
    engine = Engine(model, LIMITS, decode=lambda ids: "")
    request = replace(ask(5, 6, 5), depth=Depth(max_depth=1))
    engine.submit(request)
    told = []
    while engine.busy:
        told += engine.tick()
    got = [token for each in told if isinstance(each.event, Progress) for token in each.event.tokens]
    ids = [*request.prompt, *(token.id for token in got)]
    with torch.no_grad():
        once = model(pack_documents([(ids, [True] * len(ids))], [5]), options=LoopOptions(max_depth=1)).log_prob
    assert [token.logprob for token in got] == pytest.approx(once[5 : 5 + len(got)].tolist(), abs=1e-9)


@pytest.mark.parametrize("depth", [1, 5])
def test_an_engine_may_run_deeper_or_shallower_than_trained(depth: int) -> None:
    model = model_of("ouro").eval()
    engine = Engine(model, LIMITS.model_copy(update={"max_depth": depth}), decode=lambda ids: "")
    engine.submit(ask(1, 5, 3))
    told = []
    while engine.busy:
        told += engine.tick()
    assert told[-1].event.usage.histogram == (*(0,) * (depth - 1), 3)


@pytest.mark.parametrize("name", ["standard", "mor-expert", "mor-token"])
def test_depths_that_have_no_weights_are_refused(name: str) -> None:
    limits = LIMITS.model_copy(update={"max_depth": 9})
    with pytest.raises(ConfigError, match="depths only"):
        Engine(model_of(name), limits, decode=lambda ids: "")
