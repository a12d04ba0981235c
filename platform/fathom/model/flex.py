"""GPU attention: one flex-attention block mask per depth, shared by all layers, rows padded to whole blocks."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fathom.model.visibility import RowMeta, sees, sees_alone

BLOCK = 128
PADDED_QUERY, PADDED_KEY = -2, -3
"""Sequence numbers of padding: unequal, so that padding neither sees nor is seen."""


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


class FlexKernel:
    """Attention of one pass; arguments as for :class:`fathom.model.tiled.TiledKernel`."""

    def __init__(self, rule: str, rows: RowMeta, earlier: list[RowMeta], isolated: bool) -> None:
        device = rows.sequence.device
        own_from = sum(meta.sequence.shape[0] for meta in earlier)
        query = _padded(rows, PADDED_QUERY)
        key = _padded(RowMeta(*(torch.cat(fields) for fields in zip(*earlier, rows, strict=True))), PADDED_KEY)

        def mask(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            asked, offered = query.at(q), key.at(k)
            return sees_alone(rule, asked, offered, k >= own_from) if isolated else sees(rule, asked, offered)

        self.rows = rows.sequence.shape[0]
        self.mask = create_block_mask(
            mask, None, None, query.sequence.shape[0], key.sequence.shape[0], device=str(device), BLOCK_SIZE=BLOCK
        )
        # Uncompiled it computes the same densely: how the mask is tested where there is no GPU.
        self.attention = _compiled() if device.type == "cuda" else flex_attention

    def __call__(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        key, value = torch.cat(keys), torch.cat(values)
        q, key, value = (_heads_first(tensor.to(value.dtype)) for tensor in (q, key, value))
        out = self.attention(q, key, value, block_mask=self.mask, enable_gqa=True)
        return out[0, :, : self.rows].transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """``[rows, heads, w]`` to ``[1, heads, padded rows, w]``."""
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % BLOCK)).transpose(0, 1)[None]


def _padded(meta: RowMeta, sequence: int) -> RowMeta:
    missing = -meta.sequence.shape[0] % BLOCK
    return RowMeta(
        F.pad(meta.sequence, (0, missing), value=sequence),
        F.pad(meta.position, (0, missing)),
        F.pad(meta.depth, (0, missing)),
        F.pad(meta.last, (0, missing)),
    )
