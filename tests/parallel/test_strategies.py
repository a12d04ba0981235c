"""All strategies are one: parameters, norms and states as of one process, and any loads any other's state."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fathom.model.collectives import LOCAL
from fathom.model.rows import pack_documents
from support import one_result as one

SCRIPT = Path(__file__).with_name("ranks.py")
CLOSE = 3e-5  # of parameters after three steps of 1e-2; a lost micro-batch or another clipping gives 1e-3 and more


def import_script() -> ModuleType:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("fathom_ranks", SCRIPT)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ranks: Any = import_script()


def launch(strategy: str, folder: Path, saved: list[Path]) -> list[dict[str, Any]]:
    """Run the script on all ranks; the findings of each."""
    folder.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # for tests/support
    processes = []
    for rank in range(ranks.RANKS):
        command = [sys.executable, str(SCRIPT), strategy, str(rank), str(ranks.RANKS), str(folder), *map(str, saved)]
        with open(folder / f"log-{rank}.txt", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"log-{rank}.txt").read_text()[-3000:] for rank in range(ranks.RANKS))
    assert codes == [0] * ranks.RANKS, logs
    return [json.loads((folder / f"findings-{rank}.json").read_text()) for rank in range(ranks.RANKS)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process on the rows of both ranks."""
    folder = tmp_path_factory.mktemp("single")
    strategy = ranks.make_strategy("single", LOCAL)
    history = ranks.train(strategy, 0, ranks.BEFORE)
    ranks.save(strategy, folder)
    history += ranks.train(strategy, ranks.BEFORE, ranks.AFTER)
    return {"folder": folder, "history": history, "final": strategy.full_model_state()}


@pytest.fixture(scope="module")
def fsdp(reference: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp") / "run"
    launch("fsdp", folder, [reference["folder"]])
    return folder


@pytest.fixture(scope="module")
def zero(reference: dict[str, Any], fsdp: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero") / "run"
    launch("zero", folder, [reference["folder"], fsdp / "saved"])
    return folder


@pytest.fixture(params=["fsdp", "zero"])
def run(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def findings(run: Path) -> list[dict[str, Any]]:
    return [json.loads((run / f"findings-{rank}.json").read_text()) for rank in range(ranks.RANKS)]


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def test_parameters_equal_those_of_one_process(run: Path, reference: dict[str, Any]) -> None:
    assert largest_difference(load_file(run / "final.safetensors"), reference["final"]) < CLOSE


def test_the_reported_norm_is_the_whole_gradients_on_every_rank(run: Path, reference: dict[str, Any]) -> None:
    expected = [step["norm"] for step in reference["history"]]
    assert min(expected) > 2 * ranks.OPTIMIZER.clip_norm, "nothing was clipped: this run would show little"
    for rank in findings(run):
        assert [step["norm"] for step in rank["history"]] == pytest.approx(expected, rel=1e-4)


def test_losses_equal_those_of_one_process(run: Path, reference: dict[str, Any]) -> None:
    expected = [step["loss"] for step in reference["history"]]
    assert [step["loss"] for step in findings(run)[0]["history"]] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", one.METHODS)
def test_02_17_gradient_norm_and_parameters_are_one_processs(run: Path, name: str) -> None:
    """open-instruct PR 1498 and pytorch #170862: of four micro-batches none is lost, and the norm is no shard's.
    With routes scripted and labels recorded; in one micro-batch nothing of the second rank goes on, in another it has
    no rows."""
    found = load_file(run / f"one-{list(one.METHODS).index(name)}.safetensors")
    for rank in findings(run):
        ours = one.Result(found, rank[f"one/{name}"])
        assert one.agree(ours, one.reference(name)), one.apart(ours, one.reference(name))


@pytest.mark.parametrize("preset", ranks.METHODS)
def test_other_methods_learn_as_in_one_process(run: Path, preset: str) -> None:
    """Losses and norms of two steps: the second step's see what the first one's update made."""
    if preset in ranks.UNSHARDED.get(run.parent.name.rstrip("0123456789"), set()):
        pytest.skip("refused: ZeRO-3 goes out of step over passes without a gradient")
    expected = ranks.train(ranks.make_strategy("single", LOCAL, preset), 0, ranks.BEFORE)
    for rank in findings(run):
        for ours, theirs in zip(rank[f"method/{preset}"], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_average_of_weights_is_that_of_one_process_and_resumes_exactly(run: Path) -> None:
    strategy = ranks.AveragedStrategy(ranks.make_strategy("single", LOCAL), ranks.DECAY)
    ranks.train(strategy, 0, ranks.BEFORE + ranks.AFTER)
    ours, resumed = (load_file(run / f"{name}.safetensors") for name in ("averaged", "averaged-resumed"))
    assert largest_difference(ours, strategy.full_model_state()) < CLOSE
    assert largest_difference(ours, load_file(run / "final.safetensors")) > 100 * CLOSE
    assert all(torch.equal(ours[name], resumed[name]) for name in ours)
    held = [ranks.load_whole(run / "averaged")[f"ema/{name}"] for name in ours]
    assert not any(whole.isnan().any() for whole in held)


def test_labels_of_a_whole_step_are_those_of_one_process(run: Path, reference: dict[str, Any]) -> None:
    """Each step is two passes over its micro-batches, the first without gradient."""
    expected = ranks.train(ranks.make_strategy("single", LOCAL), 0, ranks.BEFORE, pooled=True)
    assert expected[0]["loss"] != pytest.approx(reference["history"][0]["loss"], rel=1e-4), (
        "the pool made no difference"
    )
    for rank in findings(run):
        for ours, theirs in zip(rank["pooled"], expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_loss_that_is_not_finite_on_one_rank_updates_nothing_on_any(run: Path) -> None:
    expected = {"finite": False, "unchanged": True, "updates": ranks.BEFORE}
    assert [rank["poisoned"] for rank in findings(run)] == [expected, expected]


def test_the_state_is_split_and_nothing_is_missing_or_held_twice(run: Path, reference: dict[str, Any]) -> None:
    whole = sum(value.numel() for value in reference["final"].values())
    held = [rank["held"] for rank in findings(run)]
    assert sum(held) == 3 * whole
    assert max(held) < 0.6 * 3 * whole


def test_saved_ranges_put_together_are_the_references_state(run: Path, reference: dict[str, Any]) -> None:
    ours, theirs = ranks.load_whole(run / "saved"), ranks.load_whole(reference["folder"])
    assert largest_difference(ours, theirs) < CLOSE


def test_resuming_from_its_own_state_is_exact(run: Path) -> None:
    final, resumed = (load_file(run / f"{name}.safetensors") for name in ("final", "resumed-0"))
    assert all(torch.equal(final[name], resumed[name]) for name in final)
    for rank in findings(run):
        assert rank["resumed/0"] == rank["history"][ranks.BEFORE :]


def test_resuming_from_the_state_of_one_process(run: Path, reference: dict[str, Any]) -> None:
    assert largest_difference(load_file(run / "resumed-1.safetensors"), reference["final"]) < CLOSE


def test_zero_resumes_from_the_state_of_fsdp(zero: Path, reference: dict[str, Any]) -> None:
    assert largest_difference(load_file(zero / "resumed-2.safetensors"), reference["final"]) < CLOSE


def test_one_process_resumes_from_a_sharded_state(run: Path, reference: dict[str, Any]) -> None:
    strategy = ranks.make_strategy("single", LOCAL)
    ranks.load(strategy, run / "saved", ranks.BEFORE)
    ranks.train(strategy, ranks.BEFORE, ranks.AFTER)
    assert largest_difference(strategy.full_model_state(), reference["final"]) < CLOSE


def test_one_process_resumes_from_its_own_state_exactly(reference: dict[str, Any]) -> None:
    strategy = ranks.make_strategy("single", LOCAL)
    ranks.load(strategy, reference["folder"], ranks.BEFORE)
    assert ranks.train(strategy, ranks.BEFORE, ranks.AFTER) == reference["history"][ranks.BEFORE :]


def test_the_reference_updates_nothing_when_the_loss_is_not_finite() -> None:
    found = ranks.poisoned_step(ranks.make_strategy("single", LOCAL))
    assert found == {"finite": False, "unchanged": True, "updates": 0}


@pytest.mark.parametrize("split", [1, 2, 3, 6])
def test_gradients_do_not_depend_on_how_a_step_is_cut_into_micro_batches(split: int, tmp_path: Path) -> None:
    """Ragged documents, one token count for the whole step (accumulation that averages means fails this); in fp64, so
    that only the order of additions may differ."""
    documents = [each for m in range(3) for each in ranks.documents(7, m, m % 2)][:6]
    gradients = []
    for parts in (1, split):
        strategy = ranks.make_strategy("single", LOCAL, preset="tah2-fixed")
        strategy.root.double()
        batches = [pack_documents(documents[n::parts]) for n in range(parts)]
        count = sum(int(rows.supervised.sum()) for rows in batches)
        for rows in batches:
            strategy.backward(strategy.root(*rows)[0] / count, last=False)
        gradients.append({name: p.grad.clone() for name, p in strategy.root.named_parameters()})
    assert largest_difference(*gradients) < 1e-12


def test_unknown_strategies_are_refused() -> None:
    from fathom.parallel.strategy import create_strategy

    with pytest.raises(ValueError, match="single, fsdp or zero"):
        create_strategy("ddp", torch.nn.Linear(1, 1), ranks.OPTIMIZER, [], LOCAL)
