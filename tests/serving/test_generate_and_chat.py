"""The commands that talk: generate in this process, chat to an endpoint, deploy's configuration."""

import json
import threading
import time

import httpx
import pytest
import uvicorn
import yaml

from fathom.cli.main import main
from fathom_serve.api.app import create_app
from fathom_serve.deploy.service import EngineService
from fathom_serve.deploy.source import Source
from fathom_serve.engine.limits import EngineLimits
from serving.folders import tah2_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tah2_folder(tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def endpoint(folder):
    service = EngineService(folder, Source("tiny", str(folder)), EngineLimits(pages=200, books="tick"), threads=1)
    server = uvicorn.Server(uvicorn.Config(create_app(service), "127.0.0.1", 0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", service
    server.should_exit = True
    thread.join()
    service.close()


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def test_generate_prints_tokens_with_depths(folder, capsys) -> None:
    assert run("generate", str(folder), "hi", "--max-tokens", "9", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert len(body["tokens"]) == body["usage"]["completion_tokens"] == 9
    assert "".join(token["text"] for token in body["tokens"]) == body["text"]
    assert run("generate", str(folder), "hi", "--max-tokens", "9") == 0
    shown = capsys.readouterr().out
    assert [c for c in body["text"] if c.isalnum()] == [c for c in shown if c.isalnum()]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-depth", "3"], "1 to 2"),
        (["--max-tokens", "400"], "ask for at most"),
    ],
)
def test_generate_refuses_what_the_model_cannot_do(folder, capsys, words, says) -> None:
    assert run("generate", str(folder), "hi", *words) == 2
    shown = capsys.readouterr().err
    assert says in shown and "Traceback" not in shown


def test_a_missing_or_unknown_model_is_one_message(tmp_path, capsys) -> None:
    assert run("generate", str(tmp_path / "nothing"), "hi") == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert run("deploy", str(tmp_path), "--dry-run") == 2
    assert "mamba" in capsys.readouterr().err


def test_deploy_prints_the_configuration_it_would_apply(folder, capsys) -> None:
    assert run("deploy", str(folder), "--dry-run", "--port", "8123", "--name", "mine") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["http_options"]["host"] == "127.0.0.1" and config["http_options"]["port"] == 8123
    application = config["applications"][0]
    assert application["import_path"] == "fathom_serve.deploy.app:build"
    assert application["args"]["name"] == "mine" and application["args"]["model"] == str(folder)


def test_chat_streams_and_keeps_the_conversation(endpoint, capsys, monkeypatch) -> None:
    url, service = endpoint
    lines = iter(["hello", "/depth 1", "again", "/depth 9", "no", "/nonsense", "/exit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    assert run("chat", "--endpoint", url, "--max-tokens", "8") == 0
    shown = capsys.readouterr().out
    assert "tiny" in shown and "depth 2" in shown
    assert shown.count("8 tokens, mean depth") == 2 and "mean depth 1.00" in shown
    assert "this model has depths 1 to 2" in shown and "/reset" in shown
    assert service.engine.pool.used == 0


def test_chat_without_an_endpoint_says_what_to_do(capsys) -> None:
    assert run("chat", "--endpoint", "http://127.0.0.1:9/v1") == 2
    assert "fathom deploy" in capsys.readouterr().err


def test_a_client_that_leaves_frees_its_pages(endpoint) -> None:
    url, service = endpoint
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "stream": True}
    before = service.engine.ticks
    with httpx.stream("POST", f"{url}/chat/completions", json=body | {"temperature": 0}) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 10
    while service.engine.busy and time.monotonic() < deadline:
        time.sleep(0.02)
    assert service.engine.pool.used == 0
    assert service.engine.ticks - before < 200
