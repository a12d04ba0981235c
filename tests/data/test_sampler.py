"""The order of examples: a pure function, so that restarts and changes of world size cannot disturb it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.data.packing import plan_micro_batches
from fathom.data.sampler import epoch_order, step_examples

SIZES = st.integers(1, 60)
SEEDS = st.integers(-(2**70), 2**70)
GOLDEN = [2, 5, 8, 9, 7, 6, 4, 1, 0, 3, 1, 6]


@given(seed=SEEDS, size=SIZES, per_step=st.integers(1, 70), steps=st.integers(1, 12))
def test_every_epoch_holds_every_example_once(seed: int, size: int, per_step: int, steps: int) -> None:
    """D.2 #21: a step at or across the border of two epochs neither skips nor repeats."""
    line = [example for step in range(steps) for example in step_examples(seed, size, per_step, step)]
    assert len(line) == steps * per_step
    for start in range(0, len(line) - size + 1, size):
        assert sorted(line[start : start + size]) == list(range(size))
    seen = Counter(line)
    assert max(seen.values()) - min(seen.get(number, 0) for number in range(size)) <= 1


@given(
    seed=SEEDS,
    size=SIZES,
    per_step=st.integers(1, 20),
    stops=st.lists(st.integers(0, 20), min_size=3, max_size=6),
)
def test_restarts_do_not_shift_the_data(seed: int, size: int, per_step: int, stops: list[int]) -> None:
    """D.2 #19, #20: three and more restarts, each from a committed step, give the uninterrupted sequence."""
    whole = [step_examples(seed, size, per_step, step) for step in range(21)]
    resumed: list[list[int]] = []
    for stop in [*sorted(stops), 21]:
        epoch_order.cache_clear()  # a new process
        resumed += [step_examples(seed, size, per_step, step) for step in range(len(resumed), stop)]
    assert resumed == whole


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 40), min_size=4, max_size=30), step=st.integers(0, 9))
def test_another_world_size_sees_the_same_step(lengths: list[int], step: int) -> None:
    """D.2 #22: the union over ranks and micro-batches of a step is the step's examples on 1 to 3 ranks."""
    examples = step_examples(7, len(lengths), 8, step)
    for world in (1, 2, 3):
        plan = plan_micro_batches([lengths[example] for example in examples], 64, world)
        union = [examples[index] for batch in plan for rank in batch for index in rank]
        assert sorted(union) == sorted(examples)


def test_seed_and_epoch_change_the_order() -> None:
    orders = {tuple(epoch_order(seed, 50, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_is_fixed_for_ever() -> None:
    """A run resumed after an upgrade must see the same data: these numbers may never change."""
    assert step_examples(42, 10, 12, 0) == GOLDEN


def test_an_order_is_well_mixed() -> None:
    """Each example is in the first half of an epoch half of the time; neighbours do not stick together."""
    orders = [epoch_order(3, 100, epoch) for epoch in range(400)]
    early = Counter(example for order in orders for example in order[:50].tolist())
    assert all(140 < early[example] < 260 for example in range(100))
    together = sum(int((abs(order[1:] - order[:-1]) == 1).sum()) for order in orders)
    assert 0.015 < together / (400 * 99) < 0.025


@pytest.mark.parametrize("wrong", [(0, 0, 1, 0), (0, 1, 0, 0), (0, 1, 1, -1)])
def test_out_of_range_is_an_error(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        step_examples(*wrong)
