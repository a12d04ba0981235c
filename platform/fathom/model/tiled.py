"""CPU attention: one document at a time, query tiles against the document's keys of every stream."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.model.visibility import RowMeta, visible

QUERY_TILE = 256


class _Tile(NamedTuple):
    """Some queries of one document, and which slice of every stream (the own one last) is that document's."""

    query: slice
    keys: list[slice]


class TiledKernel:
    """Attention of one pass.

    Args:
        rule: of visibility.
        rows: the queries, sorted by (sequence, position).
        earlier: keys of the streams before, each sorted likewise.
        isolated: rows see of their own pass only themselves.
    """

    def __init__(self, rule: str, rows: RowMeta, earlier: list[RowMeta], isolated: bool) -> None:
        self.rule = rule
        self.rows = rows
        self.columns = [*earlier, rows]
        self.isolated = isolated
        self.tiles = _tiles(rows, earlier)

    def __call__(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        # CPU kernels lose more to bf16 than they gain (backward measured about 7x slower), and fp32 is exact.
        compute = torch.float32 if q.dtype == torch.bfloat16 else q.dtype
        groups = q.shape[1] // keys[-1].shape[1]
        q = q.to(compute)
        keys = [key.to(compute).repeat_interleave(groups, dim=1) for key in keys]
        values = [value.to(compute).repeat_interleave(groups, dim=1) for value in values]
        return torch.cat([self._attend(tile, q, keys, values) for tile in self.tiles])

    def _attend(self, tile: _Tile, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        # Depth 1 of a whole document is plain causal attention, which needs no mask.
        causal = len(keys) == 1 and tile.query == tile.keys[0] and not self.isolated
        key = torch.cat([part[where] for part, where in zip(keys, tile.keys, strict=True)])
        value = torch.cat([part[where] for part, where in zip(values, tile.keys, strict=True)])
        out = F.scaled_dot_product_attention(
            q[tile.query].transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=None if causal else self._mask(tile),
            is_causal=causal,
        )
        return out[0].transpose(0, 1)

    def _mask(self, tile: _Tile) -> Tensor:
        """Bool ``[tile rows, keys of one document]``; made per tile, never for a batch."""
        query = _cut(self.rows, tile.query)
        columns = [_cut(column, where) for column, where in zip(self.columns, tile.keys, strict=True)]
        parts = [visible(self.rule, query, column) for column in columns]
        if self.isolated:
            parts[-1] = parts[-1] & (query.position[:, None] == columns[-1].position[None, :])
        return torch.cat(parts, dim=1)


def _cut(meta: RowMeta, part: slice) -> RowMeta:
    return RowMeta(meta.sequence[part], meta.position[part], meta.depth[part])


def _ranges(sequence: Tensor, wanted: Tensor) -> list[slice]:
    """Where each wanted sequence lies in a sorted sequence column."""
    starts = torch.searchsorted(sequence, wanted).tolist()
    ends = torch.searchsorted(sequence, wanted, right=True).tolist()
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)]


def _tiles(rows: RowMeta, earlier: list[RowMeta]) -> list[_Tile]:
    """Query tiles in row order, so that concatenating their outputs restores the rows."""
    documents = torch.unique_consecutive(rows.sequence)
    own = _ranges(rows.sequence, documents)
    columns = [_ranges(stream.sequence.contiguous(), documents) for stream in earlier]
    tiles = []
    for number, span in enumerate(own):
        # Depth 1 has no mask, so one causal call takes the whole document.
        step = QUERY_TILE if earlier else span.stop - span.start
        for start in range(span.start, span.stop, step):
            stop = min(start + step, span.stop)
            # Keys of this depth after the tile's last query are invisible to it: leave them out.
            keys = [*(column[number] for column in columns), slice(span.start, stop)]
            tiles.append(_Tile(slice(start, stop), keys))
    return tiles
