"""Examples of several sources in given shares: as for one source, a pure function of (seed, epoch, cursor)."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fathom.data.sampler import epoch_order
from fathom.errors import DataError


def epoch_draws(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """How many draws of an epoch each source gets; an epoch has as many draws as there are examples in all.

    Shares are met as well as whole numbers allow (largest remainders); with weights like the sizes every example is
    drawn once per epoch.

    Args:
        sizes: examples of each source.
        weights: relative, positive.

    Raises:
        DataError: a source's share is less than one draw of an epoch.
    """
    total = sum(sizes)
    exact = [total * weight / sum(weights) for weight in weights]
    draws = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: (draws[source] - exact[source], source))
    for source in by_remainder[: total - sum(draws)]:
        draws[source] += 1
    if 0 in draws:
        raise DataError(
            f"data.train: source {draws.index(0) + 1} is never drawn: its share of {total} draws is less than one",
            "raise its weight or remove it",
        )
    return draws


def mixed_examples(
    seed: int, sizes: Sequence[int], weights: Sequence[float], examples_per_step: int, step: int
) -> list[int]:
    """The examples of one optimizer step.

    Each source is an endless line of its own epochs (:func:`fathom.data.sampler.epoch_order`); which source a draw
    takes from is a permutation of the epoch's draws. Both follow from the cursor, so a resumed run asks for its step
    again, on any number of workers. One source alone is drawn exactly as without a mixture.

    Args:
        seed: of the run.
        sizes: examples of each source, which are numbered through.
        weights: relative shares of draws.
        examples_per_step: at least 1.
        step: counted from 0.

    Returns:
        Example numbers in 0..sum(sizes)-1, ``examples_per_step`` of them.
    """
    draws = tuple(epoch_draws(sizes, weights))
    starts = np.cumsum([0, *sizes])
    chosen: list[int] = []
    for cursor in range(step * examples_per_step, (step + 1) * examples_per_step):
        epoch, place = divmod(cursor, sum(draws))
        sources, turns = _epoch_turns(seed, draws, epoch)
        source = int(sources[place])
        own_epoch, own_place = divmod(epoch * draws[source] + int(turns[place]), sizes[source])
        order = epoch_order(seed + source, sizes[source], own_epoch)
        chosen.append(int(starts[source]) + int(order[own_place]))
    return chosen


@lru_cache(maxsize=2)
def _epoch_turns(seed: int, draws: tuple[int, ...], epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Per draw of an epoch: its source, and which draw of that source's it is; int64 ``[sum(draws)]`` each."""
    order = epoch_order(~seed, sum(draws), epoch)  # another key than that of any source's own order
    sources = np.searchsorted(np.cumsum(draws), order, side="right")
    turns = np.empty_like(sources)
    for source in range(len(draws)):
        turns[sources == source] = np.arange(draws[source])
    return sources, turns
