"""Keys and values of token blocks that requests have in common, at all depths, kept for requests to come.

A block is reached from the one before it and its own token ids, compared in full, so that a chain of blocks spells a
prefix. It holds the pages of *every* depth: a request that found only those of depth 1 would go on without the deep
keys and answer otherwise. What a token's deeper passes are depends on more than the ids, so each chain begins at a root
that names it (:func:`root_of`). A cache belongs to one engine, and so to one model in one dtype.

A token that stopped by itself is the same under every depth limit above; one that the limit stopped is not. Hence a
block that was made under limit M' serves requests of limit M where M <= M', or where no token of it reached M'.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from fathom.model.looped import LoopedLM
from fathom_serve.kv.pool import PagePool
from fathom_serve.kv.streams import RequestStreams

Key = tuple[Hashable, bytes]


@dataclass(eq=False)
class Block:
    """Some consecutive tokens of a prefix.

    Attributes:
        key: how it is reached.
        parent: the block before it.
        depths: how deep each token ran.
        limit: M of the request that made it.
        pages: by depth.
        children: how many blocks follow it.
    """

    key: Key
    parent: "Block | None"
    depths: list[int]
    limit: int
    pages: list[list[int]]
    children: int = 0

    def serves(self, max_depth: int) -> bool:
        """Whether a request with this M would have made the same, up to its M."""
        return max_depth <= self.limit or max(self.depths) < self.limit


class PrefixCache:
    """Blocks of tokens, the least recently used of which goes first.

    Args:
        pool: which the pages belong to.
        block: tokens of a block.
    """

    def __init__(self, pool: PagePool, block: int) -> None:
        self.pool = pool
        self.block = block
        # Oldest first. A chain is touched from its end, so that a block is never older than those that follow it.
        self._blocks: OrderedDict[Key, Block] = OrderedDict()

    def find(self, root: Hashable, ids: Sequence[int], max_depth: int, history: Sequence[int]) -> list[Block]:
        """The longest chain of blocks that begins these ids, without the last of them, which has to run.

        Args:
            root: where the chain begins.
            ids: of a request.
            max_depth: its M.
            history: depths that its tokens are known to have run to; blocks that say otherwise are no use.
        """
        found: list[Block] = []
        for key, start in self._keys(root, ids, len(ids) - 1, found):
            block = self._blocks.get(key)
            if block is None or not block.serves(max_depth):
                break
            known = history[start : start + self.block]
            if known and [min(depth, max_depth) for depth in block.depths] != list(known):
                break
            found.append(block)
        self._touch(found)
        return found

    def keep(
        self, root: Hashable, ids: Sequence[int], depths: Sequence[int], max_depth: int, streams: RequestStreams
    ) -> None:
        """Keep the whole blocks of tokens that have stopped.

        Args:
            root: where the chain begins.
            ids: of a request, at least as many as ``depths``.
            depths: of its tokens that have stopped, from the first.
            max_depth: its M.
            streams: its keys and values.
        """
        blocks: list[Block] = []
        for key, start in self._keys(root, ids, len(depths), blocks):
            stop = start + self.block
            block = self._blocks.get(key)
            if block is None or not block.serves(max_depth):
                ran = list(depths[start:stop])
                pages = streams.within(start, stop)[: max(ran)]
                for of_depth in pages:
                    self.pool.keep(of_depth)
                if block is None:
                    parent = blocks[-1] if blocks else None
                    block = self._blocks[key] = Block(key, parent, ran, max_depth, pages)
                    if parent is not None:
                        parent.children += 1
                else:
                    self._give_up(block)
                    block.depths, block.limit, block.pages = ran, max_depth, pages
            blocks.append(block)
        self._touch(blocks)

    def evict(self) -> bool:
        """Forget the block that was not used for longest, rather one that no request is using now; with nothing gained,
        the next. Whether a page is free now that was not. Where requests hold all that is kept, nothing is forgotten.
        """
        if not self.pool.idle:
            return False
        free = self.pool.free
        while self._blocks and self.pool.free == free:
            leaves = (block for block in self._blocks.values() if not block.children)
            first = next(leaves)
            unused = (block for block in chain((first,), leaves) if self.pool.is_idle(block.pages[0][0]))
            self._forget(next(unused, first))
        return self.pool.free > free

    def clear(self) -> None:
        """Forget everything."""
        while self._blocks:
            self._forget(next(block for block in self._blocks.values() if not block.children))

    def held(self) -> list[int]:
        """All pages of all blocks."""
        return [page for block in self._blocks.values() for pages in block.pages for page in pages]

    def _keys(self, root: Hashable, ids: Sequence[int], count: int, blocks: list[Block]) -> Iterator[tuple[Key, int]]:
        """Key and first position of each whole block among the first ``count`` ids; whoever asks appends to
        ``blocks``, as a key depends on the block before."""
        spelled = array("q", ids)
        for start in range(0, count - self.block + 1, self.block):
            # A block that others follow is never forgotten, so that its id is its own.
            before = id(blocks[-1]) if blocks else root
            yield (before, spelled[start : start + self.block].tobytes()), start

    def _touch(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            self._blocks.move_to_end(block.key)

    def _forget(self, block: Block) -> None:
        del self._blocks[block.key]
        if block.parent is not None:
            block.parent.children -= 1
        self._give_up(block)

    def _give_up(self, block: Block) -> None:
        for pages in block.pages:
            self.pool.drop(pages)


def draws(model: LoopedLM) -> bool:
    """Whether the first state or the decisions are random, so that keys and values depend on the seed."""
    return model.update.draws_state or model.routing.draws


def root_of(model: LoopedLM, tenant: str, threshold: float, max_depth: int, seed: int) -> Hashable:
    """What keys and values depend on beside the token ids: two requests with the same root may share them.

    The tenant is there so that no tenant can tell from the time to a first token what another has asked. Whoever
    submits requests tells tenants apart; an HTTP endpoint has no keys to do so by, and is one tenant. The seed counts
    for methods that draw, and M for methods with a coda, whose keys come from each token's last depth.
    """
    return tenant, threshold, seed if draws(model) else None, max_depth if model.backbone.span.coda else None
