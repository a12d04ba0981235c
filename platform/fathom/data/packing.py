"""Micro-batches: whole conversations packed into the forwards of every rank, never cut."""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom.errors import DataError
from fathom.model.rows import PackedRows, pack_documents

if TYPE_CHECKING:
    from fathom.data.prepared import Prepared


def plan_micro_batches(lengths: Sequence[int], capacity: int, world: int) -> list[list[list[int]]]:
    """Spread a step's examples over micro-batches and ranks.

    Longest first, each onto the least loaded (micro-batch, rank) cell, with the fewest micro-batches for
    which that works. Every rank gets the same number of micro-batches (their forwards hold collectives),
    some perhaps empty.

    Args:
        lengths: tokens of each example of the step.
        capacity: most tokens of one cell.
        world: number of ranks.

    Returns:
        ``[micro_batch][rank]`` lists of indices into ``lengths``, ascending; each index exactly once. The
        same arguments give the same plan everywhere.

    Raises:
        DataError: one example alone is longer than the capacity.
    """
    longest = max(lengths, default=0)
    if longest > capacity:
        raise DataError(
            f"an example of {longest} tokens does not fit in a micro-batch of {capacity}",
            "raise train.micro_batch_tokens or lower data.context_tokens",
        )
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    count = max(-(-sum(lengths) // (capacity * world)), 1 if lengths else 0)
    while (cells := _fill(order, lengths, capacity, count * world)) is None:
        count += 1  # ends: with an example a cell everything fits
    return [[sorted(cells[batch * world + rank]) for rank in range(world)] for batch in range(count)]


def _fill(order: list[int], lengths: Sequence[int], capacity: int, cells: int) -> list[list[int]] | None:
    """Examples of each cell, or None where the least loaded cell has no room for one."""
    filled: list[list[int]] = [[] for _ in range(cells)]
    loads = [(0, cell) for cell in range(cells)]
    for index in order:
        load, cell = loads[0]
        if load + lengths[index] > capacity:
            return None
        filled[cell].append(index)
        heapq.heapreplace(loads, (load + lengths[index], cell))
    return filled


def micro_batch_rows(prepared: "Prepared", examples: Sequence[int]) -> PackedRows:
    """The rows of one forward: these examples of a prepared data set end to end. May be none."""
    documents = [prepared.document(example) for example in examples]
    return pack_documents(documents, examples, [prepared.oracle(example) for example in examples])
