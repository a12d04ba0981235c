"""One pool of pages for all requests, depths and layers, with books that must balance.

A page holds ``page_rows`` entries of every layer; it has no depth and no owner of its own. Entry ``i`` of page ``p`` is
slot ``p * page_rows + i`` in every layer's tensor.
"""

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
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that streams hold."""
        return len(self._used)

    def take(self) -> int:
        """A free page, now used.

        Raises:
            RuntimeError: none is left. Admission reserves the worst case, so this is a defect, never a reason to
                sample a token early.
        """
        if not self._free:
            raise RuntimeError("no page is free although admission reserved the worst case")
        page = self._free.pop()
        self._used.add(page)
        return page

    def give_back(self, pages: list[int]) -> None:
        """Free pages that :meth:`take` gave.

        Raises:
            RuntimeError: a page is not in use (freed twice).
        """
        for page in pages:
            if page not in self._used:
                raise RuntimeError(f"page {page} is given back but nobody holds it")
            self._used.remove(page)
            self._free.append(page)

    def check(self, held: list[int]) -> None:
        """Books: free + used = total, no page twice, and the streams hold exactly the used pages.

        Args:
            held: the pages of all living streams.

        Raises:
            RuntimeError: the books do not balance.
        """
        distinct = set(self._free)
        whole = self.free + self.used == self.pages and not distinct & self._used and len(distinct) == self.free
        if not whole:
            raise RuntimeError(f"page books: {self.free} free + {self.used} used is not {self.pages} in all")
        if len(held) != self.used or set(held) != self._used:
            raise RuntimeError(f"page books: streams hold {len(held)} pages, the pool counts {self.used} used")
