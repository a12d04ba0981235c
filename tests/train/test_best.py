"""The best checkpoint by a held-out metric stays and is what a run publishes; evaluations that get worse end it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom.checkpoint.store import CheckpointStore
from fathom.config.schema import RunConfig
from fathom.errors import ConfigError
from fathom.orchestrate.run import run_recipe
from fathom.storage import files
from fathom.storage.manifest import read_manifest
from fathom.train.group import own_process
from fathom.train.inputs import fetch_inputs
from fathom.train.place import CHECKPOINTS, Place
from fathom.train.session import Outcome, train_worker
from support.runs import tiny_recipe

FOUND = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 2.25, 12: 1.0}
"""Held-out NLL by step, as if measured."""


class Killed(BaseException):
    """Stands for a SIGKILL."""


def recipe(folder: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "train__steps": 12,
        "train__eval_every_steps": 2,
        "checkpoint__every_steps": 5,
        "checkpoint__keep": 1,
        "checkpoint__best_metric": "heldout/nll",
    }
    return tiny_recipe(folder, **(values | changes))


def run(
    cfg: RunConfig, folder: Path, log: list[int], kill_at: int | None = None, allow: tuple[str, ...] = ()
) -> tuple[Outcome, dict[int, Tensor]]:
    """Train, evaluations finding what :data:`FOUND` says; also the weights that each of them saw."""
    group = own_process()._replace(device=torch.device("cpu"))
    place = Place(str(folder / "run"), folder / "work", list(allow))
    place.work.mkdir(parents=True, exist_ok=True)
    seen: dict[int, Tensor] = {}

    def evaluate(step: int, weights: dict[str, Tensor]) -> dict[str, float]:
        if step == kill_at:
            raise Killed
        log.append(step)
        seen[step] = weights["backbone.norm.weight"]
        return {"heldout/nll": FOUND[step], "heldout/nll/depth_1": FOUND[step] + 5.0}

    ignore: Callable[[int, dict[str, float]], None] = lambda step, metrics: None  # noqa: E731
    return train_worker(cfg, fetch_inputs(cfg, group, place.work), place, group, ignore, evaluate), seen


def test_the_best_checkpoint_stays_and_its_weights_are_published(tmp_path: Path) -> None:
    outcome, seen = run(recipe(tmp_path, train__steps=10), tmp_path / "a", [])
    assert outcome.weights is not None
    assert (outcome.state.step, outcome.weights_step, outcome.state.best_value) == (10, 4, 2.0)
    assert torch.equal(outcome.weights["backbone.norm.weight"], seen[4])
    assert not torch.equal(seen[4], seen[10])
    store = CheckpointStore(files.join(str(tmp_path / "a" / "run"), CHECKPOINTS))
    assert store.steps() == [10, 4]  # checkpoint.keep is 1
    latest = store.latest()
    assert latest is not None
    assert latest.meta["best"] == {"step": 4, "metric": "heldout/nll", "value": 2.0}


def test_the_last_step_may_be_the_best(tmp_path: Path) -> None:
    outcome, _ = run(recipe(tmp_path), tmp_path / "a", [])
    assert (outcome.weights_step, outcome.state.best_step) == (12, 12)


def test_evaluations_without_a_new_best_end_the_run_also_across_a_kill(tmp_path: Path) -> None:
    cfg, log = recipe(tmp_path, train__early_stop_evals=3), []
    whole, _ = run(cfg, tmp_path / "a", log)
    assert log == [2, 4, 6, 8, 10]
    assert (whole.finished, whole.state.step, whole.weights_step) == (True, 10, 4)
    log.clear()
    with pytest.raises(Killed):  # the checkpoint of step 5 knows of the best one, that of step 4
        run(cfg, tmp_path / "b", log, kill_at=8)
    resumed, _ = run(cfg, tmp_path / "b", log)
    assert log == [2, 4, 6, 6, 8, 10]
    assert (resumed.started_at, resumed.state.step, resumed.weights_step) == (5, 10, 4)
    assert resumed.weights is not None and whole.weights is not None
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())
    again, _ = run(cfg, tmp_path / "b", log)  # killed before it published
    assert (again.finished, again.started_at, again.weights_step) == (True, 10, 4)
    assert len(log) == 6


@pytest.mark.parametrize(("metric", "published"), [("heldout/nll/depth_1", 8), (None, 10)])
def test_what_was_best_by_another_metric_is_forgotten(metric: str | None, published: int, tmp_path: Path) -> None:
    with pytest.raises(Killed):  # the checkpoint of step 5 says that step 4 is best, at 2.0
        run(recipe(tmp_path, train__steps=10), tmp_path / "a", [], kill_at=6)
    changed = recipe(tmp_path, train__steps=10, checkpoint__best_metric=metric)
    outcome, _ = run(changed, tmp_path / "a", [], allow=("checkpoint.best_metric",))
    assert (outcome.started_at, outcome.weights_step) == (5, published)
    assert outcome.state.best_value == (None if metric is None else FOUND[8] + 5.0)


@pytest.mark.parametrize("depth", ["0", "3"])
def test_a_depth_that_the_method_lacks_is_refused_before_any_step(depth: str, tmp_path: Path) -> None:
    cfg, log = recipe(tmp_path, checkpoint__best_metric=f"heldout/nll/depth_{depth}"), []
    with pytest.raises(ConfigError, match=r"has depths 1 to 2"):
        run(cfg, tmp_path / "a", log)
    assert log == []


def test_an_evaluation_in_which_nobody_ran_the_depth_is_not_the_best(tmp_path: Path) -> None:
    """The evaluations here say nothing of depth 2, as ones in which all tokens stop at depth 1: the run goes on and
    publishes its last step."""
    cfg = recipe(tmp_path, train__steps=4, checkpoint__best_metric="heldout/nll/depth_2")
    outcome, _ = run(cfg, tmp_path / "a", [])
    assert (outcome.finished, outcome.weights_step) == (True, 4)
    assert (outcome.state.best_step, outcome.state.evals_since_best) == (0, 2)


def test_a_run_publishes_the_weights_that_measured_best(tmp_path: Path) -> None:
    """A real evaluation, at a rate that makes the model worse at first."""
    cfg = recipe(
        tmp_path,
        optimizer__learning_rate=0.5,
        train__early_stop_evals=1,
        train__hang_timeout_s=1000.0,
        objective__pool="step",
    )
    result = run_recipe(cfg, folder=tmp_path / "home")
    assert result.best is not None and result.model_uri is not None
    assert (result.finished, result.steps, result.best["step"]) == (True, 4, 2)
    assert result.heldout["trained"]["nll"] == result.best["value"]
    meta = read_manifest(result.model_uri).meta
    assert (meta["step"], meta["best"]) == (result.best["step"], result.best)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__eval_every_steps": 0}, "checkpoint.best_metric is measured on held-out data"),
        ({"data__heldout": None}, "checkpoint.best_metric is measured on held-out data"),
        ({"checkpoint__best_metric": None, "train__early_stop_evals": 1}, "set checkpoint.best_metric"),
        ({"checkpoint__best_metric": "heldout/mean_depth"}, "best_metric"),
    ],
)
def test_recipes_that_could_not_tell_the_best_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, **changes)
