"""docs/methods.md is true: its table is the code's; its example, installed as a package, trains, saves and serves."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.config.load import parse_config
from fathom.config.schema import MethodConfig, ObjectiveConfig
from fathom.errors import ConfigError
from fathom.model import methods, routing, updates
from fathom.model.folder import load_model, save_model
from fathom.model.looped import LoopedLM
from fathom.model.methods import METHODS
from fathom.model.rows import pack_documents
from fathom.objectives import table
from fathom.objectives.root import TrainingRoot
from fathom_serve.engine.engine import Engine
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.request import Finished, Progress, Request, Sampling
from support.models import random_rows, tiny_base_folder
from support.reference import decode

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
LIMITS = EngineLimits(max_active=3, rows_per_tick=7, head_rows=3, page_rows=4, pages=200, books="tick")


def block(language: str) -> str:
    """The page's one code block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        for line in PAGE.splitlines()
        if line.startswith("| `")
    ]
    found = {cells[0]: cells for cells in rows if cells[0] in METHODS}
    assert list(found) == list(METHODS)
    for name, method in METHODS.items():
        update = f"{method.update} + adapters" if method.adapters else method.update
        route = method.routing if method.training_routing is None else f"{method.training_routing} / {method.routing}"
        assert found[name][2:] == [
            method.span, update, method.visibility, method.decider or "", route, method.readout, method.objective,
            str(method.max_depth),
        ]  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example as a package beside Fathom, as pip would leave it; afterwards the tables are as before."""
    tables: list[Any] = [METHODS, updates.UPDATES, routing.ROUTINGS, table.OBJECTIVES]
    before = [dict(each) for each in tables]
    site = tmp_path / "site"
    info = site / "my_methods-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "my_methods.py").write_text(block("python"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 0.1\n")
    head = '[project.entry-points."fathom.methods"]'
    assert block("toml").startswith(head)
    entries = block("toml").removeprefix(head).replace('"', "")
    (info / "entry_points.txt").write_text(f"[{methods.PLUGINS}]{entries}")
    monkeypatch.syspath_prepend(site)
    yield tmp_path
    for each, contents in zip(tables, before, strict=True):
        each.clear()
        each.update(contents)


def test_the_example_trains_saves_loads_and_serves(installed: Path) -> None:
    base = tiny_base_folder(installed / "base", num_hidden_layers=3)
    assert "damped" not in METHODS
    model = load_model(base, MethodConfig(preset="damped"))
    assert model.method.routing == "still_moving" and type(model.update).__module__ == "my_methods"

    rows = random_rows([14, 10, 9])
    root = TrainingRoot(model, ObjectiveConfig()).train()
    optimizer = torch.optim.AdamW(root.parameters(), 3e-3)
    losses = []
    for _ in range(6):
        loss, _ = root(*rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert bool((model.update.step != 0).any()), "the added parameter learns"

    save_model(model, installed / "made", base)
    forget()
    again = load_model(installed / "made")
    assert again.method == model.method
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    with torch.no_grad():
        assert torch.equal(again(rows).log_prob, model.eval()(rows).log_prob)
    serve(again.double())


def forget() -> None:
    """As in a process that has not asked for the method yet."""
    del (
        METHODS["damped"],
        updates.UPDATES["damped"],
        routing.ROUTINGS["still_moving"],
        table.OBJECTIVES["early_and_late"],
    )


def serve(model: LoopedLM) -> None:
    """Several requests at once equal decoding token by token, with mixed depths."""
    engine = Engine(model.eval(), LIMITS, decode=lambda ids: "")
    prompts = {"a": (5, 9, 40, 7), "b": (1,), "c": (60, 61, 62, 63, 64, 65, 66)}
    for number, (name, prompt) in enumerate(prompts.items()):
        sampling = Sampling(temperature=0, max_tokens=6, seed=number, ignore_stop_tokens=True)
        engine.submit(Request(name, prompt, sampling))
    told = []
    while engine.busy:
        told += engine.tick()
    depths = set()
    for number, (name, prompt) in enumerate(prompts.items()):
        events = [each.event for each in told if each.request_id == name]
        tokens = [token for event in events if isinstance(event, Progress) for token in event.tokens]
        assert isinstance(events[-1], Finished) and len(tokens) == 6
        ids = [*prompt, *(token.id for token in tokens)]
        with torch.no_grad():
            slow = decode(model, pack_documents([(ids, [True] * len(ids))], [number]))
        for place, token in enumerate(tokens, start=len(prompt) - 1):
            assert token.depth == int(slow["executed"][place])
            assert token.logprob == pytest.approx(float(slow["log_prob"][place]), abs=1e-9)
            depths.add(token.depth)
    assert len(depths) > 1 and min(depths) >= 2


def test_its_recipe_is_a_recipe(installed: Path) -> None:
    import yaml

    tree = {"name": "x", "model": {"base": "b"}, "data": {"train": "generated:word-problems"}, "train": {"steps": 1}}
    config = parse_config(tree | yaml.safe_load(block("yaml")))
    assert methods.method_of(config.method).max_depth == 6


def test_without_the_package_the_name_is_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'damped'"):
        methods.make_method("damped")
