"""Per request and depth one append-only list of pages, and which token positions its entries belong to."""

import torch
from torch import Tensor

from fathom_serve.kv.pool import PagePool


class Stream:
    """The keys and values of one request at one depth. Entry i belongs to token ``positions[i]``; positions increase,
    with gaps where tokens stopped earlier."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.positions: list[int] = []

    def append(self, pool: PagePool, positions: list[int]) -> None:
        """Make room for entries of these token positions, in increasing order."""
        if self.positions and positions and positions[0] <= self.positions[-1]:
            raise RuntimeError(f"position {positions[0]} after {self.positions[-1]}: a stream is append-only")
        self.positions += positions
        while len(self.pages) * pool.page_rows < len(self.positions):
            self.pages.append(pool.take())

    def slots(self, pool: PagePool) -> Tensor:
        """Slot numbers int64 ``[entries]`` of all entries, in order."""
        pages = torch.tensor(self.pages, dtype=torch.int64)
        grid = pages[:, None] * pool.page_rows + torch.arange(pool.page_rows)[None, :]
        return grid.reshape(-1)[: len(self.positions)]


class RequestStreams:
    """The streams of one request, depth 1 first; deeper ones appear when a token first runs there."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.by_depth: list[Stream] = []

    def append(self, depth: int, positions: list[int]) -> None:
        """Make room at ``depth`` (1-based) for entries of these positions."""
        while len(self.by_depth) < depth:
            self.by_depth.append(Stream())
        self.by_depth[depth - 1].append(self.pool, positions)

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
