"""Rows: the only shape there is. A row is one token at one depth; nothing has a batch or padding dimension."""

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
    """

    ids: Tensor
    positions: Tensor
    sequence: Tensor
    targets: Tensor
    supervised: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.ids.shape[0]

    def to(self, device: torch.device | str) -> "PackedRows":
        """The same rows on another device."""
        return PackedRows(*(field.to(device) for field in self))


def pack_documents(documents: list[tuple[list[int], list[bool]]]) -> PackedRows:
    """Lay documents end to end.

    Args:
        documents: (token ids, mask) pairs; ``mask[i]`` says token i is a training target, so row i-1 is
            supervised. The first token of a document can be nobody's target.
    """
    ids: list[int] = []
    positions: list[int] = []
    sequence: list[int] = []
    targets: list[int] = []
    supervised: list[bool] = []
    for number, (tokens, mask) in enumerate(documents):
        ids += tokens
        positions += range(len(tokens))
        sequence += [number] * len(tokens)
        targets += [*tokens[1:], 0]
        supervised += [*mask[1:], False]
    columns = [torch.tensor(values, dtype=torch.int64) for values in (ids, positions, sequence, targets)]
    return PackedRows(columns[0], columns[1], columns[2], columns[3], torch.tensor(supervised, dtype=torch.bool))
