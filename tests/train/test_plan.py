"""A step holds the same conversations on any number of ranks, each exactly once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fathom.train.plan import plan_step
from support.runs import tiny_recipe


class Documents:
    """Lengths and counts are all that a plan looks at."""

    lengths = np.random.default_rng(0).integers(20, 200, size=23)
    supervised_counts = lengths // 3

    def __len__(self) -> int:
        return len(self.lengths)


DOCUMENTS: Any = Documents()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_a_step_without_loss_or_repetition(tmp_path: Path, world: int) -> None:
    cfg = tiny_recipe(tmp_path, train__examples_per_step=7, train__micro_batch_tokens=600)
    for step in range(8):  # crosses two epochs of 23
        alone = plan_step(cfg, DOCUMENTS, step, 0, 1)
        plans = [plan_step(cfg, DOCUMENTS, step, rank, world) for rank in range(world)]
        shared = sorted(example for plan in plans for batch in plan.micro_batches for example in batch)
        assert shared == sorted(example for batch in alone.micro_batches for example in batch)
        assert len({len(plan.micro_batches) for plan in plans}) == 1
        assert {(plan.tokens, plan.supervised) for plan in plans} == {(alone.tokens, alone.supervised)}
        assert alone.supervised == sum(Documents.supervised_counts[shared])


def test_every_conversation_comes_once_per_epoch(tmp_path: Path) -> None:
    cfg = tiny_recipe(tmp_path, train__examples_per_step=23, train__micro_batch_tokens=600)
    for step in range(3):
        batches = plan_step(cfg, DOCUMENTS, step, 0, 1).micro_batches
        assert sorted(example for batch in batches for example in batch) == list(range(23))
