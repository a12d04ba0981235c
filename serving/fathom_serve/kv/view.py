"""What the backbone attends to in one tick: rows of many requests, each over its own streams."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.model.visibility import row_meta, visible
from fathom_serve.kv.pool import PagePool
from fathom_serve.kv.streams import RequestStreams


class Run(NamedTuple):
    """Consecutive rows of a tick that belong to one request and use its stream of one depth, where they have room."""

    streams: RequestStreams
    depth: int
    positions: list[int]


class _Segment(NamedTuple):
    """A run made ready: which rows of the tick, which slots they write and read, and who sees what (None: all)."""

    rows: slice
    own: Tensor
    read: Tensor
    mask: Tensor | None


class PagedStreams:
    """A stream view (``fathom.model.attention.StreamView``) over the page pool.

    Layers run in lockstep for all rows, so a key that a row needs is either in the pool from an earlier tick or made by
    a row of the same run in the same layer; ``attend`` stores the latter first and then reads everything alike.

    Args:
        rule: visibility rule of the method.
        pool: where the pages lie.
        runs: the tick's rows, in order.
    """

    def __init__(self, rule: str, pool: PagePool, runs: list[Run]) -> None:
        self.pool = pool
        self.segments: list[_Segment] = []
        start = 0
        for run in runs:
            stop = start + len(run.positions)
            self.segments.append(_segment(rule, pool, run, slice(start, stop)))
            start = stop
        self._write = torch.cat([segment.own for segment in self.segments]).to(pool.keys.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output ``[rows, heads, head_width]``; see ``StreamView``."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self._write] = k.to(keys.dtype)
        values[self._write] = v.to(values.dtype)
        out = [_attend(q[s.rows], keys[s.read], values[s.read], s.mask) for s in self.segments]
        return torch.cat(out)

    def commit(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Nothing is left to do: nothing is recomputed here, so ``attend`` could store them already."""


def _segment(rule: str, pool: PagePool, run: Run, rows: slice) -> _Segment:
    """Leave out keys that no row of the run sees, and the mask where every row sees all that remain."""
    streams = [stream.positions for stream in run.streams.by_depth[: run.depth]]
    places = torch.tensor(run.positions)
    query = row_meta(torch.zeros_like(places), places, run.depth)
    slots, seen = [], []
    for number, positions in enumerate(streams):
        slots.append(run.streams.by_depth[number].slots)
        key = row_meta(torch.zeros_like(positions), positions, number + 1)
        if number + 1 < run.depth:
            # A token of which no deeper key exists by now stopped here: deeper rows run in order of position.
            went = torch.isin(positions, streams[number + 1])
            key = key._replace(last=torch.where(went, key.last, key.depth))
        seen.append(visible(rule, query, key))
    mask = torch.cat(seen, dim=1)
    useful = mask.any(dim=0)
    read, mask = torch.cat(slots)[useful], mask[:, useful]
    own = slots[-1][torch.searchsorted(streams[-1], places)]
    device = pool.keys.device
    return _Segment(rows, own.to(device), read.to(device), None if bool(mask.all()) else mask.to(device))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped attention of ``[rows, heads, w]`` over ``[keys, kv_heads, w]`` without repeating keys.

    The query heads that share a key head become further queries of it.
    """
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    folded = q.view(rows, kv_heads, groups, width).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * rows, width)
    out = F.scaled_dot_product_attention(
        folded,
        k.to(q.dtype).transpose(0, 1)[None],
        v.to(q.dtype).transpose(0, 1)[None],
        attn_mask=None if mask is None else mask.repeat(groups, 1),
    )
    return out.view(kv_heads, groups, rows, width).permute(2, 0, 1, 3).reshape(rows, heads, width)
