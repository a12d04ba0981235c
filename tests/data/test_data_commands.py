"""``fathom prepare`` and ``fathom config show``: results on stdout, mistakes with exit code 2 and no traceback."""

import json
from pathlib import Path

import pytest
import yaml

from support.command import fathom
from support.tokenizers import CHATML, tiny_tokenizer


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny_tokenizer(CHATML).save_pretrained(str(tmp_path / "model"))
    rows = [{"question": "q", "answer": "a"}, {"question": "q", "answer": "long " * 500}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "name": "tiny",
        "model": {"base": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "rows.jsonl"), "heldout": "generated:word-problems:heldout"},
        "train": {"steps": 1},
    }
    tree["data"].update(context_tokens=400, max_heldout_examples=5)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "tiny.yaml"


def test_prepare_reports_what_was_kept_and_dropped(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = recipe.parent / "out"
    code, text, _ = fathom(capsys, "prepare", recipe, "--out", out)
    assert code == 0
    assert "train: 1 of 2 conversations" in text and "heldout: 5 of 5" in text
    assert "dropped: 1 too_long" in text
    code, text, _ = fathom(capsys, "prepare", recipe, "--out", out, "--json")
    report = json.loads(text)
    assert (code, report["train"]["dropped"], report["heldout"]["documents"]) == (0, {"too_long": 1}, 5)


def test_prepare_shows_what_is_learned(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is between the marks is what the mask in the shards says; data cannot steer the terminal."""
    (recipe.parent / "rows.jsonl").write_text(json.dumps({"question": "q\x1b[2J", "answer": "[bold]a"}) + "\n")
    arguments = ("prepare", recipe, "--out", recipe.parent / "out", "--show", 3)
    code, text, _ = fathom(capsys, *arguments)
    assert code == 0 and f"{recipe.parent / 'rows.jsonl'}:1: " in text and "\x1b" not in text
    assert "<|im_start|>user\nq\\x1b[2J<|im_end|>\n<|im_start|>assistant\n[[[bold]a<|im_end|>]]\n" in text
    assert text.count("[[") == text.count("<|im_end|>]]") == 4, "one of one, and three of the held-out five"
    shown = json.loads(fathom(capsys, *arguments, "--json")[1])["train"]["shown"]
    assert shown[0]["spans"][1] == ["[bold]a<|im_end|>", True] and shown[0]["tokens"] > shown[0]["supervised"] > 0


def test_prepare_names_a_wrong_row(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe.parent / "rows.jsonl"
    path.write_text('{"question": "q", "reply": "a"}\n')
    code, text, errors = fathom(capsys, "prepare", recipe, "--out", recipe.parent / "out")
    assert (code, text) == (2, "")
    assert f"{path}:1: the row has no answer" in errors and "data.answer_template" in errors
    assert "Traceback" not in errors


def test_config_show_prints_every_default(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, errors = fathom(capsys, "config", "show", recipe, "--set", "optimizer.learning_rate=1e-3")
    shown = yaml.safe_load(text)
    assert code == 0 and errors.startswith("digest ")
    assert (shown["optimizer"]["learning_rate"], shown["optimizer"]["clip_norm"]) == (1e-3, 1.0)
    code, text, _ = fathom(capsys, "config", "show", recipe, "--json")
    assert code == 0 and len(json.loads(text)["digest"]) == 64


def test_config_show_names_the_nearest_key(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = fathom(capsys, "config", "show", recipe, "--set", "train.stps=3")
    assert code == 2 and "unknown key 'train.stps'" in errors and "train.steps" in errors
    code, _, errors = fathom(capsys, "config", "show", recipe, "--set", "method.preset=tah22")
    assert code == 2 and "tah2" in errors
