"""CPU attention: one document at a time, query tiles against the document's keys of every stream."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.model.visibility import RowMeta, sees_alone, visible

QUERY_TILE = 256


class _Tile(NamedTuple):
    """Some queries of one document.

    Attributes:
        query: their rows.
        document: the document's number in this pass.
        keys: which rows of every stream (the own one last) are that document's and not after the last query.
    """

    query: slice
    document: int
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
        documents = torch.unique_consecutive(rows.sequence)
        self.documents = [_ranges(column.sequence.contiguous(), documents) for column in self.columns]
        self.tiles = _tiles(self.documents)

    def __call__(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        # CPU kernels lose more to bf16 than they gain (backward measured about 7x slower), and fp32 is exact.
        compute = torch.float32 if q.dtype == torch.bfloat16 else q.dtype
        queries = q.to(compute).split([tile.query.stop - tile.query.start for tile in self.tiles])
        columns = [self._by_document(key.to(compute), number) for number, key in enumerate(keys)]
        contents = [self._by_document(value.to(compute), number) for number, value in enumerate(values)]
        parts = []
        for tile, query in zip(self.tiles, queries, strict=True):
            mask = self._mask(tile)
            key, value = _gather(tile, columns), _gather(tile, contents)
            out = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    def _by_document(self, column: Tensor, number: int) -> list[Tensor]:
        """One stream's keys or values, a tensor per document: split once, because the backward of one slice per
        document would fill a tensor of the whole stream's size for each."""
        sizes, at = [], 0
        for part in self.documents[number]:
            sizes += [part.start - at, part.stop - part.start]
            at = part.stop
        return list(column.split([*sizes, column.shape[0] - at])[1::2])

    def _mask(self, tile: _Tile) -> Tensor | None:
        """Bool ``[tile rows, keys of one document]``, made per tile, never for a batch; None where it would be plain
        causal: depth 1 of a whole document."""
        if len(tile.keys) == 1 and tile.query == tile.keys[0] and not self.isolated:
            return None
        query = self.rows.at(tile.query)
        columns = [column.at(where) for column, where in zip(self.columns, tile.keys, strict=True)]
        if not self.isolated:
            return torch.cat([visible(self.rule, query, column) for column in columns], dim=1)
        key = RowMeta(*(torch.cat(fields)[None, :] for fields in zip(*columns, strict=True)))
        made = torch.arange(key.position.shape[1]) >= key.position.shape[1] - columns[-1].position.shape[0]
        return sees_alone(self.rule, query.at((slice(None), None)), key, made)


def _gather(tile: _Tile, columns: list[list[Tensor]]) -> Tensor:
    """What a tile may see of every stream, ``[keys, kv_heads, w]``."""
    lengths = [where.stop - where.start for where in tile.keys]
    parts = [column[tile.document][:length] for column, length in zip(columns, lengths, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ranges(sequence: Tensor, wanted: Tensor) -> list[slice]:
    """Where each wanted sequence lies in a sorted sequence column."""
    starts = torch.searchsorted(sequence, wanted).tolist()
    ends = torch.searchsorted(sequence, wanted, right=True).tolist()
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)]


def _tiles(documents: list[list[slice]]) -> list[_Tile]:
    """Query tiles in row order, so that concatenating their outputs restores the rows; the own stream is the last."""
    *earlier, own = documents
    tiles = []
    for number, span in enumerate(own):
        # Depth 1 has no mask, so one causal call takes the whole document.
        step = QUERY_TILE if earlier else span.stop - span.start
        for start in range(span.start, span.stop, step):
            stop = min(start + step, span.stop)
            # Keys of this depth after the tile's last query are invisible to it: leave them out.
            tiles.append(_Tile(slice(start, stop), number, [*(s[number] for s in earlier), slice(span.start, stop)]))
    return tiles
