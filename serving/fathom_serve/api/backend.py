"""What the HTTP surface needs of an engine, wherever it runs."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fathom_serve.engine.request import Depth, Event


@dataclass(frozen=True)
class Generation:
    """A checked chat request, before its prompt is rendered.

    Attributes:
        messages: role and content, as chat templates expect them.
        max_tokens: None takes the server's default, or what the context leaves.
        seed: None draws one.
        top_logprobs: None reports no log-probabilities.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    top_logprobs: int | None
    depth: Depth


class ModelCard(NamedTuple):
    """The model that is served.

    Attributes:
        name: what requests call it.
        created: when it was loaded, seconds since the epoch.
        method: name of its method.
        max_depth: M.
        threshold: the default tau; None for methods without a decider.
        context: tokens of prompt and answer.
        source: where it came from.
        version: in the registry, if it came from there.
        temperature: default of requests, from the model's generation configuration.
        top_p: likewise.
    """

    name: str
    created: int
    method: str
    max_depth: int
    threshold: float | None
    context: int
    source: str
    version: str | None
    temperature: float
    top_p: float


class Backend(Protocol):
    """An engine."""

    async def card(self) -> ModelCard:
        """The model."""
        ...

    def generate(self, generation: Generation) -> AsyncGenerator[list[Event], None]:
        """Events of one answer; closing the iterator frees what it holds."""
        ...

    async def health(self) -> str | None:
        """None when all is well, else what is wrong."""
        ...
