"""T11 and T12 across two processes: one launch, many named checks."""

import pytest
import torch

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import LOCAL, Collectives, ProcessGroup
from fathom.model.rows import PackedRows, pack_documents
from fathom.objectives.root import TrainingRoot
from fathom.objectives.value_head import ValueHead
from support.models import document, random_rows, tiny_model
from support.two_ranks import summed_over_two_ranks

EMPTY = pack_documents([])
DEPTHS = 4
QUARTER = ObjectiveConfig(lookahead_fraction=0.25, value_head=0.5)
OBJECTIVES = {
    "published": ObjectiveConfig(),
    "a quarter looked ahead": ObjectiveConfig(lookahead_fraction=0.25),
    "value head not believed": QUARTER,
    # A bound that any head passes, which no recipe may ask for.
    "value head believed": QUARTER.model_copy(update={"value_head": -1e9}),
}


def cases() -> dict[str, tuple[PackedRows, list[PackedRows], torch.Tensor | None]]:
    """Name to (the union, each rank's rows, scripted routes of the union)."""
    ragged = random_rows([17, 9], seed=1)
    parts = [document(ragged, number) for number in (0, 1)]
    uneven = torch.cat((torch.ones(17), torch.arange(9) % DEPTHS + 1)).long()
    unsupervised = pack_documents([([5, 6, 7], [False] * 3)])
    return {
        "free routes": (ragged, parts, None),
        "one rank where nothing continues": (ragged, parts, uneven),
        "nobody continues anywhere": (ragged, parts, torch.ones(26, dtype=torch.int64)),
        "one rank without rows": (parts[0], [parts[0], EMPTY], None),
        "one rank without supervised rows": (
            PackedRows(
                *(
                    torch.cat(pair)
                    for pair in zip(parts[0], unsupervised._replace(sequence=unsupervised.sequence + 1), strict=True)
                )
            ),
            [parts[0], unsupervised],
            None,
        ),
    }


def root_of(objective: str, collectives: Collectives = LOCAL, checkpointing: bool = False) -> TrainingRoot:
    """With a value head that predicts something, if any."""
    root = TrainingRoot(tiny_model("tah2", DEPTHS), OBJECTIVES[objective], collectives, checkpointing=checkpointing)
    if isinstance(root.helper, ValueHead):
        torch.nn.init.constant_(root.helper.score.weight, 0.1)
    return root


def learn(root: TrainingRoot, rows: PackedRows, routes: torch.Tensor | None, name: str) -> dict[str, torch.Tensor]:
    root.zero_grad()
    loss, stats = root(*rows, routes)
    loss.backward()
    # A parameter without gradient on one rank would leave the other waiting in a sharded run.
    assert all(p.grad is not None for p in root.parameters()), name
    gradients = torch.cat([p.grad.flatten() for p in root.parameters()])
    return {"gradients": gradients, "stats": stats, "loss": loss.detach().clone()}


def find(rank: int) -> dict[str, torch.Tensor]:
    results = {}
    for objective in OBJECTIVES:
        root = root_of(objective, ProcessGroup(), checkpointing=True)
        for name, (_, parts, routes) in cases().items():
            mine, start = parts[rank], 0 if rank == 0 else parts[0].count
            found = learn(root, mine, None if routes is None else routes[start : start + mine.count], name)
            results |= {f"{objective}|{name}|{key}": value for key, value in found.items()}
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return summed_over_two_ranks(find, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", cases())
def test_two_ranks_equal_one_process_with_the_union(two_ranks, name, objective):
    union, _, routes = cases()[name]
    root = root_of(objective)
    alone = learn(root, union, routes, name)
    both = {key: two_ranks[f"{objective}|{name}|{key}"] for key in alone}
    torch.testing.assert_close(both["loss"], alone["loss"], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(both["gradients"], alone["gradients"], atol=1e-9, rtol=1e-7)
    additive = torch.tensor([not entry.startswith(("forwards", "cut")) for entry in root.stat_names])
    torch.testing.assert_close(both["stats"][additive], alone["stats"][additive], atol=1e-7, rtol=1e-9)
