"""Tests of depth that training.md D.3 found nobody to have, in its order.

Two need more than this file: FLOPs that are torch's own count are in tests/model/test_flops.py, and the collectives of
ranks whose tokens want different depths in tests/objectives/test_ranks.py, with the coverage cut over all ranks.
"""

from pathlib import Path

import pytest
import torch

from fathom.config.schema import MethodConfig, ObjectiveConfig
from fathom.model.collectives import LOCAL
from fathom.model.folder import load_model, save_model
from fathom.model.levels import LoopOptions
from fathom.model.readout import READOUTS, mix
from fathom.model.rows import pack_documents
from fathom.objectives.labels import Ran, depth_labels
from fathom.objectives.lookahead import lookahead_log_prob
from fathom.objectives.root import TrainingRoot
from support.models import random_rows, tiny_base_folder, tiny_model
from support.reference import decode


@pytest.mark.parametrize("preset", ["standard", "tah2"])
def test_one_depth_is_the_base_model_before_and_after_export(preset: str, tmp_path: Path) -> None:
    """Logits and loss as transformers has them."""
    from transformers import AutoModelForCausalLM

    base = tiny_base_folder(tmp_path / "base")
    model = load_model(base, MethodConfig(preset=preset, max_depth=1), torch.float64)
    save_model(model, tmp_path / "out", base)
    ids = list(range(40))
    for folder in (base, tmp_path / "out"):
        theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float64, attn_implementation="eager")
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor([ids]), labels=torch.tensor([ids]))
            trace = model(rows := pack_documents([(ids, [True] * 40)]))
        logits = model.logits(trace.depths[0].hidden)
        torch.testing.assert_close(logits, expected.logits[0].to(logits.dtype), atol=1e-6, rtol=0)
        assert -float(trace.log_prob[rows.supervised].mean()) == pytest.approx(float(expected.loss), abs=1e-6)


def test_the_look_ahead_has_no_gradient() -> None:
    """Gradients with it equal, bit for bit, those of a step whose labels were measured before."""
    rows = random_rows([12, 9])
    found = []
    for given in (False, True):
        root = TrainingRoot(tiny_model("tah2", 3), ObjectiveConfig(decider_weight=1.0))
        labels = depth_labels(Ran(root.model, root.model(rows), rows, root.config, LOCAL, 1024)) if given else None
        assert all(parameter.grad is None for parameter in root.parameters())
        root(*rows, labels=labels)[0].backward()
        found.append([parameter.grad for parameter in root.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stopped_token_and_its_look_ahead_are_nobody_elses_business(depth: int) -> None:
    """Each alone is measured as all together are; and what comes after, or another token's id, does not matter."""
    model, rows = tiny_model("tah2", 3), random_rows([24])
    routes = torch.randint(1, 4, (24,), generator=torch.Generator().manual_seed(2))
    trace = model(rows, options=LoopOptions(routes=routes))
    ran = trace.depths[depth - 1]
    stopped = ~ran.goes_on
    together = lookahead_log_prob(model, trace, rows, depth, stopped, LOCAL, 1024)
    assert len(together) > 3
    for place, row in enumerate(stopped.nonzero()[:, 0].tolist()):
        one = torch.zeros_like(stopped)
        one[row] = True
        alone = lookahead_log_prob(model, trace, rows, depth, one, LOCAL, 1024)
        torch.testing.assert_close(together[place], alone[0], atol=1e-12, rtol=0)
    again = model(rows, options=LoopOptions(routes=routes))
    torch.testing.assert_close(again.log_prob, trace.log_prob, atol=0, rtol=0)


def test_labels_are_those_of_each_token_run_by_itself() -> None:
    """The gains of the parallel pass, from a slow decoding for each token that sends it alone one depth further."""
    model, rows = tiny_model("tah2", 2), random_rows([11, 6], seed=5)
    trace = model(rows)
    (at,) = depth_labels(Ran(model, trace, rows, ObjectiveConfig(), LOCAL, 1024))
    gains = {}
    for row in rows.supervised.nonzero()[:, 0].tolist():
        routes = trace.executed.clone()
        routes[row] = 2
        single = decode(model, rows, routes)["single"]
        gains[row] = float((single[row, 1] - single[row, 0]).detach())
        assert float(at.gain[row]) == pytest.approx(gains[row], abs=1e-9)
    positive = sorted((gain for gain in gains.values() if gain > 0), reverse=True)
    covered = next(n for n in range(1, len(positive) + 1) if sum(positive[:n]) >= 0.99 * sum(positive))
    assert at.label.nonzero()[:, 0].tolist() == [row for row, gain in gains.items() if gain >= positive[covered - 1]]


@pytest.mark.parametrize("readout", ["stop_mass", "uniform", "last_depth"])
def test_mixtures_are_distributions_and_hard_gates_choose_a_depth(readout: str) -> None:
    torch.manual_seed(3)
    depths = [torch.randn(11).double().log_softmax(-1) for _ in range(4)]
    soft = mix(READOUTS[readout], depths, [torch.rand(()).double() for _ in range(3)])
    assert float(soft.exp().sum()) == pytest.approx(1.0, abs=1e-9)
    if readout == "stop_mass":
        for stops_at in range(4):
            gates = [torch.tensor(float(number < stops_at)).double() for number in range(3)]
            hard = mix(READOUTS[readout], depths, gates)
            torch.testing.assert_close(hard.exp(), depths[stops_at].exp(), atol=1e-8, rtol=0)
