"""One process trains, commits, is cut off, and goes on as if nothing had happened."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.checkpoint.store import CheckpointStore
from fathom.config.schema import RunConfig
from fathom.errors import FathomError, ResumeRefused
from fathom.orchestrate.measure import with_weights
from fathom.parallel.single import SingleStrategy
from fathom.storage import files
from fathom.train.group import own_process
from fathom.train.inputs import fetch_inputs
from fathom.train.place import CHECKPOINTS, STOP, Place
from fathom.train.plan import StepPlan, plan_step
from fathom.train.session import Outcome
from support.runs import same, tiny_recipe, train_here


class Killed(BaseException):
    """Stands for a SIGKILL: nothing may catch it and tidy up."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "work").mkdir()
    return Place(str(tmp_path / "store" / "runs" / "tiny"), tmp_path / "work", [])


def run(
    cfg: RunConfig,
    place: Place,
    kill_after: int | None = None,
    log: list[tuple[int, dict[str, float]]] | None = None,
    evaluate: Any = lambda step, weights: None,
) -> Outcome:
    """Train here; with ``kill_after``, die while that step is recorded, before it could be committed."""

    def record(step: int, metrics: dict[str, float]) -> None:
        if log is not None:
            log.append((step, metrics))
        if step == kill_after:
            raise Killed

    return train_here(cfg, place, record, evaluate)


def test_a_run_that_is_killed_three_times_ends_bit_for_bit_as_one_that_is_not(tmp_path: Path, place: Place) -> None:
    cfg = tiny_recipe(tmp_path, train__steps=8, checkpoint__every_steps=2)
    undisturbed: list[tuple[int, dict[str, float]]] = []
    whole = run(cfg, place._replace(uri=str(tmp_path / "other")), log=undisturbed)
    log: list[tuple[int, dict[str, float]]] = []
    for kill_after in (3, 4, 7):  # in an epoch, and again in the same one; before and after a commit
        with pytest.raises(Killed):
            run(cfg, place, kill_after, log)
    resumed = run(cfg, place, log=log)
    assert resumed.started_at == 6
    assert same(resumed, whole)
    expected = dict(undisturbed)
    for step, metrics in log:
        for name in ("nll", "learning_rate", "grad_norm", "mean_depth", "epoch", "tokens_seen"):
            assert metrics[name] == expected[step][name], f"{name} of step {step}"
    assert resumed.state.history == whole.state.history
    assert [step for step, _ in whole.state.history["nll"]] == list(range(1, 9))


def test_a_module_beside_the_model_is_resumed_too_and_is_no_part_of_the_trained_model(
    tmp_path: Path, place: Place
) -> None:
    cfg = tiny_recipe(
        tmp_path,
        train__steps=4,
        checkpoint__every_steps=2,
        objective__lookahead_fraction=0.5,
        objective__value_head=0.5,
        objective__decider_weight=1.0,
    )
    undisturbed: list[tuple[int, dict[str, float]]] = []
    whole = run(cfg, place._replace(uri=str(tmp_path / "other")), log=undisturbed)
    with pytest.raises(Killed):
        run(cfg, place, kill_after=3)
    log: list[tuple[int, dict[str, float]]] = []
    resumed = run(cfg, place, log=log)
    assert resumed.started_at == 2 and same(resumed, whole)
    explained = "value_explained/depth_1"
    assert [metrics[explained] for _, metrics in log] == [metrics[explained] for _, metrics in undisturbed[2:]]
    assert resumed.weights is not None and not any("helper" in name for name in resumed.weights)
    with_weights(cfg, Path(cfg.model.base), resumed.weights)


def test_training_lowers_the_loss_and_counts_what_it_saw(tmp_path: Path, place: Place) -> None:
    cfg = tiny_recipe(tmp_path, train__steps=12, optimizer__learning_rate=3e-3)
    outcome = run(cfg, place)
    curve = [value for _, value in outcome.state.history["nll"]]
    assert curve[-1] < curve[0] - 0.2
    state = outcome.state
    assert (outcome.finished, state.step, state.updates, state.refused_steps, state.empty_steps) == (True, 12, 12, 0, 0)
    assert 0 < state.supervised_tokens < state.tokens


def test_metrics_of_a_step_have_their_names(tmp_path: Path, place: Place) -> None:
    log: list[tuple[int, dict[str, float]]] = []
    run(tiny_recipe(tmp_path, train__steps=1), place, log=log)
    wanted = {"nll", "nll/depth_1", "mean_depth", "share_continuing/depth_1", "decider_loss", "gain/mean_depth_1"}
    wanted |= {
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "flops_per_token",
        "step_seconds",
        "peak_memory_bytes",
    }
    assert wanted <= log[0][1].keys()
    assert all(math.isfinite(value) for value in log[0][1].values())


def test_checkpoints_are_pruned_and_say_what_they_are(tmp_path: Path, place: Place) -> None:
    cfg = tiny_recipe(tmp_path, train__steps=5, checkpoint__every_steps=1, checkpoint__keep=2)
    run(cfg, place)
    store = CheckpointStore(files.join(place.uri, CHECKPOINTS))
    assert store.steps() == [5, 4]
    latest = store.latest()
    assert latest is not None
    assert latest.meta["step"] == 5
    assert latest.meta["config"]["optimizer"]["clip_norm"] == 1.0
    assert list((place.work / "staging").iterdir()) == []


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, place: Place) -> None:
    cfg = tiny_recipe(tmp_path, checkpoint__every_steps=2)
    whole = run(cfg, place._replace(uri=str(tmp_path / "other")))
    with pytest.raises(Killed):
        run(cfg, place, kill_after=5)
    broken = next(Path(place.uri, CHECKPOINTS, "step-00000004").glob("*.safetensors"))
    data = broken.read_bytes()
    broken.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    resumed = run(cfg, place)
    assert resumed.started_at == 2
    assert same(resumed, whole)


def test_resume_is_refused_when_the_recipe_changed_unless_the_key_is_allowed(tmp_path: Path, place: Place) -> None:
    with pytest.raises(Killed):
        run(tiny_recipe(tmp_path), place, kill_after=4)
    changed = tiny_recipe(tmp_path, optimizer__learning_rate=2e-3)
    with pytest.raises(ResumeRefused, match=r"step 3.*optimizer\.learning_rate changed"):
        run(changed, place)
    resumed = run(changed, place._replace(allow_change=["optimizer.learning_rate"]))
    assert resumed.started_at == 3


def test_resume_is_refused_when_the_data_changed(tmp_path: Path, place: Place) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text('{"question": "a?", "answer": "b"}\n' * 3)
    cfg = tiny_recipe(tmp_path, data__train=str(source))
    with pytest.raises(Killed):
        run(cfg, place, kill_after=4)
    source.write_text('{"question": "c?", "answer": "d"}\n' * 3)
    with pytest.raises(ResumeRefused, match="other data"):
        run(cfg, place)
    assert run(cfg, place._replace(allow_change=["data"])).started_at == 3


def test_a_request_to_stop_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, place: Place) -> None:
    cfg = tiny_recipe(tmp_path, checkpoint__every_steps=100)
    whole = run(cfg, place._replace(uri=str(tmp_path / "other")))
    files.write_bytes(files.join(place.uri, STOP), b"")
    stopped = run(cfg, place)
    assert (stopped.finished, stopped.state.step) == (False, 1)
    files.remove_tree(files.join(place.uri, STOP))
    assert same(run(cfg, place), whole)


def test_an_interrupt_finishes_the_step_and_commits(tmp_path: Path, place: Place) -> None:
    cfg = tiny_recipe(tmp_path, checkpoint__every_steps=100)
    before = signal.getsignal(signal.SIGINT)

    class Interrupting(list):
        def append(self, entry: tuple[int, dict[str, float]]) -> None:
            if entry[0] == 2:
                os.kill(os.getpid(), signal.SIGINT)

    stopped = run(cfg, place, log=Interrupting())
    assert (stopped.finished, stopped.state.step) == (False, 2)
    assert signal.getsignal(signal.SIGINT) is before
    assert CheckpointStore(files.join(place.uri, CHECKPOINTS)).steps() == [2]


def test_gradients_that_stay_not_finite_end_the_run_with_the_last_good_state_committed(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_recipe(tmp_path, checkpoint__every_steps=100)
    backward, calls = SingleStrategy.backward, []

    def poisoned(self: SingleStrategy, loss: torch.Tensor, last: bool) -> None:
        calls.append(last)
        backward(self, loss * (math.nan if sum(calls) >= 2 else 1.0), last)

    monkeypatch.setattr(SingleStrategy, "backward", poisoned)
    with pytest.raises(FathomError, match="not finite in 3 steps in a row, the last of them step 4"):
        run(cfg, place)
    latest = CheckpointStore(files.join(place.uri, CHECKPOINTS)).latest()
    assert latest is not None
    assert latest.meta["progressed"]["refused_steps"] == 3
    monkeypatch.undo()
    resumed = run(cfg, place)
    assert resumed.finished
    assert all(torch.isfinite(value).all() for value in resumed.weights.values())


def test_what_a_step_read_whose_loss_is_not_finite_is_kept(
    tmp_path: Path, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = tiny_recipe(tmp_path, optimizer__learning_rate=1e30, train__steps=9)
    with pytest.raises(FathomError, match=f"in {place.uri}/refused") as caught:
        run(cfg, place)
    kept = [json.loads(path.read_text()) for path in sorted(Path(place.uri, "refused").iterdir())]
    steps = [each["step"] for each in kept]
    assert len(steps) == 3 and f"the last of them step {steps[-1]}" in str(caught.value)
    assert f"{place.uri}/refused/step-{steps[0]:08d}-rank-00000.json" in caplog.text
    train = fetch_inputs(cfg, own_process(), place.work).train
    plan = plan_step(cfg, train, steps[-1] - 1, 0, 1)
    found = kept[-1]["micro_batches"]
    assert [[row["example"] for row in each["examples"]] for each in found] == plan.micro_batches
    assert {each["loss"] for each in found} == {"nan"} and kept[-1]["grad_norm"] == "nan"
    first = found[0]["examples"][0]
    ids, supervised = train.document(first["example"])
    assert (first["ids"], [bool(each) for each in first["supervised"]]) == (ids, supervised)
    assert first["row"] == train.where(first["example"])


def test_a_step_without_supervised_tokens_is_skipped_and_counted(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fathom.train import loop

    plan = loop.plan_step

    def plan_without_targets(cfg: RunConfig, prepared: Any, step: int, rank: int, world: int) -> StepPlan:
        drawn = plan(cfg, prepared, step, rank, world)
        return drawn._replace(supervised=0) if step == 1 else drawn

    monkeypatch.setattr(loop, "plan_step", plan_without_targets)
    outcome = run(tiny_recipe(tmp_path, train__steps=3), place)
    assert (outcome.state.step, outcome.state.updates, outcome.state.empty_steps) == (3, 2, 1)


def test_measurements_in_between_see_the_weights_of_their_step(tmp_path: Path, place: Place) -> None:
    seen: dict[int, torch.Tensor] = {}
    cfg = tiny_recipe(tmp_path, train__eval_every_steps=2)
    run(cfg, place, evaluate=lambda step, weights: seen.update({step: weights["backbone.norm.weight"]}))
    assert list(seen) == [2, 4]
    assert not torch.equal(seen[2], seen[4])
