"""Rows: the only shape there is. A row is one token at one depth; nothing has a batch or padding dimension."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PackedRows(NamedTuple):
    """Whole documents laid end to end: the depth-1 rows of one forward.

    All tensors are ``[rows]``, sorted by (sequence, position); rows of different sequences never see
    each other. May be empty (a rank without data).

    Attributes:
        ids: int64, the token at this position.
        positions: int64, its index inside its document; the rotary angle uses it at every depth.
        sequence: int64, which document, non-decreasing.
        targets: int64, the next token (0 where there is none).
        supervised: bool, whether the next token is a training target.
        example: int64, which example of the data set: keys the randomness of a row, wherever it is packed.
        oracle: int64, the depth that the data asks this row to run (methods 2.3), 0 where it asks for none.
    """

    ids: Tensor
    positions: Tensor
    sequence: Tensor
    targets: Tensor
    supervised: Tensor
    example: Tensor
    oracle: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.ids.shape[0]

    def to(self, device: torch.device | str) -> "PackedRows":
        """The same rows on another device."""
        return PackedRows(*(field.to(device) for field in self))


def pack_documents(
    documents: Sequence[tuple[list[int], list[bool]]],
    examples: Sequence[int] | None = None,
    oracles: Sequence[list[int]] | None = None,
) -> PackedRows:
    """Lay documents end to end.

    Args:
        documents: (token ids, mask) pairs; ``mask[i]`` says token i is a training target, so row i-1 is
            supervised. The first token of a document can be nobody's target.
        examples: their numbers in the data set; default their places here.
        oracles: per document the depth asked of each row, if the data says.
    """
    ids: list[int] = []
    positions: list[int] = []
    sequence: list[int] = []
    targets: list[int] = []
    supervised: list[bool] = []
    example: list[int] = []
    oracle: list[int] = []
    for number, (tokens, mask) in enumerate(documents):
        ids += tokens
        positions += range(len(tokens))
        sequence += [number] * len(tokens)
        targets += [*tokens[1:], 0]
        supervised += [*mask[1:], False]
        example += [number if examples is None else examples[number]] * len(tokens)
        oracle += [0] * len(tokens) if oracles is None else oracles[number]

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return PackedRows(
        column(ids),
        column(positions),
        column(sequence),
        column(targets),
        torch.tensor(supervised, dtype=torch.bool),
        column(example),
        column(oracle),
    )
