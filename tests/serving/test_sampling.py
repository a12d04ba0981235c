"""Sampling against plain Python, alone and within the engine; n answers to one prompt."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_serve.engine import sample
from fathom_serve.engine.engine import Engine
from fathom_serve.engine.request import Failed, Finished, Progress, Request, RequestRefused, Sampling, closes
from fathom_serve.engine.sample import adjust, choose, gumbel, narrow
from serving.oracle import Oracle
from serving.test_engine import LIMITS, drive, prompt_ids
from support.models import tiny_model
from support.sampling import distribution

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.9, "logit_bias": ((3, 4.0), (9, -5.0)), "frequency_penalty": -0.4},
]


@st.composite
def askings(draw) -> Sampling:
    number = st.floats(-2, 2)
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.9])),
        top_p=draw(st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 17, 40, 99])),
        min_p=draw(st.sampled_from([0.0, 0.03, 0.4, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.6])),
        presence_penalty=draw(st.just(0.0) | number),
        frequency_penalty=draw(st.just(0.0) | number),
        logit_bias=draw(st.lists(st.tuples(st.integers(0, 39), number), max_size=3).map(tuple)),
    )


@settings(max_examples=150, deadline=None)
@given(askings(), st.integers(0, 9999), st.lists(st.integers(0, 39), max_size=9), st.sampled_from([4, 1024]))
def test_probabilities_equal_plain_python(asked: Sampling, seed: int, answer: list[int], candidates: int) -> None:
    log_probs = (3 * torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).log_softmax(
        -1
    )
    want = distribution(log_probs.tolist(), asked, [1, 2, 3], answer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "CANDIDATES", candidates)
        if asked.temperature == 0:
            assert {choose(log_probs, asked, [1, 2, 3], answer, 0, 5)} == set(want)
            return
        kept = narrow(adjust(log_probs, asked, [1, 2, 3], answer) / asked.temperature, asked)
    got = {token: kept.softmax(-1)[token].item() for token in range(40) if kept[token] > -math.inf}
    assert got == pytest.approx(want, abs=1e-12)


def test_draws_follow_the_distribution_and_the_seed() -> None:
    log_probs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    counts = torch.zeros(4)
    for position in range(2000):
        counts[choose(log_probs, Sampling(seed=1), [], [], 0, position)] += 1
    assert (counts / 2000 - log_probs.exp()).abs().max() < 0.04

    def draws(choice: int) -> list[int]:
        return [choose(log_probs, Sampling(seed=seed), [], [], choice, 5) for seed in range(40)]

    assert draws(0) == draws(0) and len(set(draws(0))) > 1
    assert draws(0) != draws(1)


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 5e-324])
@pytest.mark.parametrize("narrowed", [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_a_tiny_temperature_takes_the_most_probable_token(temperature: float, narrowed: dict[str, Any]) -> None:
    log_probs = torch.tensor([0.1, 0.2, 0.4, 0.3]).log()
    for position in range(20):
        assert choose(log_probs, Sampling(temperature=temperature, **narrowed), [], [], 0, position) == 2


@torch.inference_mode()
def by_hand(model, request: Request, choice: int) -> list[tuple[int, int, float]]:
    """Token, depth and log-probability of one answer: the oracle's mixtures, plain Python, and the keyed noise."""
    oracle, asked = (
        Oracle(model, list(request.prompt), model.method.threshold, model.method.max_depth),
        request.sampling,
    )
    told, answer = [], []
    for position in range(len(request.prompt) + asked.max_tokens - 1):
        mixture, depth = oracle.token(position)
        if position >= len(request.prompt) - 1:
            odds = distribution(mixture.tolist(), asked, request.prompt, answer)
            noise = gumbel(97, asked.seed, choice, position).tolist()
            answer.append(max(odds, key=lambda token: math.log(odds[token]) + noise[token]))
            oracle.ids.append(answer[-1])
            told.append((answer[-1], depth, pytest.approx(float(mixture[answer[-1]]), abs=1e-9)))
    return told


def answers(events: list) -> list[list[tuple[int, int, float]]]:
    """By choice."""
    progress = [event for event in events if isinstance(event, Progress)]
    return [
        [
            (token.id, token.depth, token.logprob)
            for event in progress
            if event.choice == choice
            for token in event.tokens
        ]
        for choice in range(max(event.choice for event in progress) + 1)
    ]


def test_every_parameter_beside_batch_mates_equals_the_oracle() -> None:
    model = tiny_model("tah2", 2)
    requests = [
        Request(str(number), prompt_ids(2 + number, number), Sampling(seed=number, max_tokens=5, **settings))
        for number, settings in enumerate(SETTINGS)
    ]
    events = drive(Engine(model, LIMITS, lambda ids: ""), requests, stagger=1)
    for request in requests:
        assert answers(events[request.id]) == [by_hand(model, request, 0)]


def test_n_answers_read_the_prompt_once_and_share_its_pages() -> None:
    model = tiny_model("tah2", 2)
    request = Request("many", prompt_ids(7, 3), Sampling(seed=5, max_tokens=4, n=3))
    mate = Request("mate", prompt_ids(7, 4), Sampling(temperature=0, max_tokens=9))
    engine = Engine(model, LIMITS, lambda ids: "")
    events = drive(engine, [request, mate], stagger=1)
    want = [by_hand(model, request, choice) for choice in range(3)]
    assert answers(events["many"]) == want
    assert len({tuple(token for token, _, _ in answer) for answer in want}) == 3
    ends = [event for event in events["many"] if isinstance(event, Finished)]
    assert sorted(end.choice for end in ends) == [0, 1, 2] and [end.left for end in ends] == [2, 1, 0]
    assert [closes(event) for event in events["many"]] == [False] * (len(events["many"]) - 1) + [True]
    usages = [end.usage for end in (*ends, events["mate"][-1])]
    # The last prompt row predicts all three first tokens, and is counted with each of them.
    twice = 2 * want[0][0][1]
    prompts = usages[0].prompt_iterations + usages[-1].prompt_iterations
    assert engine.runner.rows_run == prompts + sum(usage.iterations for usage in usages) - twice
    assert engine.pool.used == 0


@pytest.mark.parametrize("after_ticks", [1, 3, 5])
def test_an_abort_ends_all_answers(after_ticks: int) -> None:
    engine = Engine(tiny_model("tah2", 2), LIMITS, lambda ids: "")
    engine.submit(Request("many", prompt_ids(10, 3), Sampling(max_tokens=9, n=4)))
    for _ in range(after_ticks):
        engine.tick()
    engine.abort("many")
    assert not engine.busy and engine.pool.used == 0


def test_a_fault_in_one_answer_ends_the_request(monkeypatch) -> None:
    engine = Engine(tiny_model("tah2", 2), LIMITS, lambda ids: "")
    whole = engine._sample

    def faulty(flight):
        if flight.choice == 1 and len(flight.ids) > 11:
            raise ValueError("poison")
        return whole(flight)

    monkeypatch.setattr(engine, "_sample", faulty)
    events = drive(engine, [Request("many", prompt_ids(10, 3), Sampling(max_tokens=9, n=3))])["many"]
    assert isinstance(events[-1], Failed) and sum(closes(event) for event in events) == 1
    assert not engine.busy and engine.pool.used == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.1},
        {"max_tokens": 0},
        {"seed": 1 << 63},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 10.1},
        {"presence_penalty": math.nan},
        {"presence_penalty": -2.1},
        {"frequency_penalty": math.inf},
        {"frequency_penalty": 2.1},
        {"top_logprobs": 98},
        {"logit_bias": ((97, 1.0),)},
        {"logit_bias": ((9, 100.5),)},
        {"logit_bias": ((9, math.nan),)},
        {"n": 0},
        {"n": 5},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    engine = Engine(tiny_model("tah2", 2), LIMITS, lambda ids: "")
    request = Request("a", prompt_ids(4, 0))
    with pytest.raises(RequestRefused) as told:
        engine.submit(replace(request, sampling=replace(request.sampling, **wrong)))
    assert (told.value.failed.status, told.value.failed.param) == (400, next(iter(wrong)))


@pytest.mark.parametrize("strange", [97, -1])
def test_a_prompt_token_that_the_model_lacks_is_refused(strange: int) -> None:
    engine = Engine(tiny_model("tah2", 2), LIMITS, lambda ids: "")
    with pytest.raises(RequestRefused) as told:
        engine.submit(Request("a", (5, 6, strange, 7)))
    failed = told.value.failed
    assert (failed.status, failed.param, failed.code) == (400, "messages", "token_out_of_range")
    assert f"position 2 is {strange}" in failed.message and not engine.busy
