"""Documents as packed rows, a forward's worth at a time, for every measure that reads held-out data."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from fathom.errors import DataError
from fathom.model.rows import PackedRows, pack_documents

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM


class Sizes(NamedTuple):
    """Of a measure's forwards.

    Attributes:
        tokens_per_forward: rows of one forward at most (a longer document goes alone).
        head_chunk_rows: rows whose logits exist at once.
    """

    tokens_per_forward: int = 4096
    head_chunk_rows: int = 1024


SIZES = Sizes()


class Documents(Protocol):
    """What is scored: token ids and mask by number (``fathom.data.prepared.Prepared`` is one)."""

    def __len__(self) -> int: ...

    def document(self, number: int, /) -> tuple[list[int], list[bool]]: ...


class Batch(NamedTuple):
    """One forward: rows, and which documents they are, in row order."""

    rows: PackedRows
    documents: list[int]


def batches(documents: Documents, tokens_per_forward: int, limit: int | None = None) -> Iterator[Batch]:
    """Whole documents in order, packed.

    Args:
        documents: what is scored.
        tokens_per_forward: rows of one forward at most (a longer document goes alone).
        limit: the first so many documents only.
    """
    count = len(documents) if limit is None else min(limit, len(documents))
    held: list[tuple[list[int], list[bool]]] = []
    numbers: list[int] = []
    size = 0
    for number in range(count):
        ids, mask = documents.document(number)
        if held and size + len(ids) > tokens_per_forward:
            yield Batch(pack_documents(held, numbers), numbers)
            held, numbers, size = [], [], 0
        held.append((list(ids), list(mask)))
        numbers.append(number)
        size += len(ids)
    if held:
        yield Batch(pack_documents(held, numbers), numbers)


@contextlib.contextmanager
def evaluating(model: "LoopedLM") -> Iterator[torch.device]:
    """Evaluation mode without gradient; the mode is put back afterwards. Gives the model's device."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def nothing_supervised(documents: int) -> DataError:
    """The error for data on which nothing can be measured."""
    return DataError(
        f"held-out data has no supervised token in its {documents} documents",
        "point data.heldout at conversations with answers, or raise data.context_tokens",
    )
