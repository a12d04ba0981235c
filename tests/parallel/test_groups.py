"""Which parameters decay and how fast each learns, against AdamW's first step written out."""

import torch

from fathom.config.schema import ObjectiveConfig, OptimizerConfig
from fathom.model.collectives import LOCAL
from fathom.objectives.root import TrainingRoot
from fathom.parallel.strategy import create_strategy
from fathom.train.session import added_parameters
from support.models import random_rows, tiny_model

CFG = OptimizerConfig(learning_rate=1.0, weight_decay=0.3, added_rate_factor=4.0, epsilon=1e-3, clip_norm=1e9)
RATE = 1e-2


def test_only_matrices_decay_and_added_parts_learn_at_their_own_rate() -> None:
    root = TrainingRoot(
        tiny_model("tah2", 2), ObjectiveConfig(decider_weight=1.0, lookahead_fraction=0.5, value_head=0.5)
    )
    strategy = create_strategy("single", root, CFG, [], LOCAL, added=added_parameters(root))
    before = {name: parameter.detach().clone() for name, parameter in root.named_parameters()}
    strategy.backward(root(*random_rows([12, 7]))[0] / 10, last=True)
    gradients = {name: parameter.grad.clone() for name, parameter in root.named_parameters()}
    strategy.step(RATE, CFG.clip_norm)
    kinds = set()
    for name, parameter in root.named_parameters():
        added = name.startswith(("model.update.", "model.decider.", "helper."))
        matrix = before[name].dim() == 2
        kinds.add((added, matrix))
        rate = 4.0 * RATE if added else RATE
        kept = 1 - rate * 0.3 if matrix else 1.0
        # Adam's first step: both averages, corrected for their start, are the gradient and its square.
        expected = before[name] * kept - rate * gradients[name] / (gradients[name].abs() + CFG.epsilon)
        torch.testing.assert_close(parameter.detach(), expected, atol=1e-12, rtol=1e-9, msg=name)
    assert len(kinds) == 4, "norms and matrices, of the base and of the added parts"


def test_adapters_are_added_parts() -> None:
    root = TrainingRoot(tiny_model("tah", 2), ObjectiveConfig(kind="language_model"))
    added = added_parameters(root)
    assert any(name.startswith("model.adapters.") for name in added)
    assert not any(name.startswith(("model.backbone.", "model.table.")) for name in added)
