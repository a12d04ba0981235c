"""Packing: every example once, never cut, never over capacity, the same number of forwards on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.data.packing import micro_batch_rows, plan_micro_batches
from fathom.errors import DataError


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int, int]:
    capacity = draw(st.integers(1, 200))
    lengths = draw(st.lists(st.integers(1, capacity) | st.just(capacity), max_size=60))
    return lengths, capacity, draw(st.integers(1, 5))


@given(steps())
def test_conservation_capacity_and_equal_counts(step: tuple[list[int], int, int]) -> None:
    """D.2 #13, #14, and every rank runs the same number of forwards."""
    lengths, capacity, world = step
    plan = plan_micro_batches(lengths, capacity, world)
    cells = [cell for batch in plan for cell in batch]
    assert sorted(index for cell in cells for index in cell) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in cell) <= capacity for cell in cells)
    assert all(len(batch) == world for batch in plan)
    assert plan == plan_micro_batches(list(lengths), capacity, world)


@given(steps())
def test_utilisation(step: tuple[list[int], int, int]) -> None:
    """Never more than twice the forwards that the tokens need at best (and one)."""
    lengths, capacity, world = step
    fewest = -(-sum(lengths) // (capacity * world))
    assert len(plan_micro_batches(lengths, capacity, world)) <= 2 * fewest + 1


@given(st.lists(st.integers(1, 20), min_size=10, max_size=60), st.integers(1, 4))
def test_ranks_are_balanced(lengths: list[int], world: int) -> None:
    """With room to spare no cell is fuller than another by more than the longest example."""
    plan = plan_micro_batches(lengths, 10_000, world)
    loads = [sum(lengths[index] for index in cell) for batch in plan for cell in batch]
    assert max(loads) - min(loads) <= max(lengths)


def test_examples_of_exactly_the_capacity_fill_their_forward() -> None:
    assert plan_micro_batches([8192] * 4, 8192, 2) == [[[0], [1]], [[2], [3]]]
    assert plan_micro_batches([4096] * 4, 8192, 1) == [[[0, 2]], [[1, 3]]]


def test_fewer_examples_than_ranks_leave_ranks_empty() -> None:
    assert plan_micro_batches([5], 8, 3) == [[[0], [], []]]
    assert plan_micro_batches([], 8, 3) == []


def test_an_example_over_capacity_is_refused_not_cut() -> None:
    with pytest.raises(DataError, match="an example of 9 tokens does not fit in a micro-batch of 8"):
        plan_micro_batches([3, 9], 8, 1)


class Documents:
    """Stands for a prepared data set."""

    documents = (([1, 2, 3], [False, False, True]), ([4, 5], [False, True]), ([6], [False]))

    def document(self, number: int) -> tuple[list[int], list[bool]]:
        return self.documents[number]

    def oracle(self, number: int) -> list[int]:
        """Depths asked of each row."""
        return [number + 1] * len(self.document(number)[0])


def test_rows_of_a_forward_keep_the_mask() -> None:
    """D.2 #4, #12: each document's own positions, and only its supervised tokens as targets."""
    rows = micro_batch_rows(Documents(), [0, 1])  # pyright: ignore[reportArgumentType]
    assert rows.ids.tolist() == [1, 2, 3, 4, 5]
    assert rows.positions.tolist() == [0, 1, 2, 0, 1]
    assert rows.sequence.tolist() == [0, 0, 0, 1, 1]
    assert rows.targets[rows.supervised].tolist() == [3, 5]
    assert rows.example.tolist() == [0, 0, 0, 1, 1] and rows.oracle.tolist() == [1, 1, 1, 2, 2]
    assert micro_batch_rows(Documents(), []).count == 0  # pyright: ignore[reportArgumentType]
