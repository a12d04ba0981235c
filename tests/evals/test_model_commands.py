"""``fathom eval`` and ``fathom export`` on a tiny model folder: numbers on stdout, mistakes with exit code 2."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fathom.config.schema import MethodConfig
from fathom.model.folder import load_model, save_model
from support.command import fathom, write_eval_recipe
from support.models import tiny_base_folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    base = tiny_base_folder(tmp_path / "base", max_position_embeddings=1024)
    return write_eval_recipe(tmp_path, base, heldout=4)


def test_eval_scores_the_base_and_the_model_at_step_zero(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = fathom(capsys, "eval", recipe, "--json")
    base = json.loads(text)
    assert (code, base["documents"], base["mean_depth"]) == (0, 4, 1.0)
    _, text, _ = fathom(capsys, "eval", recipe, "--json", "--step-zero", "--max-examples", "2")
    start = json.loads(text)
    assert start["documents"] == 2 and start["mean_depth"] > 1.0
    _, text, _ = fathom(capsys, "eval", recipe, "--max-examples", "1", "--step-zero")
    assert "held-out NLL" in text and "continuing at depth 1" in text


def test_eval_takes_a_converted_folder(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recipe.parent / "converted"
    method = MethodConfig(preset="tah2", max_depth=2)
    save_model(load_model(recipe.parent / "base", method, seed=42), folder, recipe.parent / "base")
    _, converted, _ = fathom(capsys, "eval", recipe, "--model", folder, "--json")
    _, start, _ = fathom(capsys, "eval", recipe, "--step-zero", "--json")
    assert json.loads(converted)["nll"] == pytest.approx(json.loads(start)["nll"])


def test_eval_reads_other_depths_than_the_trained(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, base, _ = fathom(capsys, "eval", recipe, "--json")
    _, once, _ = fathom(capsys, "eval", recipe, "--json", "--step-zero", "--max-depth", "1")
    assert json.loads(once)["nll"] == pytest.approx(json.loads(base)["nll"], abs=1e-6)
    _, deep, _ = fathom(capsys, "eval", recipe, "--json", "--step-zero", "--max-depth", "4")
    assert max(map(int, json.loads(deep)["depth_counts"])) > 2
    code, _, errors = fathom(capsys, "eval", recipe, "--max-depth", "2")
    assert code == 2 and "depths only" in errors


def test_eval_without_held_out_data_says_so(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = fathom(capsys, "eval", recipe, "--set", "data.heldout=null")
    assert code == 2 and "data.heldout" in errors and "Traceback" not in errors


def test_eval_of_a_model_that_is_not_there(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = fathom(capsys, "eval", recipe, "--model", "./nowhere")
    assert code == 2 and "nowhere" in errors and "Traceback" not in errors


def test_export_keeps_every_weight_and_overwrites_nothing(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = recipe.parent / "base", recipe.parent / "out"
    code, text, _ = fathom(capsys, "export", base, out)
    assert (code, text.strip()) == (0, str(out))
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    code, _, errors = fathom(capsys, "export", base, out)
    assert code == 2 and "not an empty folder" in errors


def test_export_of_the_base_part_leaves_the_added_parts_out(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, folder, out = (recipe.parent / name for name in ("base", "converted", "plain"))
    save_model(load_model(base, MethodConfig(preset="tah2", max_depth=2)), folder, base)
    assert any(name.startswith("fathom.") for name in load_file(folder / "model.safetensors"))
    assert fathom(capsys, "export", folder, out, "--base-only")[0] == 0
    assert load_file(out / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    assert "fathom" not in json.loads((out / "config.json").read_text())
