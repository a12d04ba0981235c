"""The moving average of weights against one kept by hand, and through a run's checkpoints."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fathom.config.schema import ObjectiveConfig, OptimizerConfig, RunConfig
from fathom.model.collectives import LOCAL
from fathom.objectives.root import TrainingRoot
from fathom.parallel.averaged import AveragedStrategy
from fathom.parallel.strategy import create_strategy
from fathom.train.group import own_process
from fathom.train.inputs import fetch_inputs
from fathom.train.place import Place
from fathom.train.session import Outcome, train_worker
from support.models import random_rows, tiny_model
from support.runs import tiny_recipe

DECAY = 0.8


def test_the_average_follows_every_applied_step() -> None:
    root = TrainingRoot(tiny_model("tah2", 2), ObjectiveConfig())
    strategy = AveragedStrategy(create_strategy("single", root, OptimizerConfig(), [], LOCAL), DECAY)
    expected = {name: parameter.detach().clone() for name, parameter in root.named_parameters()}
    for factor in (1.0, 1.0, math.nan, 1.0):  # the third step is refused
        strategy.backward(root(*random_rows([9, 6]))[0] * factor, last=True)
        norm = strategy.step(1e-2, 1.0)
        if math.isfinite(norm):
            for name, parameter in root.named_parameters():
                expected[name] = DECAY * expected[name] + (1 - DECAY) * parameter.detach()
    assert strategy.updates == 3
    found = strategy.full_model_state()
    assert found is not None
    for name, parameter in root.named_parameters():
        torch.testing.assert_close(found[name], expected[name], atol=1e-12, rtol=1e-12)
        assert not torch.equal(found[name], parameter.detach()), name


class Killed(BaseException):
    """Stands for a SIGKILL."""


def run(
    cfg: RunConfig, folder: Path, kill_after: int | None = None, allow: tuple[str, ...] = ()
) -> tuple[Outcome, dict[int, Tensor]]:
    """Train; also the weights that evaluations saw."""
    seen: dict[int, Tensor] = {}

    def record(step: int, metrics: dict[str, float]) -> None:
        if step == kill_after:
            raise Killed

    def evaluate(step: int, weights: dict[str, Tensor]) -> dict[str, float]:
        seen[step] = weights["backbone.norm.weight"]
        return {"heldout/nll": 1.0 / step if step < 6 else 9.0}

    group = own_process()._replace(device=torch.device("cpu"))
    place = Place(str(folder / "run"), folder / "work", list(allow))
    place.work.mkdir(parents=True, exist_ok=True)
    return train_worker(cfg, fetch_inputs(cfg, group, place.work), place, group, record, evaluate), seen


def test_a_run_evaluates_publishes_and_resumes_its_average(tmp_path: Path) -> None:
    plain = tiny_recipe(tmp_path, train__eval_every_steps=2)
    cfg = tiny_recipe(
        tmp_path, train__eval_every_steps=2, train__ema_decay=DECAY, checkpoint__best_metric="heldout/nll"
    )
    trained, raw = run(plain, tmp_path / "plain")
    whole, seen = run(cfg, tmp_path / "whole")
    assert trained.weights is not None and whole.weights is not None
    assert not torch.equal(seen[4], raw[4])
    assert trained.state.history["nll"] == whole.state.history["nll"], "training does not see the average"
    assert whole.weights_step == 4
    assert torch.equal(whole.weights["backbone.norm.weight"], seen[4])  # read back from the best checkpoint
    with pytest.raises(Killed):
        run(cfg, tmp_path / "cut", kill_after=6)
    resumed, again = run(cfg, tmp_path / "cut")
    assert resumed.started_at == 4 and torch.equal(again[6], seen[6])


def test_an_average_may_begin_in_the_middle_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tiny_recipe(tmp_path), tmp_path / "a", kill_after=4)
    whole, _ = run(tiny_recipe(tmp_path), tmp_path / "b")
    averaged, _ = run(tiny_recipe(tmp_path, train__ema_decay=1e-9), tmp_path / "a", allow=("train.ema_decay",))
    assert averaged.started_at == 3
    assert averaged.weights is not None and whole.weights is not None
    for name, value in whole.weights.items():  # an average that forgets at once is the weights
        torch.testing.assert_close(averaged.weights[name], value, atol=1e-7, rtol=1e-6)
