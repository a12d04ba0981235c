"""``objective.pool: step``: gradients of a step do not depend on how it is cut into micro-batches and ranks.

The reference is one micro-batch of everything in one process, where the published pool is the whole step.
"""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fathom.config.schema import ObjectiveConfig
from fathom.errors import ConfigError
from fathom.model.collectives import LOCAL, Collectives, ProcessGroup
from fathom.model.rows import PackedRows, pack_documents
from fathom.objectives.context import Draw
from fathom.objectives.pool import decide_step
from fathom.objectives.root import TrainingRoot
from support.models import tiny_model
from support.two_ranks import summed_over_two_ranks

DOCUMENTS = 32
OBJECTIVES: dict[str, dict[str, Any]] = {
    "as published": {},
    "mismatch": {"label_rule": "mismatch"},
    "priced": {"pass_price_nats": 0.05, "stop_cost_floor": 0.1},
}


def documents() -> list[tuple[list[int], list[bool]]]:
    """Ragged; some without a supervised token."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 12, (DOCUMENTS,), generator=generator).tolist()
    return [
        (torch.randint(97, (n,), generator=generator).tolist(), [number % 9 != 0 and at > 0 for at in range(n)])
        for number, n in enumerate(lengths)
    ]


def batches(cells: list[list[int]]) -> list[tuple[PackedRows, Draw]]:
    every = documents()
    return [(pack_documents([every[number] for number in cell]), Draw(number)) for number, cell in enumerate(cells)]


def gradients(
    cells: list[list[int]],
    pool: Literal["micro_batch", "step"],
    depths: int,
    options: dict[str, Any],
    group: Collectives = LOCAL,
) -> Tensor:
    """Of all parameters, of the summed loss of all micro-batches, in fp64."""
    objective = ObjectiveConfig(pool=pool, decider_weight=1.0, **options)
    root = TrainingRoot(tiny_model("tah2", depths), objective, group, checkpointing=True)
    step = batches(cells)
    decided = decide_step(root, step, objective, group) if pool == "step" else [None] * len(step)
    assert all(parameter.grad is None for parameter in root.parameters())
    for (rows, draw), given in zip(step, decided, strict=True):
        root(*rows, draw=draw, **(given._asdict() if given else {}))[0].backward()
    return torch.cat([parameter.grad.flatten() for parameter in root.parameters()])


def cut_into(forwards: int) -> list[list[int]]:
    return [list(range(number, DOCUMENTS, forwards)) for number in range(forwards)]


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("options", OBJECTIVES)
@pytest.mark.parametrize("depths", [2, 4])
def test_gradients_do_not_depend_on_the_micro_batches(options: str, depths: int) -> None:
    """Accumulation 32x1, 4x8 and 1x32; the last is unpacked, a document a forward."""
    whole = gradients(cut_into(1), "micro_batch", depths, OBJECTIVES[options])
    for forwards in (1, 4, 32):
        assert relative(gradients(cut_into(forwards), "step", depths, OBJECTIVES[options]), whole) < 1e-9
    # the published pool does depend on it, or this test would show nothing
    assert relative(gradients(cut_into(4), "micro_batch", depths, OBJECTIVES[options]), whole) > 1e-4


def rank_cells(rank: int) -> list[list[int]]:
    """Four forwards a rank, of unequal sizes; rank 1 has nothing in one of them."""
    cells = [[[0], [1, 2, 3, 4]], [list(range(5, 15)), []], [[15, 16, 17], [18]], [[19], list(range(20, 32))]]
    return [each[rank] for each in cells]


def find(rank: int) -> dict[str, Tensor]:
    group = ProcessGroup()
    return {str(depths): gradients(rank_cells(rank), "step", depths, {}, group) for depths in (2, 4)}


def test_gradients_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    found = summed_over_two_ranks(find, tmp_path)
    for depths in (2, 4):
        whole = gradients(cut_into(1), "micro_batch", depths, {})
        assert relative(found[str(depths)], whole) < 1e-9


def test_objectives_without_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective\.pool: 'depth_mean' makes no labels"):
        TrainingRoot(tiny_model("ouro", 2), ObjectiveConfig(pool="step"))
