"""The pages of an engine: who may have how many, and what requests leave to those that come after them."""

import math
from collections.abc import Hashable, Sequence

from fathom.model.looped import LoopedLM
from fathom_serve.engine.flight import Flight
from fathom_serve.engine.forecast import Forecast
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.kv.pool import PagePool
from fathom_serve.kv.prefix import PrefixCache, draws, root_of
from fathom_serve.kv.streams import RequestStreams


class Memory:
    """Pages, and what is known of who needs them.

    Args:
        model: the model.
        limits: the engine's.
        context: tokens of the longest request.
    """

    def __init__(self, model: LoopedLM, limits: EngineLimits, context: int) -> None:
        self.model = model
        self.pool = make_pool(model, limits)
        self.forecast = Forecast()
        self.block = limits.cache_block_tokens or context
        self.cache = PrefixCache(self.pool, self.block) if limits.cache_block_tokens else None

    def streams(self) -> RequestStreams:
        """Of a new request."""
        return RequestStreams(self.pool, self.block)

    def begin(self, flight: Flight) -> None:
        """Let a flight start after the tokens that an earlier request has left."""
        if self.cache is not None:
            blocks = self.cache.find(self._root(flight), flight.ids, flight.terms.max_depth, flight.history)
            flight.adopt(blocks, self.block)

    def keep(self, flight: Flight) -> None:
        """Leave what is settled of a flight to requests to come."""
        if self.cache is None or flight.reading:
            return
        if flight.request.sampling.seed_drawn and draws(self.model):
            # Nobody will come with this seed again, and the blocks would displace those that others find.
            return
        # Where depths depend on what a token is to its request, only prompts are alike.
        alike = flight.prompt_tokens - 1 if self.model.routing.reads_generates else None
        limit = flight.terms.max_depth
        self.cache.keep(self._root(flight), flight.ids, flight.history[:alike], limit, flight.streams)

    def end(self, flight: Flight) -> None:
        """A flight needs its pages no more."""
        self.keep(flight)
        flight.streams.release()

    def expected(self, flight: Flight) -> int:
        """Pages that a flight will hold at its end, as far as one can tell."""
        return max(flight.least, self.forecast.pages(flight.worst))

    def room(self, active: Sequence[Flight]) -> int:
        """Pages for newcomers, beside those that flights are expected to need yet; may be negative."""
        growth = sum(max(0, self.expected(flight) - len(flight.streams.held())) for flight in active)
        return self.pool.free + self.pool.idle - growth

    def fit(self, flight: Flight, rows: int) -> int:
        """How many of a flight's next rows, at most ``rows``, have pages now; kept pages go where none has."""
        while True:
            fit = flight.fits(rows, self.pool.free)
            if fit or self.cache is None or not self.cache.evict():
                return fit

    def check(self, active: Sequence[Flight]) -> None:
        """Books: every page that is not free belongs to a flight or to the prefix cache."""
        kept = self.cache.held() if self.cache is not None else []
        self.pool.check([page for flight in active for page in flight.streams.held()] + kept)

    def _root(self, flight: Flight) -> Hashable:
        asked, terms = flight.request, flight.terms
        return root_of(self.model, asked.tenant, terms.threshold, terms.max_depth, asked.sampling.seed)


def make_pool(model: LoopedLM, limits: EngineLimits) -> PagePool:
    """The page pool of a model: as many pages as the limits say, or as fit in their memory."""
    config, weight = model.config, model.table.embedding
    entry = 2 * config.layers * config.kv_heads * config.head_width * weight.element_size()
    pages = limits.pages or math.floor(limits.kv_memory_mb * 2**20 / (entry * limits.page_rows))
    return PagePool(
        config.layers,
        max(1, pages),
        limits.page_rows,
        config.kv_heads,
        config.head_width,
        weight.dtype,
        weight.device,
    )
