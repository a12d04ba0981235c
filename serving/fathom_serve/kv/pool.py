"""One pool of pages for all requests, depths and layers, with books that must balance.

A page holds ``page_rows`` entries of every layer; it has no depth of its own, and several streams may hold it as long
as none of them writes to it. It is free, used by requests, or idle: kept only for requests to come. Entry ``i`` of page
``p`` is slot ``p * page_rows + i`` in every layer's tensor.
"""

from collections import Counter

import torch
from torch import Tensor


class PagePool:
    """Pages of keys and values.

    Args:
        layers: layers of the backbone.
        pages: how many pages there are.
        page_rows: entries per page.
        kv_heads: key/value heads.
        head_width: width of a head.
        dtype: of keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_rows: int,
        kv_heads: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pages = pages
        self.page_rows = page_rows
        shape = (layers, pages * page_rows, kv_heads, head_width)
        self.keys: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.values: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        # Of the holders, those that keep the page for requests to come.
        self._keepers = [0] * pages
        self.idle = 0

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.pages - len(self._free) - self.idle

    def take(self) -> int:
        """A free page, now held once.

        Raises:
            RuntimeError: none is left. Whoever plans a tick makes room first, so this is a defect, never a reason to
                sample a token early.
        """
        if not self._free:
            raise RuntimeError("no page is free although the plan made room")
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, pages: list[int]) -> None:
        """One more holder for pages that somebody holds.

        Raises:
            RuntimeError: a page is free.
        """
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is shared but nobody holds it")
            self.idle -= self.is_idle(page)
            self._holders[page] += 1

    def shared(self, page: int) -> bool:
        """Whether more than one holds it, so that nobody may write to it."""
        return self._holders[page] > 1

    def give_back(self, pages: list[int]) -> None:
        """One holder less; a page without holders is free.

        Raises:
            RuntimeError: nobody holds a page (freed twice).
        """
        for page in pages:
            if not self._holders[page]:
                raise RuntimeError(f"page {page} is given back but nobody holds it")
            self._holders[page] -= 1
            self.idle += self.is_idle(page)
            if not self._holders[page]:
                self._free.append(page)

    def keep(self, pages: list[int]) -> None:
        """Hold pages of a request beyond its end."""
        self.share(pages)
        for page in pages:
            self._keepers[page] += 1

    def drop(self, pages: list[int]) -> None:
        """Undo :meth:`keep`."""
        for page in pages:
            self.idle -= self.is_idle(page)
            self._keepers[page] -= 1
            self.give_back([page])

    def is_idle(self, page: int) -> bool:
        """Whether all that hold it keep it for requests to come."""
        return 0 < self._holders[page] == self._keepers[page]

    def copy(self, source: int, target: int) -> None:
        """All entries of one page into another."""
        rows = self.page_rows
        for entries in (self.keys, self.values):
            entries[:, target * rows : (target + 1) * rows] = entries[:, source * rows : (source + 1) * rows]

    def check(self, held: list[int]) -> None:
        """Books: every page is either free or held exactly by those who say so.

        Args:
            held: the pages of all living holders, once per holder.

        Raises:
            RuntimeError: the books do not balance.
        """
        free = set(self._free)
        if len(free) != self.free or any(bool(self._holders[page]) == (page in free) for page in range(self.pages)):
            raise RuntimeError(f"page books: {self.free} free pages and {self.pages} in all do not fit who holds them")
        counted = {page: count for page, count in enumerate(self._holders) if count}
        if Counter(held) != counted:
            raise RuntimeError(f"page books: {len(held)} pages are held, the pool counts {sum(counted.values())}")
        if self.idle != sum(self.is_idle(page) for page in range(self.pages)):
            raise RuntimeError(f"page books: {self.idle} pages are not the idle ones")
