"""T11 and T12 across two processes: one launch, many named checks."""

import pytest
import torch

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import ProcessGroup
from fathom.model.rows import PackedRows, pack_documents
from fathom.objectives.root import TrainingRoot
from support.models import document, random_rows, tiny_model
from support.two_ranks import summed_over_two_ranks

EMPTY = pack_documents([])
DEPTHS = 4


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


def find(rank: int) -> dict[str, torch.Tensor]:
    root = TrainingRoot(tiny_model("tah2", DEPTHS), ObjectiveConfig(), ProcessGroup(), checkpointing=True)
    results = {}
    for name, (_, parts, routes) in cases().items():
        root.zero_grad()
        mine = parts[rank]
        start = 0 if rank == 0 else parts[0].count
        loss, stats = root(*mine, None if routes is None else routes[start : start + mine.count])
        loss.backward()
        # A parameter without gradient on one rank would leave the other waiting in a sharded run.
        assert all(p.grad is not None for p in root.parameters()), name
        gradients = torch.cat([p.grad.flatten() for p in root.parameters()])
        found = {"gradients": gradients, "stats": stats, "loss": loss.detach().clone()}
        results |= {f"{name}|{key}": value for key, value in found.items()}
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return summed_over_two_ranks(find, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", cases())
def test_two_ranks_equal_one_process_with_the_union(two_ranks, name):
    union, _, routes = cases()[name]
    root = TrainingRoot(tiny_model("tah2", DEPTHS), ObjectiveConfig())
    loss, stats = root(*union, routes)
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in root.parameters()])
    torch.testing.assert_close(two_ranks[f"{name}|loss"], loss.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(two_ranks[f"{name}|gradients"], gradients, atol=1e-9, rtol=1e-7)
    additive = torch.tensor([not entry.startswith(("forwards", "cut")) for entry in root.stat_names])
    torch.testing.assert_close(two_ranks[f"{name}|stats"][additive], stats[additive], atol=1e-7, rtol=1e-9)
