"""What is asked of the engine, and what it tells: plain values that travel between processes."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from the mixture.

    Attributes:
        temperature: 0 takes the most probable token.
        top_p: keep the most probable tokens that together reach this mass.
        seed: keys the noise, together with the choice and the position, so that batch-mates change nothing.
        max_tokens: stop after so many.
        stop: texts that end the answer and are not part of it.
        top_logprobs: alternatives reported per token; None reports no log-probabilities.
        ignore_stop_tokens: generate ``max_tokens`` whatever comes.
        top_k: keep so many of the most probable tokens, and those as probable as the last of them; 0 keeps all.
        min_p: keep tokens at least so probable, relative to the most probable.
        repetition_penalty: multiplies the log-probability of every token of prompt or answer; 1 changes nothing.
        presence_penalty: subtracted from that of every token of the answer.
        frequency_penalty: likewise, once per occurrence.
        logit_bias: added to tokens' log-probabilities: pairs of token id and bias.
        n: answers; the prompt runs once.
        seed_drawn: whether nobody asked for this seed, so that no request to come will have it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    ignore_stop_tokens: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    seed_drawn: bool = False


@dataclass(frozen=True)
class Depth:
    """Depth limits of one request; None takes the model's."""

    tau_exit: float | None = None
    max_depth: int | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        id: unique among living requests.
        prompt: token ids, at least one.
        priority: class; smaller goes first. Waiting makes up for it, so that no class waits for ever.
        tenant: requests of different tenants share no keys and values.
        first_token_s: give up when the first token takes longer, from submission on; waiting for a place included.
        total_s: likewise the whole answer, or all of them.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    depth: Depth = field(default_factory=Depth)
    priority: int = 0
    tenant: str = ""
    first_token_s: float | None = None
    total_s: float | None = None


class Alternative(NamedTuple):
    """A token that could have come, with its log-probability under the mixture."""

    id: int
    text: str
    logprob: float


class Token(NamedTuple):
    """A generated token. The texts of an answer's tokens, joined, are the answer.

    Attributes:
        id: token id.
        text: what it adds to the answer; empty for half a character, whose other half brings the whole.
        depth: how many depths the row ran that predicted it.
        logprob: log-probability under the mixture, before penalties, temperature and what is left out.
        alternatives: the most probable tokens, when asked for.
    """

    id: int
    text: str
    depth: int
    logprob: float
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class DepthUsage:
    """Depths of one answer.

    A row is counted once: the last prompt token's row predicts the first answer token, so it counts with the answer.

    Attributes:
        histogram: how many answer tokens took depth 1, 2, ..., M.
        iterations: rows run for answer tokens, over all depths.
        prompt_iterations: rows run for the prompt tokens before the last.
        prompt_tokens: prompt tokens, the last included.
        cached_tokens: those of them whose rows did not run, as another request had left their keys and values; they
            are counted above as if they had.
    """

    histogram: tuple[int, ...]
    iterations: int
    prompt_iterations: int
    prompt_tokens: int
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Answer tokens."""
        return sum(self.histogram)

    @property
    def mean(self) -> float | None:
        """Mean depth of the answer tokens."""
        return self.iterations / self.tokens if self.tokens else None

    @property
    def prompt_mean(self) -> float | None:
        """Mean depth of the prompt tokens before the last; None for a prompt of one token."""
        return self.prompt_iterations / (self.prompt_tokens - 1) if self.prompt_tokens > 1 else None


class Accepted(NamedTuple):
    """The request is queued; first event of every one that is not refused."""

    prompt_tokens: int


class Progress(NamedTuple):
    """Tokens whose text is settled.

    Attributes:
        tokens: in order.
        choice: which of the request's n answers they belong to, from 0.
    """

    tokens: list[Token]
    choice: int = 0


class Finished(NamedTuple):
    """The last event of an answer.

    Attributes:
        reason: ``stop`` or ``length``.
        usage: of this answer.
        choice: which of the request's n answers has ended.
        left: how many of them are still being written; the request's last event has 0.
    """

    reason: str
    usage: DepthUsage
    choice: int = 0
    left: int = 0


class Failed(NamedTuple):
    """The last event of a request that got no answer.

    Attributes:
        status: HTTP status: 400 (the request), 500 (a defect), 503 (full), 504 (a deadline has passed).
        message: what was wrong.
        param: the request field at fault.
        code: machine-readable word.
        retry_after_s: for 503.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


Event = Accepted | Progress | Finished | Failed


def closes(event: Event) -> bool:
    """Whether a request has no further events."""
    return isinstance(event, Failed) or (isinstance(event, Finished) and event.left == 0)


class RequestRefused(Exception):
    """The engine will not take a request; carries the :class:`Failed` to tell."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed
