"""Every kind of objective across two processes equals one process with the union: one launch, many named checks."""

import pytest
import torch
from torch import Tensor

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import LOCAL, Collectives, ProcessGroup
from fathom.model.rows import PackedRows, pack_documents
from fathom.objectives.context import Draw
from fathom.objectives.depth_draws import draw_depth
from fathom.objectives.root import TrainingRoot
from model.test_methods import model_of
from support.models import document, random_rows
from support.two_ranks import summed_over_two_ranks

EMPTY = pack_documents([])
METHODS = (
    "ouro", "ponder", "act", "mor-expert", "mor-token", "abbie-d", "huginn", "loopus", "tah", "tah-decider",
    "divergence, coda",
)  # fmt: skip
# Huginn at a drawn depth whose first pass is a constant; LoopUS reads two depths of three.
DRAWN = next(key for key in range(100) if draw_depth(2.0, key) == 3)
OBJECTIVES = {
    "huginn": ObjectiveConfig(mean_depth=2.0, gradient_depths=2),
    "loopus": ObjectiveConfig(supervised_depths=2),
    "mor-expert": ObjectiveConfig(router_weight=0.5),
    "mor-token": ObjectiveConfig(balance_weight=0.5),
}
SPLITS = ("both", "one rank without rows", "one rank without targets")


def root_of(name: str, collectives: Collectives = LOCAL) -> TrainingRoot:
    changes = {"axes": {"routing": "every_row"}} if name == "huginn" else {}
    model = model_of(name, **changes)
    return TrainingRoot(model, OBJECTIVES.get(name, ObjectiveConfig()), collectives, checkpointing=True)


def parts_of(split: str) -> list[PackedRows]:
    rows = random_rows([13, 8], seed=3)
    oracle = torch.randint(1, 4, (rows.count,), generator=torch.Generator().manual_seed(4))
    first, second = (document(rows._replace(oracle=oracle), number) for number in (0, 1))
    silent = second._replace(supervised=torch.zeros_like(second.supervised))
    return [first, {"both": second, "one rank without rows": EMPTY, "one rank without targets": silent}[split]]


def union_of(parts: list[PackedRows]) -> PackedRows:
    apart = [part._replace(sequence=part.sequence + number) for number, part in enumerate(parts)]
    return PackedRows(*(torch.cat(fields) for fields in zip(*apart, strict=True)))


def learn(root: TrainingRoot, rows: PackedRows, what: str) -> dict[str, Tensor]:
    root.zero_grad()
    loss, stats = root(*rows, draw=Draw(DRAWN))
    loss.backward()
    # A parameter without gradient on one rank would leave the other waiting in a sharded run.
    learning = [parameter for parameter in root.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in learning), what
    gradients = torch.cat([parameter.grad.flatten() for parameter in learning if parameter.grad is not None])
    return {"gradients": gradients, "stats": stats, "loss": loss.detach().clone()}


def find(rank: int) -> dict[str, torch.Tensor]:
    results = {}
    for name in METHODS:
        root = root_of(name, ProcessGroup())
        for split in SPLITS:
            found = learn(root, parts_of(split)[rank], name)
            results |= {f"{name}|{split}|{key}": tensor for key, tensor in found.items()}
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return summed_over_two_ranks(find, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_equal_one_process_with_the_union(two_ranks, name):
    root = root_of(name)
    for split in SPLITS:
        alone = learn(root, union_of(parts_of(split)), name)
        for key in ("loss", "gradients"):
            torch.testing.assert_close(two_ranks[f"{name}|{split}|{key}"], alone[key], atol=1e-9, rtol=1e-7)
        additive = torch.tensor([not entry.startswith(("forwards", "cut")) for entry in root.stat_names])
        torch.testing.assert_close(
            two_ranks[f"{name}|{split}|stats"][additive], alone["stats"][additive], atol=1e-7, rtol=1e-9
        )
