"""Which examples a step trains on: a pure function of (seed, size, step), alike on any number of workers."""

from functools import lru_cache

import numpy as np

MASK = (1 << 64) - 1


def step_examples(seed: int, size: int, examples_per_step: int, step: int) -> list[int]:
    """The examples of one optimizer step.

    Epochs are permutations laid end to end and a step is a slice of that line, so a step may straddle two
    epochs and every example comes exactly once per epoch. There is no state: a resumed run asks for its step
    again.

    Args:
        seed: of the run.
        size: number of examples in the data set, at least 1.
        examples_per_step: at least 1.
        step: counted from 0.

    Returns:
        Example numbers in 0..size-1, ``examples_per_step`` of them.
    """
    if size < 1 or examples_per_step < 1 or step < 0:
        raise ValueError(f"size {size}, examples_per_step {examples_per_step}, step {step}: out of range")
    cursor = step * examples_per_step
    stop = cursor + examples_per_step
    chosen: list[int] = []
    while cursor < stop:
        epoch, start = divmod(cursor, size)
        taken = epoch_order(seed, size, epoch)[start : start + stop - cursor]
        chosen += taken.tolist()
        cursor += len(taken)
    return chosen


@lru_cache(maxsize=16)  # of every source of a mixture an epoch or two
def epoch_order(seed: int, size: int, epoch: int) -> np.ndarray:
    """The permutation of one epoch, int64 ``[size]``.

    Examples are sorted by a keyed hash rather than shuffled by a library's generator, whose stream may change
    between versions: a run resumed after an upgrade must see the same order.
    """
    key = _mix(_mix(seed & MASK) ^ (epoch & MASK))
    with np.errstate(over="ignore"):
        values = np.arange(size, dtype=np.uint64) + np.uint64(key)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values ^= values >> np.uint64(31)
    order = np.argsort(values, kind="stable")  # the hash is a bijection: no ties
    order.flags.writeable = False
    return order


def _mix(value: int) -> int:
    """splitmix64 of one number."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
