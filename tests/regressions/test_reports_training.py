"""Bug reports of other platforms (training.md D.2) that concern what a step computes, one test each, by their number.

Numbers 2 and 17 need ranks; they are in tests/parallel/test_strategies.py, whose launches they share.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom.config.schema import MethodConfig
from fathom.data.prepared import Prepared, prepare
from fathom.data.template import Renderer
from fathom.evals.heldout import heldout_nll
from fathom.model.folder import load_model, load_tokenizer
from fathom.model.vocabulary import TokenTable
from fathom.parallel.zero import zero_config
from fathom.train.place import Place
from support.command import fathom
from support.runs import tiny_recipe, train_here


def ragged(folder: Path, count: int) -> None:
    """Conversations whose answers have 1 to some 60 tokens."""
    rows = [{"question": f"{number}?", "answer": "yes " * (1 + 5 * number % 14)} for number in range(count)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("method", ["standard", "tah2"])
def test_01_accumulation_does_not_change_the_step(tmp_path: Path, method: str) -> None:
    """transformers PR 34191: on ragged data, one conversation a forward, some, and all in one give the same step."""
    changes: dict[str, Any] = {
        "method": {"preset": method, "max_depth": 1 if method == "standard" else 2},
        "objective": {"pool": "step"} if method == "tah2" else {},
        "optimizer": {"learning_rate": 1e-2, "epsilon": 1.0, "clip_norm": 0.1},
        "train__steps": 1,
        "train__examples_per_step": 8,
    }
    found = {}
    for room in (101, 200, 1000):
        cfg = tiny_recipe(tmp_path, **changes, train__micro_batch_tokens=room)
        ragged(tmp_path, 8)
        seen: dict[str, float] = {}
        place = Place(str(tmp_path / f"store-{room}"), tmp_path / f"work-{room}", [])
        outcome = train_here(cfg, place, lambda step, metrics, seen=seen: seen.update(metrics))
        assert outcome.weights is not None and seen["grad_norm"] > 2 * 0.1, "nothing was clipped"
        found[seen["micro_batches"]] = (seen, outcome.weights)
    assert len(found) == 3 and min(found) == 1.0 and max(found) >= 4.0
    whole, weights = found[1.0]
    for metrics, ours in found.values():
        for name in ("nll", "grad_norm", "mean_depth"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-5), name
        for name, value in weights.items():
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=0)


def test_03_the_clipping_is_the_recipes_whatever_the_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed clips at 1.0 unasked: the resolved recipe names the value, and it is what DeepSpeed is told. (That
    large gradients are clipped alike, test_strategies.py shows.)"""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(tiny_recipe(tmp_path).model_dump(mode="json")))
    for given, wanted in (([], 1.0), (["--set", "optimizer.clip_norm=0.25"], 0.25)):
        code, out, _ = fathom(capsys, "config", "show", recipe, *given, "--json")
        assert code == 0
        resolved = json.loads(out)["config"]["optimizer"]["clip_norm"]
        assert resolved == wanted == zero_config(resolved, 2, 0)["gradient_clipping"]


def test_15_validation_is_a_mean_over_tokens(tmp_path: Path) -> None:
    """torchtitan PR 4167: it depends neither on how conversations are grouped nor on their order."""
    cfg = tiny_recipe(tmp_path)
    ragged(tmp_path, 9)
    data = prepare(cfg.data, "train", Renderer(load_tokenizer(cfg.model.base)), tmp_path / "prepared")
    model = load_model(cfg.model.base, MethodConfig(preset="tah2", max_depth=2), torch.float64, seed=1)

    class Reversed:
        def __init__(self, data: Prepared) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def document(self, index: int) -> tuple[list[int], list[bool]]:
            return self.data.document(len(self.data) - 1 - index)

    reports = [heldout_nll(model, each, room) for each in (data, Reversed(data)) for room in (1, 150, 4096)]
    for report in reports:
        assert report.supervised_tokens == data.counts["supervised_tokens"]
        assert report.metrics() == pytest.approx(reports[0].metrics(), rel=1e-9)
    firsts = [heldout_nll(model, data, 4096, max_examples=count) for count in range(1, 10)]
    sums = [0.0, *(report.nll * report.supervised_tokens for report in firsts)]
    means = [(b - a) / int(n) for a, b, n in zip(sums, sums[1:], data.supervised_counts, strict=False)]
    assert sum(means) / 9 != pytest.approx(reports[0].nll, rel=1e-4), "a mean of means would not be noticed"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_16_the_head_has_right_gradients_under_any_weights(tied: bool, chunk: int) -> None:
    """Liger #968: wrong for weights that differ by token. Against finite differences, ignored tokens among them."""
    torch.manual_seed(0)
    table = TokenTable(11, 4, tied).double()
    targets, weights = torch.randint(11, (7,)), torch.randn(7).double()
    weights[::3] = 0.0
    pulls = torch.randn(7, 3).double()

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        name = "embedding" if tied else "head"
        out = torch.func.functional_call(table, {name: weight}, (), {"head": (hidden, targets, 3, chunk, None)})
        return (out.log_prob * weights).sum() + (out.log_sum_exp * weights.flip(0)).sum() + (out.top * pulls).sum()

    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (hidden, weight), eps=1e-6, atol=1e-6)
