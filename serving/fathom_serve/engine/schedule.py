"""Which rows run in a tick.

Everybody's next rows, of whatever depth, compete for one budget of rows. A policy only picks; it knows nothing of
pages, models or texts, so that a simulation can call it too.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

Order = tuple[int, int, int]
"""Who goes first: (virtual arrival in ticks, number of submission, which of its answers), smaller first."""

PROMPT_SHARE = 4
"""Prompts have at least one row in so many of a tick's budget, when there are any."""


class Ready(Protocol):
    """Someone with rows to run.

    Attributes:
        order: who goes first.
        since: the tick from which it has waited.
    """

    order: Order
    since: int

    @property
    def reading(self) -> bool:
        """Whether it runs positions in bulk: a prompt, or what was known of an answer before it was preempted."""
        ...

    @property
    def begun(self) -> bool:
        """Whether an answer token has run some of its depths and not all."""
        ...

    @property
    def left(self) -> int:
        """Rows that could run now."""
        ...


R = TypeVar("R", bound=Ready)


class Policy(Protocol):
    """Picks who runs how many rows, at most ``rows`` in all."""

    def __call__(self, ready: Sequence[R], rows: int) -> list[tuple[R, int]]:
        """Rows by whom, none of them 0."""
        ...


def order_of(tick: int, priority: int, ageing_ticks: int, number: int) -> Order:
    """The order of a request that arrives now.

    A class lower counts as having arrived ``ageing_ticks`` later: it goes behind requests of the class above that come
    within that time, and before all later ones. So everybody waits for finitely many, and no order ever changes.
    """
    return tick + priority * ageing_ticks, number, 0


def shared(ready: Sequence[R], rows: int) -> list[tuple[R, int]]:
    """Rows of all kinds in one forward, nothing left idle while anyone has rows.

    Answer tokens come first, those that have waited longest before others and begun tokens before new ones; prompts
    have a share of their own and whatever remains, in order. With B answers and R rows, B <= R, an answer token waits
    for at most one tick, and the first prompt gets R / 4 rows in every tick.
    """
    writing = sorted(
        (each for each in ready if not each.reading), key=lambda each: (each.since, not each.begun, each.order)
    )
    reading = sorted((each for each in ready if each.reading), key=lambda each: each.order)
    kept = min(rows // PROMPT_SHARE, sum(each.left for each in reading))
    return _fill([*writing[: rows - kept], *reading], rows)


def published(ready: Sequence[R], rows: int) -> list[tuple[R, int]]:
    """The policy of the engine that was published with TaH2 (specs: a fork of Mini-SGLang), for comparison.

    While any answer token is between two depths only answers run; else prompts alone, and answers when there are none.
    """
    if any(each.begun and not each.reading for each in ready):
        return _in_order([each for each in ready if not each.reading], rows)
    return prefill_first(ready, rows)


def prefill_first(ready: Sequence[R], rows: int) -> list[tuple[R, int]]:
    """Prompts before answers, never both in one forward, for comparison."""
    reading = [each for each in ready if each.reading]
    return _in_order(reading or ready, rows)


def _in_order(ready: Sequence[R], rows: int) -> list[tuple[R, int]]:
    return _fill(sorted(ready, key=lambda each: each.order), rows)


def _fill(line: Sequence[R], rows: int) -> list[tuple[R, int]]:
    """Each in turn as many rows as it has, until the budget is spent."""
    plan = []
    for each in line:
        taken = min(each.left, rows)
        if taken:
            plan.append((each, taken))
        rows -= taken
    return plan


POLICIES: dict[str, Policy] = {"shared": shared, "published": published, "prefill_first": prefill_first}
