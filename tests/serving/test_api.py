"""The HTTP surface over a real engine in this process, through the official client."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from fathom_serve.api.app import create_app
from fathom_serve.api.chat import to_generation
from fathom_serve.api.schema import ChatRequest
from fathom_serve.deploy.service import EngineService
from fathom_serve.deploy.source import Source
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.text.stream import TextStream
from serving.folders import tah2_folder

LIMITS = EngineLimits(max_active=4, max_queued=4, rows_per_tick=64, pages=200, books="tick")
ASK: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tah2_folder(tmp_path_factory.mktemp("api"))
    made = EngineService(folder, Source("tiny", str(folder)), LIMITS, threads=1)
    yield made
    made.close()


def client_of(service) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(create_app(service))
    http: Any = httpx.AsyncClient(transport=transport, base_url="http://test")
    return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)


def chat(service, **parameters):
    """One whole answer."""
    body = {"model": "tiny", "messages": ASK, "max_tokens": 12, "temperature": 0} | parameters
    return asyncio.run(client_of(service).chat.completions.create(**body))


def post(service, body, path="/v1/chat/completions") -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            content = body if isinstance(body, str) else json.dumps(body)
            return await http.post(path, content=content, headers={"content-type": "application/json"})

    return asyncio.run(send())


def test_a_whole_answer_reports_its_depths(service) -> None:
    answer = chat(service, extra_body={"depth": {"return": "tokens"}}, logprobs=True, top_logprobs=2)
    choice, usage = answer.choices[0], answer.usage
    tokens = choice.model_extra["depth"]["tokens"]
    assert "".join(token["text"] for token in tokens) == choice.message.content
    assert choice.finish_reason == "length" and usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    depth = usage.model_extra["depth"]
    assert sum(depth["histogram"].values()) == 12 and set(depth["histogram"]) == {"1", "2"}
    assert depth["mean"] == depth["iterations"] / 12
    assert {token["depth"] for token in tokens} == {1, 2}, "the test must mix depths"
    for entry in choice.logprobs.content:
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the most probable token"


def test_a_streamed_answer_equals_the_whole_one(service) -> None:
    async def stream() -> list:
        chunks = await client_of(service).chat.completions.create(
            model="tiny", messages=ASK, max_tokens=12, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"depth": {"return": "tokens"}},
        )  # fmt: skip
        return [chunk async for chunk in chunks]

    chunks, whole = asyncio.run(stream()), chat(service)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.model_dump() == whole.usage.model_dump()
    told = [t for c in chunks if c.choices for t in (c.choices[0].model_extra or {}).get("depth", {}).get("tokens", [])]
    assert len(told) == 12


def test_many_at_once_equal_each_alone(service) -> None:
    prompts = ["a", "what is two and two", "x" * 40, "?", "why", "no"]

    async def together() -> list:
        client = client_of(service)
        return await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": text}], max_tokens=8, seed=3, temperature=0.8
                )
                for text in prompts
            )
        )

    for text, got in zip(prompts, asyncio.run(together()), strict=True):
        alone = chat(service, messages=[{"role": "user", "content": text}], max_tokens=8, seed=3, temperature=0.8)
        assert got.choices[0].message.content == alone.choices[0].message.content
        assert got.usage.model_dump() == alone.usage.model_dump()


def test_the_depth_dial(service) -> None:
    shallow = chat(service, extra_body={"depth": {"max_depth": 1}}).usage.model_extra["depth"]
    never = chat(service, extra_body={"depth": {"tau_exit": 1.0}}).usage.model_extra["depth"]
    always = chat(service, extra_body={"depth": {"tau_exit": 0.0}}).usage.model_extra["depth"]
    assert shallow["histogram"] == never["histogram"] == {"1": 12, "2": 0}
    assert always["histogram"] == {"1": 0, "2": 12} and always["prompt_mean"] == 2.0


def test_a_stop_string_ends_the_answer(service) -> None:
    # Letters, so that the text has no replacement characters to match by accident.
    free = chat(service, max_tokens=40).choices[0].message.content
    word = free[5:7]
    stopped = chat(service, max_tokens=40, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == free[: free.index(word)]


@pytest.mark.parametrize(
    ("change", "status", "param", "says"),
    [
        ({"model": "other"}, 404, "model", "'tiny'"),
        ({"depth": {"max_depth": 3}}, 400, "depth.max_depth", "1 to 2"),
        ({"depth": {"tau_exit": 1.5}}, 400, "depth.tau_exit", "less than or equal to 1"),
        ({"depth": {"budget": 3}}, 400, "depth.budget", "unsupported"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "messages", "takes 256"),
        ({"max_tokens": 250}, 400, "max_tokens", "ask for at most"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, ""),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "messages.0.role", "'user'"),
        ({"n": 2}, 400, "n", "1"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "equal to 0"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias", ""),
        ({"tools": [{"type": "function"}]}, 400, "tools", ""),
        ({"response_format": {"type": "json_object"}}, 400, "response_format.type", "text"),
        ({"temperature": -1}, 400, "temperature", "greater"),
        ({"stop": ["a"] * 5}, 400, "stop", "at most 4"),
        ({"top_logprobs": 3}, 400, None, "needs logprobs"),
        ({"max_completion_tokens": 3}, 400, None, "differ"),
        ({"best_of": 3}, 400, "best_of", "unsupported"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(service, change, status, param, says) -> None:
    for stream in (False, True):
        answer = post(service, {"model": "tiny", "messages": ASK, "max_tokens": 12, "stream": stream} | change)
        error = answer.json()["error"]
        assert answer.status_code == status
        assert says in error["message"] and set(error) == {"message", "type", "param", "code"}
        if param is not None:
            assert error["param"] == param
    assert service.engine.pool.used == 0


def test_a_seed_that_nobody_asked_for_is_random_and_said_to_be(service) -> None:
    card = asyncio.run(service.card())

    def sampling(**fields):
        body = ChatRequest.model_validate({"model": "tiny", "messages": ASK} | fields)
        return service.request(to_generation(body, card)).sampling

    first, second, asked = sampling(), sampling(), sampling(seed=0)
    assert first.seed != second.seed and first.seed_drawn and second.seed_drawn
    assert (asked.seed, asked.seed_drawn) == (0, False)


def test_bodies_that_are_no_request(service) -> None:
    assert post(service, "{").json()["error"]["code"] == "invalid_json"
    assert post(service, "[]").status_code == 400
    assert post(service, {"messages": ASK}).json()["error"]["param"] == "model"
    assert post(service, {}, "/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    huge = post(service, json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * (5 << 20)}]}))
    assert huge.status_code == 413


def test_more_than_the_queue_holds_gets_503_with_retry_after(service) -> None:
    async def flood() -> list:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
            body = {"model": "tiny", "messages": ASK, "max_tokens": 60, "temperature": 0}
            return await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(16)))

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(refused) >= 4 and {answer.status_code for answer in answers} == {200, 503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert len({a.json()["choices"][0]["message"]["content"] for a in answers if a.status_code == 200}) == 1


def test_models_and_health(service) -> None:
    async def look() -> tuple:
        client = client_of(service)
        listed = await client.models.list()
        one = await client.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        return listed.data, one, await client._client.get("/health")

    listed, one, health = asyncio.run(look())
    assert [model.id for model in listed] == ["tiny"]
    assert one.model_extra["depth"] == {"method": "tah2", "max_depth": 2, "tau_exit": 0.5}
    assert health.status_code == 200


def test_a_request_whose_text_cannot_be_made_fails_alone(service, monkeypatch) -> None:
    push = TextStream.push

    def faulty(self, token):
        if self.stop == ("poison",):
            raise ValueError("bad bytes")
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", faulty)
    answer = post(service, {"model": "tiny", "messages": ASK, "max_tokens": 5, "stop": "poison"})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert chat(service).usage.completion_tokens == 12
