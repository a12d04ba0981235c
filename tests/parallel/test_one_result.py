"""One result, many ways, in one process: however a step is cut, packed and recomputed, and as FSDP2 of one rank.

Two ranks of FSDP2 and ZeRO have theirs in test_strategies.py, against the same reference.
"""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fathom.model.collectives import Collectives, ProcessGroup
from fathom.parallel.strategy import create_strategy
from support import one_result as one


@pytest.mark.parametrize(
    ("forwards", "checkpointing"), [(1, True), (4, False), (4, True), (32, True)], ids=["1r", "4", "4r", "32r"]
)
@pytest.mark.parametrize("name", one.METHODS)
def test_accumulation_packing_and_recomputing_change_nothing(name: str, forwards: int, checkpointing: bool) -> None:
    """32 documents in one forward, eight in each of four, and one in each of 32, which are not packed; r: layers are
    computed again in the backward."""
    cells = one.cut_into(forwards)
    found = one.train(one.wrap_single, name, cells, cells, checkpointing=checkpointing)
    assert one.agree(found, one.reference(name)), one.apart(found, one.reference(name))


@pytest.mark.parametrize("name", one.METHODS)
def test_a_document_less_would_be_seen(name: str) -> None:
    """The bounds mean something: one of 32 left out is far outside of each."""
    short = [one.whole()[0][1:]]
    distances = one.apart(one.train(one.wrap_single, name, short, short), one.reference(name))
    assert all(distance > 100 * one.BOUNDS[what] for what, distance in distances.items()), distances


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[Collectives]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ProcessGroup()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", one.METHODS)
def test_fsdp_of_one_rank_is_the_single_strategy(name: str, group_of_one: Collectives) -> None:
    cells = one.cut_into(4)

    def wrap(root: one.TrainingRoot) -> one.Strategy:
        return create_strategy("fsdp", root, one.OPTIMIZER, list(root.model.backbone.layers), group_of_one)

    found = one.train(wrap, name, cells, cells, group_of_one, checkpointing=True)
    assert one.agree(found, one.reference(name)), one.apart(found, one.reference(name))
