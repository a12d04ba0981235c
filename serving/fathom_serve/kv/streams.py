"""Per request and depth one append-only list of pages, and which token positions its entries belong to.

Pages are closed at the borders of blocks of positions, at every depth: what a block of tokens has left, deep keys
included, is whole pages, which another request can take over (:mod:`fathom_serve.kv.prefix`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fathom_serve.kv.pool import PagePool


class Stream:
    """The keys and values of one request at one depth. Entry i belongs to token ``positions[i]``; positions increase,
    with gaps where tokens stopped earlier.

    Args:
        pool: where the pages come from.
        block: positions of a block.
    """

    def __init__(self, pool: PagePool, block: int) -> None:
        self.pool = pool
        self.block = block
        self.pages: list[int] = []
        self.count = 0
        # Free entries of the last page, and the block that they are for.
        self._room, self._open = 0, 0
        # Positions and slots; grows by doubling, so that a tick's work does not grow with the context.
        self._entries = torch.empty(2, pool.page_rows, dtype=torch.int64)

    @property
    def positions(self) -> Tensor:
        """Token positions int64 ``[entries]``."""
        return self._entries[0, : self.count]

    @property
    def slots(self) -> Tensor:
        """Slot numbers int64 ``[entries]``."""
        return self._entries[1, : self.count]

    def append(self, positions: list[int]) -> None:
        """Make room for entries of these token positions, in increasing order."""
        if self.count and positions and positions[0] <= int(self.positions[-1]):
            raise RuntimeError(f"position {positions[0]} after {int(self.positions[-1])}: a stream is append-only")
        start = 0
        for stop, taken in list(self._stretches(positions)):
            here = positions[start] // self.block
            if taken and self._room and here == self._open:
                self._own_last_page()
            elif taken:
                self.pages.append(self.pool.take())
                self._room, self._open = self.pool.page_rows, here
            self._write(positions[start:stop])
            start = stop

    def adopt(self, pages: list[int], positions: Sequence[int]) -> None:
        """Share the pages of a whole block, which somebody else has filled for these positions."""
        self.pool.share(pages)
        rows = self.pool.page_rows
        for number, page in enumerate(pages):
            self.pages.append(page)
            self._room = rows
            self._write(positions[number * rows : (number + 1) * rows])
        self._room = 0

    def within(self, start: int, stop: int) -> list[int]:
        """The pages of a block's positions ``start`` to ``stop``."""
        first, last = torch.searchsorted(self.positions, torch.tensor([start, stop])).tolist()
        return list(dict.fromkeys((self.slots[first:last] // self.pool.page_rows).tolist()))

    def fits(self, positions: list[int], pages: int) -> int:
        """How many of these positions, from the front, have room with so many new pages."""
        fit = 0
        for stop, taken in self._stretches(positions):
            pages -= taken
            if pages < 0:
                break
            fit = stop
        return fit

    def fork(self) -> "Stream":
        """The same entries for another answer; the pages are shared until one of the two writes to the last."""
        other = Stream(self.pool, self.block)
        self.pool.share(self.pages)
        other.pages, other.count, other._room, other._open = list(self.pages), self.count, self._room, self._open
        other._entries = self._entries.clone()
        return other

    def _stretches(self, positions: list[int]) -> Iterator[tuple[int, bool]]:
        """Where each page's share of these positions ends, and whether that page has to be taken from the pool."""
        start, room, opened = 0, self._room, self._open
        taken = not room or self.pool.shared(self.pages[-1])
        while start < len(positions):
            here = positions[start] // self.block
            if not room or here != opened:
                room, opened, taken = self.pool.page_rows, here, True
            border = bisect_left(positions, (here + 1) * self.block, start)
            stop = min(start + room, border)
            yield stop, taken
            room, taken, start = room - (stop - start), False, stop

    def _own_last_page(self) -> None:
        """Copy on write: the last page has room, but others hold it too."""
        old, new = self.pages[-1], self.pool.take()
        self.pool.copy(old, new)
        self.pool.give_back([old])
        self.pages[-1] = new
        rows = self.pool.page_rows
        self.slots[self.count - (rows - self._room) :] += (new - old) * rows

    def _write(self, positions: Sequence[int]) -> None:
        """Entries on the last page, which has room for them."""
        count, slot = len(positions), (self.pages[-1] + 1) * self.pool.page_rows - self._room
        while self.count + count > self._entries.shape[1]:
            self._entries = torch.cat((self._entries, torch.empty_like(self._entries)), dim=1)
        new = self._entries[:, self.count : self.count + count]
        new[0] = torch.tensor(positions)
        new[1] = torch.arange(slot, slot + count)
        self.count += count
        self._room -= count


class RequestStreams:
    """The streams of one request, depth 1 first; deeper ones appear when a token first runs there."""

    def __init__(self, pool: PagePool, block: int) -> None:
        self.pool = pool
        self.block = block
        self.by_depth: list[Stream] = []

    def append(self, depth: int, positions: list[int]) -> None:
        """Make room at ``depth`` (1-based) for entries of these positions."""
        self._at(depth).append(positions)

    def fits(self, depth: int, positions: list[int], pages: int) -> int:
        """How many of these positions, from the front, have room at ``depth`` with so many new pages."""
        return self._at(depth).fits(positions, pages)

    def adopt(self, pages: Sequence[list[int]], depths: Sequence[int], start: int) -> None:
        """Share a block's pages, by depth; its tokens, from position ``start`` on, ran to these depths."""
        for depth, of_depth in enumerate(pages, start=1):
            positions = [start + number for number, ran in enumerate(depths) if ran >= depth]
            self._at(depth).adopt(of_depth, positions)

    def within(self, start: int, stop: int) -> list[list[int]]:
        """The pages, by depth, of a block's positions ``start`` to ``stop``."""
        return [stream.within(start, stop) for stream in self.by_depth]

    def fork(self) -> "RequestStreams":
        """The same entries for another answer to the same prompt."""
        other = RequestStreams(self.pool, self.block)
        other.by_depth = [stream.fork() for stream in self.by_depth]
        return other

    def _at(self, depth: int) -> Stream:
        while len(self.by_depth) < depth:
            self.by_depth.append(Stream(self.pool, self.block))
        return self.by_depth[depth - 1]

    def held(self) -> list[int]:
        """All pages of this request."""
        return [page for stream in self.by_depth for page in stream.pages]

    def release(self) -> None:
        """Give every page back; the streams are empty afterwards."""
        self.pool.give_back(self.held())
        self.by_depth = []


def pages_for(entries: int, page_rows: int) -> int:
    """Pages that a stream of so many entries takes."""
    return -(-entries // page_rows)
