"""What a step says of itself: the line on stderr, memory, and the share of the machine's peak."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.config.schema import ObjectiveConfig
from fathom.train.machine import every_pass_learns, machine_metrics, peak_flops, peak_memory_bytes
from fathom.train.progress import Progress
from support.models import tiny_model
from support.runs import tiny_recipe

METRICS = {
    "nll": 2.34567,
    "mean_depth": 1.25,
    "learning_rate": 4e-5,
    "tokens_per_second": 12345.6,
    "mfu": 0.417,
    "peak_memory_bytes": 3.26e9,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_says_what_is_safe_and_how_fast_it_is(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setenv("COLUMNS", "200")
    with Progress(total=50, done=10, enabled=True) as progress:
        progress.step(11, METRICS, 10)
    line = "nll 2.3457  depth 1.25  lr 4.0e-05  12,346 tokens/s  mfu 42%  3.3 GB  saved 10"
    assert line in said.getvalue()
    assert "11/50" in said.getvalue()
    assert terminal or said.getvalue().rstrip().endswith("left")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_are_known_by_whole_names(name: str, peak: float | None) -> None:
    assert peak_flops(name, "bf16") == peak
    assert peak_flops(name, "fp32") is None


def test_utilisation_is_three_forwards_over_all_devices_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    cfg = tiny_recipe(tmp_path, train__precision="bf16")

    def found(**changes: Any) -> dict[str, float]:
        return machine_metrics(cfg.model_copy(update=changes), tiny_model(), torch.device("cuda:0"), 4, 2e9, 1e5)

    assert found() == {"peak_memory_bytes": 7.0, "mfu": pytest.approx(3 * 2e9 * 1e5 / (4 * 989e12))}
    # passes without a backward would be counted as if they had one
    assert "mfu" not in found(objective=ObjectiveConfig(mean_depth=2.0))
    assert "mfu" not in machine_metrics(cfg, tiny_model(), torch.device("cpu"), 1, 2e9, 1e5)


def test_methods_that_train_a_part_have_no_utilisation(tmp_path: Path) -> None:
    assert every_pass_learns(tiny_recipe(tmp_path), tiny_model())
    gate = tiny_recipe(tmp_path, objective__kind="gate_gain")
    assert not every_pass_learns(gate, tiny_model("ouro-adaptive"))


def test_peak_memory_grows_with_what_is_allocated() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(60_000_000)
    assert peak_memory_bytes(torch.device("cpu")) >= max(before, held.nbytes)
