"""Ray Serve for real: deploy a folder, and use it with the official client."""

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fathom.errors import ConfigError, ServiceError
from fathom_serve.deploy.apply import apply, require_port, serve_config
from fathom_serve.deploy.arguments import parse
from serving.folders import tah2_folder

ASK: Any = [{"role": "user", "content": "hi"}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory, ray_cluster):
    """A deployed tiny model, on the Ray head of a local stack."""
    from ray import serve

    folder = tah2_folder(tmp_path_factory.mktemp("serve"))
    args = {"model": str(folder), "threads": 1, "limits": {"max_active": 4, "pages": 400, "books": "tick"}}
    try:
        yield apply(serve_config(args, free_port()), print)
    finally:
        serve.shutdown()


async def in_flight(client: openai.AsyncOpenAI) -> tuple[list, list]:
    """Six at once, every other one streaming; contents and usages."""

    async def one(number: int) -> tuple[str, dict]:
        common = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi " * number}],
            "max_tokens": 10,
            "seed": 1,
        }
        if number % 2:
            whole = await client.chat.completions.create(**common)
            return whole.choices[0].message.content, whole.usage.model_dump()
        text, usage = "", None
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.chat.completions.create(**common, **options):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return text, usage.model_dump()

    answers = await asyncio.gather(*(one(number) for number in range(1, 7)))
    again = [await one(number) for number in range(1, 7)]
    return list(answers), again


@pytest.mark.timeout(420)
def test_the_official_client_talks_to_ray_serve(endpoint) -> None:
    client = openai.OpenAI(base_url=endpoint, api_key="none", max_retries=0, timeout=60)
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=12, temperature=0, extra_body={"depth": {"tau_exit": 0.0}}
    )
    assert answer.usage is not None and answer.usage.model_extra is not None
    assert answer.usage.model_extra["depth"]["histogram"] == {"1": 0, "2": 12}
    together, alone = asyncio.run(in_flight(openai.AsyncOpenAI(base_url=endpoint, api_key="none", timeout=60)))
    assert together == alone

    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="1 to 2"):
        client.chat.completions.create(model="tiny", messages=ASK, stream=True, extra_body={"depth": {"max_depth": 9}})
    with pytest.raises(openai.BadRequestError, match="takes 256"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 400}])


@pytest.mark.timeout(120)
def test_a_client_that_leaves_frees_its_place(endpoint) -> None:
    """Four places: had the ones that left kept theirs, the fifth would wait for 200 tokens each."""
    body = {"model": "tiny", "messages": ASK, "max_tokens": 200, "stream": True, "temperature": 0}
    for _ in range(8):
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", f"{endpoint}/chat/completions", json=body) as s:
            for line in s.iter_lines():
                if '"content"' in line:
                    break
    from ray import serve

    handle = serve.get_deployment_handle("DepthEngine", app_name="fathom")
    deadline = time.monotonic() + 30
    while (used := handle.used_pages.remote().result()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert used == 0


def test_the_proxy_listens_on_loopback_only(endpoint) -> None:
    port = int(endpoint.rsplit(":", 1)[1].split("/")[0])
    rows = [
        line.split()[1:4] for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    addresses = {row[0].split(":")[0] for row in rows if row[0].endswith(f":{port:04X}") and row[2] == "0A"}
    assert addresses == {"0100007F"}


def test_another_port_of_the_same_cluster_is_refused(endpoint, tmp_path) -> None:
    with pytest.raises(ServiceError, match="already"):
        apply(serve_config({"model": str(tmp_path)}, free_port()))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServiceError, match="in use"):
            require_port(taken.getsockname()[1])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match=r"limits\.pagez"):
        parse({"model": "x", "limits": {"pagez": 3}})
