"""Mistakes that people make with recipes, data and models: refused before work starts, and nothing is lost."""

import json
from pathlib import Path

import pytest

from fathom.cli.main import main
from fathom.config.load import config_dict
from fathom.errors import CheckpointError
from fathom.orchestrate.jobs import Jobs
from fathom.orchestrate.run import run_recipe
from fathom.train.place import CHECKPOINTS
from support.runs import tiny_recipe


def told(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """What the command says to a person, having ended with this code."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    said = capsys.readouterr().err
    assert stop.value.code == code, said
    assert "Traceback" not in said
    return said


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe file of two steps."""
    monkeypatch.setenv("FATHOM_HOME", str(tmp_path / "home"))
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(config_dict(tiny_recipe(tmp_path, train__steps=2))))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("method.preset=tah22", "did you mean 'tah2'?"),
        ("method.update=updater2", "did you mean 'updater'?"),
        ("method.training_routing=expert", "expert_choice"),
        ("data.train=missing.jsonl", "data.train: missing.jsonl: no such file"),
        ("data.heldout=missing.jsonl", "data.heldout: missing.jsonl"),
        ("data.train=rows.csv", "give a .jsonl, .parquet or .arrow file"),
        ("data.train=generated:words", "no such generator"),
    ],
)
def test_a_fresh_start_that_cannot_succeed_removes_nothing(
    change: str, words: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "store" / "runs" / "tiny" / "result.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("precious")
    assert words in told(capsys, 2, "train", str(recipe), "--fresh", "--set", change)
    assert kept.read_text() == "precious"
    jobs = Jobs.__new__(Jobs)
    jobs.address = "http://127.0.0.1:8265"
    key, value = change.split("=")
    with pytest.raises(Exception, match=words.split(":")[0].replace("?", r"\?")):
        jobs.submit(tiny_recipe(tmp_path, **{key.replace(".", "__"): value}))


def test_an_infinite_number_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, 2, "train", str(recipe), "--set", "optimizer.learning_rate=.inf")
    assert "should be a finite number" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "unknown architecture 'gpt2'"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"max_position_embeddings": 30}, "the model has 30 positions"),
    ],
)
def test_a_base_model_that_cannot_be_used_is_refused_before_training(
    changes: dict[str, object], words: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    said = told(capsys, 2, "train", str(recipe))
    assert words in said
    assert "measuring" not in said


def test_an_unknown_model_is_refused_before_a_cluster_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, 2, "deploy", "nowhere")
    assert "'nowhere' is neither a folder nor" in said
    assert "starting" not in said


def test_a_folder_that_may_not_be_written_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/proc/none" in told(capsys, 2, "prepare", str(recipe), "--out", "/proc/none")


def test_a_complete_run_goes_on_with_an_allowed_change_and_says_so_when_it_may_not(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    assert run_recipe(tiny_recipe(tmp_path, train__steps=2), folder=home).steps == 2
    assert "--allow-change train.steps" in told(capsys, 3, "train", str(recipe), "--set", "train.steps=4")
    longer = run_recipe(tiny_recipe(tmp_path, train__steps=4), allow_change=["train.steps"], folder=home)
    assert (longer.steps, longer.resumed_from) == (4, 2)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=r"every checkpoint is damaged \(steps 4, 3\)"):
        run_recipe(tiny_recipe(tmp_path, train__steps=6), allow_change=["train.steps"], folder=home)
    assert len(list((tmp_path / "store" / "runs" / "tiny" / CHECKPOINTS).glob("step-*"))) == 2
    assert run_recipe(tiny_recipe(tmp_path, train__steps=4), folder=home) == longer, "its result is still there"


def damage(folder: Path) -> None:
    """Flip a bit in every checkpoint."""
    for file in (folder / "store" / "runs" / "tiny" / CHECKPOINTS).glob("*/*.safetensors"):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_model_that_diverged_gets_as_far_as_its_message(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, 1, "train", str(recipe), "--set", "optimizer.learning_rate=1e30", "--set", "train.steps=9")
    assert "the gradient was not finite in 3 steps" in said


def test_parts_that_do_not_go_together_are_refused_before_any_work(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, 2, "train", str(recipe), "--set", "method.span=[0, 1, 1]")
    assert "loop all layers" in said and "conversations" not in said and "held out" not in said


def test_an_objective_that_a_strategy_cannot_run_is_refused(recipe: Path, tmp_path: Path) -> None:
    """Not left to hang: LoopUS's passes without gradient bring ZeRO-3's gathers out of step."""
    from fathom.errors import ConfigError
    from fathom.train.inputs import refuse_unfit

    cfg = tiny_recipe(tmp_path, method__preset="loopus", method__max_depth=3, parallel__strategy="zero")
    with pytest.raises(ConfigError, match="ZeRO-3"):
        refuse_unfit(cfg, tmp_path / "base")
