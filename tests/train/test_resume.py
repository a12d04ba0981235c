"""A run that is killed between epochs, inside a step and before a commit is the run that is not, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.config.schema import RunConfig
from fathom.parallel.single import SingleStrategy
from fathom.train import loop
from fathom.train.place import Place
from fathom.train.session import Outcome
from support.runs import same, tiny_recipe, train_here

EXACT = ("nll", "loss", "learning_rate", "grad_norm", "mean_depth", "epoch", "tokens_seen")


class Killed(BaseException):
    """Stands for a SIGKILL: nothing may catch it and tidy up."""


class Attempts:
    """What a run did over all its attempts.

    Attributes:
        shown: (step, its forwards' examples) of every step that was begun, in order.
        logged: (step, metrics) of every step that was finished, in order.
    """

    def __init__(self, cfg: RunConfig, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.cfg, self.place, self.patch = cfg, Place(str(folder / "store"), folder / "work", []), patch
        self.shown: list[tuple[int, list[list[int]]]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    def go(self, kill_in: tuple[int, int] = (0, 0), kill_after: int = 0) -> Outcome:
        """Go on; perhaps die before a micro-batch's backward (step, its number), or when a step is recorded."""
        plan, backward, done = loop.plan_step, SingleStrategy.backward, 0

        def shown(cfg: RunConfig, data: Any, step: int, rank: int, world: int) -> Any:
            nonlocal done
            done = 0
            planned = plan(cfg, data, step, rank, world)
            self.shown.append((step + 1, planned.micro_batches))
            return planned

        def dying(strategy: SingleStrategy, loss: torch.Tensor, last: bool) -> None:
            nonlocal done
            done += 1
            if (self.shown[-1][0], done) == kill_in:
                raise Killed
            backward(strategy, loss, last)

        def record(step: int, metrics: dict[str, float]) -> None:
            self.logged.append((step, metrics))
            if step == kill_after:
                raise Killed

        with self.patch.context() as patch:
            patch.setattr(loop, "plan_step", shown)
            patch.setattr(SingleStrategy, "backward", dying)
            return train_here(self.cfg, self.place, record)


def test_three_kills_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is two steps and so is the way from commit to commit; a step is several forwards."""
    cfg = tiny_recipe(
        tmp_path,
        train__examples_per_step=4,
        checkpoint__every_steps=2,
        schedule={"warmup_ratio": 0.5, "kind": "cosine"},
    )
    whole, run = (Attempts(cfg, tmp_path / name, monkeypatch) for name in ("whole", "run"))
    undisturbed = whole.go()
    kills: list[dict[str, Any]] = [{"kill_in": (3, 1)}, {"kill_in": (4, 2)}, {"kill_after": 5}]
    for kill in kills:  # an epoch is over and committed; a gradient is half accumulated; a step is done, not committed
        with pytest.raises(Killed):
            run.go(**kill)
    resumed = run.go()
    assert same(resumed, undisturbed)
    assert [step for step, _ in run.shown] == [1, 2, 3, *(3, 4), *(3, 4, 5), *(5, 6)]
    assert all(len(forwards) > 1 for _, forwards in whole.shown)
    examples, metrics = dict(whole.shown), dict(whole.logged)
    assert all(forwards == examples[step] for step, forwards in run.shown)
    assert len({values["learning_rate"] for values in metrics.values()}) > 3
    for step, values in run.logged:
        for name in EXACT:
            assert values.get(name) == metrics[step].get(name), f"{name} of step {step}"
    assert resumed.state.history == undisturbed.state.history
    for curve in resumed.state.history.values():
        assert [step for step, _ in curve] == list(range(1, 7)), "a value of each step, and one"
