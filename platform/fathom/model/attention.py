"""Attention of rows to the streams of all depths, for training: the graph is kept, depth after depth.

A view is one pass of rows at one depth. Layers call ``attend``; the loop calls ``commit`` after a layer, outside any
checkpointed region, so that recomputation can never store keys twice. A look-ahead view commits nothing.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.model.visibility import RowMeta, visible

QUERY_TILE = 256


class StreamView(Protocol):
    """What a backbone needs of the streams during one forward."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output ``[rows, heads, w]`` for rotated q of that shape, and k and v ``[rows, kv_heads, w]``."""
        ...

    def commit(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values that these rows made in this layer."""
        ...


@dataclass
class Stream:
    """Keys and values of one depth, a tensor ``[rows, kv_heads, head_width]`` per layer."""

    meta: RowMeta
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class _Tile(NamedTuple):
    """Some queries of one document, and which slice of every stream is that document's."""

    query: slice
    keys: list[slice]
    own: slice


class TrainingStreams:
    """One stream per executed depth, level-synchronous."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.streams: list[Stream] = []

    def view(self, rows: RowMeta) -> "TrainingView":
        """The next depth of the main pass; its keys become a new stream."""
        view = TrainingView(self.rule, rows, list(self.streams), Stream(rows))
        self.streams.append(view.own)
        return view

    def lookahead_view(self, rows: RowMeta, depth: int) -> "TrainingView":
        """Rows that would run ``depth`` if they alone had continued: they see all committed streams up to ``depth``,
        and of each other nothing (methods 1.2, the look-ahead rule)."""
        return TrainingView(self.rule, rows, self.streams[:depth], None)


class TrainingView:
    """One pass of rows of one depth over the streams of the depths before."""

    def __init__(self, rule: str, rows: RowMeta, earlier: list[Stream], own: Stream | None) -> None:
        self.rule = rule
        self.rows = rows
        self.earlier = earlier
        self.stored = own
        self._tiles = _tiles(rows, [stream.meta for stream in earlier])

    @property
    def own(self) -> Stream:
        """The stream this view fills; look-ahead views have none."""
        if self.stored is None:
            raise RuntimeError("a look-ahead view stores no keys")
        return self.stored

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # CPU kernels lose more to bf16 than they gain (backward measured about 7x slower), and fp32 is exact.
        compute = torch.float32 if q.dtype == torch.bfloat16 and q.device.type == "cpu" else q.dtype
        q, k, v = q.to(compute), k.to(compute), v.to(compute)
        earlier = [(s.keys[layer].to(compute), s.values[layer].to(compute)) for s in self.earlier]
        return torch.cat([self._tile(tile, q, k, v, earlier) for tile in self._tiles])

    def commit(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self.stored is not None:
            self.stored.keys.append(k)
            self.stored.values.append(v)

    def _tile(
        self,
        tile: _Tile,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        earlier: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        query = q[tile.query]
        keys = torch.cat(
            [
                *(past[part] for (past, _), part in zip(earlier, tile.keys, strict=True)),
                k[tile.own],
            ]
        )
        values = torch.cat(
            [
                *(past[part] for (_, past), part in zip(earlier, tile.keys, strict=True)),
                v[tile.own],
            ]
        )
        whole = not earlier and self.stored is not None and query.shape[0] == keys.shape[0]
        mask = None if whole else self._mask(tile)
        groups = query.shape[1] // keys.shape[1]
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.repeat_interleave(groups, dim=1).transpose(0, 1)[None],
            values.repeat_interleave(groups, dim=1).transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=whole,
        )
        return out[0].transpose(0, 1)

    def _mask(self, tile: _Tile) -> Tensor:
        """Bool ``[tile rows, keys of one document]``; made per tile, never for a batch."""
        query = _cut(self.rows, tile.query)
        parts = [visible(self.rule, query, _cut(s.meta, part)) for s, part in zip(self.earlier, tile.keys, strict=True)]
        own = _cut(self.rows, tile.own)
        seen = visible(self.rule, query, own)
        if self.stored is None:
            seen = seen & (query.position[:, None] == own.position[None, :])
        return torch.cat([*parts, seen], dim=1)


def _cut(meta: RowMeta, part: slice) -> RowMeta:
    return RowMeta(meta.sequence[part], meta.position[part], meta.depth[part])


def _ranges(sequence: Tensor, wanted: Tensor) -> list[slice]:
    """Where each wanted sequence lies in a sorted sequence column."""
    starts = torch.searchsorted(sequence, wanted).tolist()
    ends = torch.searchsorted(sequence, wanted, right=True).tolist()
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)]


def _tiles(rows: RowMeta, streams: list[RowMeta]) -> list[_Tile]:
    """Query tiles in row order, so that concatenating their outputs restores the rows."""
    documents = torch.unique_consecutive(rows.sequence)
    own = _ranges(rows.sequence, documents)
    columns = [_ranges(stream.sequence.contiguous(), documents) for stream in streams]
    tiles = []
    for number, span in enumerate(own):
        keys = [column[number] for column in columns]
        length = span.stop - span.start
        # Depth 1 has no mask, so one causal call takes the whole document.
        step = QUERY_TILE if streams else length
        for start in range(span.start, span.stop, step):
            stop = min(start + step, span.stop)
            # Keys of this depth after the tile's last query are invisible to it: leave them out.
            tiles.append(_Tile(slice(start, stop), keys, slice(span.start, stop)))
    return tiles
