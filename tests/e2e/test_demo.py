"""The demo's own parts: it cleans up on every way out, asks a real server, and shows what it was told."""

import asyncio
import importlib.util
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fathom.errors import ServiceError

DEMO = Path(__file__).parents[2] / "jobs" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("KEEP", raising=False)
    monkeypatch.delenv("PICTURE", raising=False)
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.console.width = 120
    return module


class Stack:
    """Counts starts and stops in place of the local stack."""

    def __init__(self, demo: ModuleType, monkeypatch: pytest.MonkeyPatch, running: bool = False) -> None:
        self.events: list[str] = []
        state = {"store": "s", "mlflow_uri": "m", "ray_address": "r"}
        monkeypatch.setenv("RAY_ADDRESS", "another")
        monkeypatch.setattr(demo, "stack_state", lambda: state if running else {})
        monkeypatch.setattr(demo, "start_stack", lambda *_, **__: self.events.append("start") or state)
        monkeypatch.setattr(demo, "use_stack", lambda _: None)
        monkeypatch.setattr(demo, "stop_stack", lambda: self.events.append("stop"))


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_stack_is_stopped_on_every_way_out(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    stack = Stack(demo, monkeypatch)
    try:
        with demo.local_stack():
            if error:
                raise error
    except BaseException as raised:
        assert error is not None and isinstance(raised, error)
    assert stack.events == ["start", "stop"]


def test_a_start_that_is_interrupted_is_stopped_too(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(demo, monkeypatch)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "start_stack", interrupted)
    with pytest.raises(KeyboardInterrupt), demo.local_stack():
        pass
    assert stack.events == ["stop"]


def test_keep_leaves_it_running(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(demo, monkeypatch)
    monkeypatch.setattr(demo, "KEEP", True)
    with demo.local_stack():
        pass
    assert stack.events == ["start"]


def test_a_stack_that_ran_before_is_left_alone(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(demo, monkeypatch, running=True)
    with pytest.raises(ServiceError, match="is running"), demo.local_stack():
        pass
    assert stack.events == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real engine and API around a tiny random model, without Ray."""
    import uvicorn

    from fathom.config.schema import MethodConfig
    from fathom.model.folder import load_model, save_model
    from fathom_serve.api.app import create_app
    from fathom_serve.deploy.service import EngineService
    from fathom_serve.deploy.source import Source
    from fathom_serve.engine.limits import EngineLimits
    from support.models import tiny_base_folder

    base = tiny_base_folder(tmp_path_factory.mktemp("base"), max_position_embeddings=1024)
    folder = base.parent / "converted"
    save_model(load_model(base, MethodConfig(preset="tah2", max_depth=2), seed=1), folder, base)
    service = EngineService(folder, Source("tiny", str(folder)), EngineLimits(), threads=1)
    host = uvicorn.Server(uvicorn.Config(create_app(service), "127.0.0.1", 0, log_level="warning"))
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    while not host.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{host.servers[0].sockets[0].getsockname()[1]}"
    host.should_exit = True
    thread.join()
    service.close()


def test_answers_come_in_pieces_with_depths(demo: ModuleType, server: str) -> None:
    answers = asyncio.run(demo.ask(demo.Endpoint(url=f"{server}/v1", model="tiny"), 0.5))
    assert [answer.problem for answer in answers] == [demo.word_problem(n, "heldout") for n in (0, 1, 2, 2)]
    assert [answer.tau_exit for answer in answers] == [0.5, 0.5, 0.5, demo.DIAL]
    for answer in answers:
        assert "".join(text for text, _ in answer.pieces) == answer.text
        assert {depth for _, depth in answer.pieces} <= {1, 2}
        assert 1.0 <= answer.mean_depth <= 2.0
    assert len({answer.mean_depth for answer in answers}) > 1 or answers[0].mean_depth > 1.0


def test_a_verdict_and_the_correct_answer_are_shown(demo: ModuleType) -> None:
    problem = {"question": "What is [2] + 2?", "answer": "2 + 2 = 4. The answer is 4.", "result": 4}
    right = demo.Answer(problem, "So 4.", [("So", 1), (" [b]4.", 2)], 0.5)
    wrong = demo.Answer(problem, "So 5.", [("So 5.", 1)], 0.4)
    with demo.console.capture() as shown:
        demo.show_answers([right, wrong], demo.load_recipe(demo.RECIPE), demo.console)
    text = shown.get()
    assert text.count("What is [2] + 2?") == 1 and "So [b]4." in text
    assert "right" in text and "wrong, the answer is 4" in text
    assert "tau_exit 0.5, mean depth 1.50" in text and "tau_exit 0.4, mean depth 1.00" in text
    assert "depth 1" in text and "depth 2" in text


def test_the_picture_is_the_answers(demo: ModuleType, tmp_path: Path) -> None:
    problem = {"question": "What is 2 + 2?", "answer": "The answer is 4.", "result": 4}
    demo.draw(
        [demo.Answer(problem, "So 4.", [("So 4.", 2)], 0.5)], demo.load_recipe(demo.RECIPE), str(tmp_path / "a.svg")
    )
    picture = (tmp_path / "a.svg").read_text()
    assert "2&#160;+&#160;2?" in picture and "src:" not in picture


def test_the_table_shows_all_three_models(demo: ModuleType) -> None:
    report = {"nll": 1.25, "mean_depth": 1.5, "share_continuing": {"1": 0.5}}
    fields = dict.fromkeys(demo.RunResult.__dataclass_fields__, 0)
    base = report | {"share_continuing": {}, "mean_depth": 1.0}
    result = demo.RunResult(**{**fields, "heldout": {"base": base, "converted": report, "trained": report}})
    with demo.console.capture() as shown:
        demo.show_scores(result)
    lines = shown.get().splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["held out", "base model", "converted, step 0"]
    assert "1.2500" in lines[2] and "50.0%" in lines[2] and "0.0%" in lines[1]
