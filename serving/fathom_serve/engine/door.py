"""What an engine refuses at the door, and what it makes of the rest."""

import math
from typing import NamedTuple

from fathom.model.looped import LoopedLM
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.request import Depth, Failed, Request, RequestRefused, Sampling
from fathom_serve.kv.streams import pages_for

MAX_PRIORITY = 10
# OpenAI's bounds; it has no repetition penalty.
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION = 10.0


class Terms(NamedTuple):
    """What a request got.

    Attributes:
        max_depth: its M.
        threshold: its tau.
        pages: of one answer, if every row that may go deep does.
        answer_pages: of a further answer to the same prompt, likewise.
    """

    max_depth: int
    threshold: float
    pages: int
    answer_pages: int


class Door:
    """Checks requests against a model and the engine's sizes.

    Args:
        model: the model.
        limits: the engine's.
        context: tokens of prompt and answer.
        pages: of the engine's pool.
    """

    def __init__(self, model: LoopedLM, limits: EngineLimits, context: int, pages: int) -> None:
        self.model = model
        self.limits = limits
        self.context = context
        self.pages = pages

    def check(self, request: Request) -> Terms:
        """The terms of a request that can be served.

        Raises:
            RequestRefused: it cannot (400); says why and what to change.
        """
        max_depth, threshold = self._depth(request.depth)
        self._check_length(request)
        self._check_tokens(request.prompt)
        self._check_sampling(request.sampling)
        if abs(request.priority) > MAX_PRIORITY:
            raise refused(
                f"priority is {request.priority}: it must be -{MAX_PRIORITY} to {MAX_PRIORITY}",
                "priority",
                "value_out_of_range",
            )
        pages = self._worst_case(request, max_depth)
        if pages > self.pages:
            raise refused(
                f"the request may need {pages} pages of keys and values, the server has {self.pages}: "
                "shorten the prompt, or lower max_tokens or depth.max_depth",
                "max_tokens",
                "memory_exceeded",
            )
        # Beside its own rows a further answer copies a page that it shares in part, at each depth.
        own = pages_for(request.sampling.max_tokens, self.limits.page_rows) + 1
        return Terms(max_depth, threshold, pages, max_depth * own)

    def _check_length(self, request: Request) -> None:
        length, answer = len(request.prompt), request.sampling.max_tokens
        room = self.context - length
        if not length:
            raise refused("the prompt is empty", "messages", "empty_prompt")
        if room < 1:
            raise refused(
                f"the prompt has {length} tokens; this model takes {self.context} for prompt and answer",
                "messages",
                "context_length_exceeded",
            )
        if answer > room:
            raise refused(
                f"max_tokens {answer} with a prompt of {length} tokens is more than the {self.context} that "
                f"this model takes: ask for at most {room}",
                "max_tokens",
                "context_length_exceeded",
            )

    def _check_tokens(self, prompt: tuple[int, ...]) -> None:
        """An id without an embedding would fail in a forward that others share."""
        vocab = self.model.config.vocab_size
        for position, token in enumerate(prompt):
            if not 0 <= token < vocab:
                raise refused(
                    f"the prompt's token at position {position} is {token}; this model has tokens 0 to {vocab - 1}",
                    "messages",
                    "token_out_of_range",
                )

    def _check_sampling(self, asked: Sampling) -> None:
        vocab, most = self.model.config.vocab_size, self.limits.max_active
        strange = [pair for pair in asked.logit_bias if not (0 <= pair[0] < vocab and abs(pair[1]) <= MAX_BIAS)]
        repetition, penalties = asked.repetition_penalty, f"-{MAX_PENALTY:g} to {MAX_PENALTY:g}"
        rules = (
            ("temperature", asked.temperature, 0 <= asked.temperature < math.inf, "0 or more"),
            ("top_p", asked.top_p, 0 < asked.top_p <= 1, "above 0 and at most 1"),
            ("top_k", asked.top_k, asked.top_k >= 0, "0 (all tokens) or more"),
            ("min_p", asked.min_p, 0 <= asked.min_p <= 1, "0 to 1"),
            ("max_tokens", asked.max_tokens, asked.max_tokens >= 1, "1 or more"),
            ("seed", asked.seed, -(1 << 63) <= asked.seed < 1 << 63, "a signed 64-bit integer"),
            ("repetition_penalty", repetition, 0 < repetition <= MAX_REPETITION, f"above 0 to {MAX_REPETITION:g}"),
            ("presence_penalty", asked.presence_penalty, abs(asked.presence_penalty) <= MAX_PENALTY, penalties),
            ("frequency_penalty", asked.frequency_penalty, abs(asked.frequency_penalty) <= MAX_PENALTY, penalties),
            ("top_logprobs", asked.top_logprobs, 0 <= (asked.top_logprobs or 0) <= vocab, f"0 to {vocab}"),
            ("logit_bias", strange[:1], not strange, f"-{MAX_BIAS:g} to {MAX_BIAS:g} for token ids 0 to {vocab - 1}"),
            ("n", asked.n, 1 <= asked.n <= most, f"1 to {most}, the answers that this server writes at once"),
        )
        for name, value, fine, allowed in rules:
            if not fine:
                raise refused(f"{name} is {value}: it must be {allowed}", name, "value_out_of_range")

    def _depth(self, asked: Depth) -> tuple[int, float]:
        method = self.model.method
        if asked.max_depth is not None and not 1 <= asked.max_depth <= method.max_depth:
            raise refused(
                f"depth.max_depth is {asked.max_depth}; this model has depths 1 to {method.max_depth}",
                "depth.max_depth",
                "depth_out_of_range",
            )
        if asked.tau_exit is not None and not self.model.routing.dial:
            raise refused(
                f"depth.tau_exit: method {method.name!r} has no threshold to set, its exit rule is {method.routing!r}",
                "depth.tau_exit",
                "unsupported_parameter",
            )
        threshold = method.threshold if asked.tau_exit is None else asked.tau_exit
        return asked.max_depth or method.max_depth, threshold

    def _worst_case(self, request: Request, max_depth: int) -> int:
        """Pages if every row that may go deep does. The last token of an answer never runs."""
        positions = len(request.prompt) + request.sampling.max_tokens - 1
        rows = self.limits.page_rows
        whole = pages_for(positions, rows)
        if self.model.method.routing != "generating_rows":
            return whole * max_depth
        # They begin within a block, at whose end a page is closed.
        return whole + (max_depth - 1) * min(whole, pages_for(request.sampling.max_tokens, rows) + 1)


def refused(message: str, param: str, code: str) -> RequestRefused:
    """A 400 that names the field at fault."""
    return RequestRefused(Failed(400, message, param, code))
