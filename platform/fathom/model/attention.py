"""Attention of rows to the streams of all depths, for training: the graph is kept, depth after depth.

A view is one pass of rows at one depth. Layers call ``attend``; the loop calls ``commit`` after a layer, outside any
checkpointed region, so that recomputation can never store keys twice. A look-ahead view commits nothing.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fathom.model.flex import FlexKernel
from fathom.model.tiled import TiledKernel
from fathom.model.visibility import SAME_DEPTH, SHARED_FIRST, RowMeta


class StreamView(Protocol):
    """What a backbone needs of the streams during one forward."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output ``[rows, heads, w]`` for rotated q of that shape, and k and v ``[rows, kv_heads, w]``."""
        ...

    def commit(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values that these rows made in this layer."""
        ...


class Kernel(Protocol):
    """Attention of one pass, its mask prepared once and shared by all layers."""

    def __call__(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Output ``[rows, heads, w]``; keys and values are those of each earlier stream, then the rows' own."""
        ...


@dataclass
class Stream:
    """Keys and values of one depth, a tensor ``[rows, kv_heads, w]`` per layer that ran."""

    meta: RowMeta
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class TrainingStreams:
    """One stream per executed depth, level-synchronous."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.streams: list[Stream] = []

    def view(self, rows: RowMeta) -> "TrainingView":
        """The next depth of the main pass; its keys become a new stream."""
        own = Stream(rows)
        # What no row of this depth sees need not be looked at: the mask would only rule it out.
        earlier = {SAME_DEPTH: [], SHARED_FIRST: self.streams[:1]}.get(self.rule, list(self.streams))
        view = TrainingView(self.rule, rows, earlier, own)
        self.streams.append(own)
        return view

    def settle(self, goes_on: Tensor) -> None:
        """Which rows (bool ``[rows]``) of the newest stream go on: for the others it is their final depth."""
        meta = self.streams[-1].meta
        self.streams[-1].meta = meta._replace(last=torch.where(goes_on, meta.last, meta.depth))

    def lookahead_view(self, rows: RowMeta, depth: int) -> "TrainingView":
        """Rows that would run ``depth`` if they alone had continued: they see all committed streams up to ``depth``,
        and of each other nothing (methods 1.2, the look-ahead rule)."""
        return TrainingView(self.rule, rows, self.streams[:depth], None)


class TrainingView:
    """One pass of rows of one depth over the streams of the depths before; ``own`` is None in a look-ahead."""

    def __init__(self, rule: str, rows: RowMeta, earlier: list[Stream], own: Stream | None) -> None:
        self.earlier = earlier
        self.own = own
        metas = [stream.meta for stream in earlier]
        make = FlexKernel if rows.sequence.device.type == "cuda" else TiledKernel
        self.kernel: Kernel = make(rule, rows, metas, isolated=own is None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = [*(stream.keys[layer] for stream in self.earlier), k]
        values = [*(stream.values[layer] for stream in self.earlier), v]
        return self.kernel(q, keys, values)

    def commit(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self.own is not None:
            self.own.keys[layer] = k
            self.own.values[layer] = v
