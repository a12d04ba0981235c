"""``fathom claims``: what its options change, and what it refuses before anything is trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fathom.claims import budget, lab
from fathom.claims.claim_wasted import OURO
from support.command import fathom

TINY = replace(
    budget.QUICK, width=32, window=32, text_layers=1, text_base_steps=2, text_steps=1, text_documents=2, heldout=4
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "QUICK", TINY)
    monkeypatch.setattr(lab, "cores", lambda: 0)  # everything in this process


@pytest.fixture
def nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(lab, "run_claims", train)


def text_file(folder: Path, sign: str = "") -> Path:
    path = folder / "text.txt"
    path.write_text((sign or "Two and 2 make 4, it says.\n") * (600 // len(sign or "x" * 27)), encoding="utf-8")
    return path


@pytest.mark.usefixtures("tiny")
def test_data_scale_seeds_and_only_are_what_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int, int, int]] = []
    train_run = lab.train_run

    def watched(made: budget.Budget, run: budget.Run, seed: int, folder: Path) -> object:
        model = made.model(run)
        trained.append((run.name, seed, model.config.hidden_size, model.config.vocab_size))
        return train_run(made, run, seed, folder)

    monkeypatch.setattr(lab, "train_run", watched)
    data = text_file(tmp_path)
    options = ("--quick", "--seeds", 2, "--scale", 2, "--only", "wasted-loops", "--data", data)
    code, said, progress = fathom(capsys, "claims", *options, "--out", tmp_path / "out", "--json")
    assert code == 0 and list(json.loads(said)) == ["wasted-loops", "report"]
    signs = len(set(data.read_text())) + 1
    names = [TINY.base_of(OURO).name, OURO.name]
    assert sorted(trained) == sorted((name, seed, 64, signs) for name in names for seed in (1, 2))
    assert f"[{len(trained) + 2}/{len(trained) + 2}]" in progress, "two measurements besides"
    report = json.loads((tmp_path / "out" / "claims.json").read_text())
    about, claim = report["about"], report["claims"][0]
    assert about["seeds"] == 2 and "width 64" in about["models"] and about["text"] == str(data)
    assert claim["seeds"] == [1, 2] and all(len(one["values"]) == 2 for one in claim["comparisons"])
    assert OURO.name in (tmp_path / "out" / "claims.html").read_text()


@pytest.mark.usefixtures("tiny")
def test_one_seed_of_a_text_without_letters_or_digits_decides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--quick", "--seeds", 1, "--only", "wasted-loops", "--data", text_file(tmp_path, "+-=. "))
    code, said, _ = fathom(capsys, "claims", *options, "--out", tmp_path)
    assert code == 0 and said.startswith("unclear at this scale")


@pytest.mark.usefixtures("tiny", "nothing_trains")
@pytest.mark.parametrize(
    ("options", "code", "wanted"),
    [
        (("--device", "cuda"), 2, "torch sees no GPU"),
        (("--device", "tpu"), 2, "'tpu' is no device"),
        (("--only", "wasted"), 2, "did you mean 'wasted-loops'?"),
        (("--seeds", 0), 2, "--seeds"),
        (("--scale", 65), 2, "--scale"),
        (("--data", "nowhere.txt"), 2, "nowhere.txt"),
        (("--data", "short.txt"), 2, "too few to hold out any"),
        (("--data", "bytes.bin"), 2, "UTF-8"),
        (("--out", "short.txt"), 2, "short.txt: File exists"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_trained(
    options: tuple[str, object], code: int, wanted: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe\x00" * 800)
    found, _, errors = fathom(capsys, "claims", "--quick", *options)
    assert found == code and wanted in " ".join(errors.split())
    assert not (tmp_path / "claims").exists(), "no empty report is left"
