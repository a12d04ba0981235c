"""From a chat request to a generation, and from its events to the OpenAI answer, whole or in chunks."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fathom_serve.api.backend import Generation, ModelCard
from fathom_serve.api.errors import ApiError, envelope
from fathom_serve.api.schema import ChatRequest
from fathom_serve.engine.request import Accepted, Depth, DepthUsage, Event, Failed, Finished, Progress, Token


def to_generation(body: ChatRequest, card: ModelCard) -> Generation:
    """Fill in defaults.

    Raises:
        ApiError: 404 for another model, 400 for a depth that the model lacks.
    """
    if body.model != card.name:
        raise unknown_model(body.model, card)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return Generation(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        messages=tuple(message.plain() for message in body.messages),
        max_tokens=body.answer_tokens,
        temperature=card.temperature if body.temperature is None else body.temperature,
        top_p=card.top_p if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=body.stops,
        top_logprobs=logprobs,
        depth=Depth(body.depth.tau_exit, body.depth.max_depth),
    )


def unknown_model(name: str, card: ModelCard) -> ApiError:
    """404 that says which model there is."""
    text = f"no model {name!r} here; this server has {card.name!r}"
    return ApiError(Failed(404, text, "model", "model_not_found"))


class ChatAnswer:
    """Shapes the events of one generation.

    Args:
        body: the request.
        generation: what it became.
    """

    def __init__(self, body: ChatRequest, generation: Generation) -> None:
        self.body = body
        self.id = generation.id
        self.created = int(time.time())

    async def whole(self, events: AsyncIterator[list[Event]]) -> dict[str, Any]:
        """The answer of a request that does not stream.

        Raises:
            ApiError: the generation failed.
        """
        tokens: list[Token] = []
        async for batch in events:
            for event in batch:
                if isinstance(event, Progress):
                    tokens += event.tokens
                elif isinstance(event, Failed):
                    raise ApiError(event)
                elif isinstance(event, Finished):
                    return self._completion(tokens, event)
        raise ApiError(Failed(500, "the engine ended without finishing the answer", None, "internal_error"))

    async def chunks(self, events: AsyncIterator[list[Event]]) -> AsyncIterator[str]:
        """Server-sent events: one per tick and request; the role first, the reason last, then usage if asked for."""
        yield self._chunk({"role": "assistant", "content": ""}, [], None)
        async for batch in events:
            for event in batch:
                if isinstance(event, Progress):
                    text = "".join(token.text for token in event.tokens)
                    yield self._chunk({"content": text}, event.tokens, None)
                elif isinstance(event, Failed):
                    yield _sse(envelope(event))
                    return
                elif isinstance(event, Finished):
                    yield self._chunk({}, [], event.reason)
                    if self.body.stream_options and self.body.stream_options.include_usage:
                        yield _sse({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(event.usage)})
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model}

    def _completion(self, tokens: list[Token], finished: Finished) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(token.text for token in tokens), "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": finished.reason, **self._details(tokens)}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage(finished.usage)}

    def _chunk(self, delta: dict[str, Any], tokens: list[Token], reason: str | None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, **self._details(tokens)}
        return _sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _details(self, tokens: list[Token]) -> dict[str, Any]:
        """Log-probabilities and depths of some tokens, where they are asked for."""
        content = [_logprob(token) for token in tokens] if self.body.logprobs else None
        details: dict[str, Any] = {"logprobs": {"content": content, "refusal": None} if content else None}
        if self.body.depth.returned == "tokens":
            details["depth"] = {"tokens": [{"text": token.text, "depth": token.depth} for token in tokens]}
        return details


def usage(depths: DepthUsage) -> dict[str, Any]:
    """OpenAI's ``usage`` with Fathom's ``depth``: of the answer tokens, and of the prompt before its last token."""
    return {
        "prompt_tokens": depths.prompt_tokens,
        "completion_tokens": depths.tokens,
        "total_tokens": depths.prompt_tokens + depths.tokens,
        "depth": {
            "mean": depths.mean,
            "histogram": {str(number): count for number, count in enumerate(depths.histogram, start=1)},
            "iterations": depths.iterations,
            "prompt_mean": depths.prompt_mean,
            "prompt_iterations": depths.prompt_iterations,
        },
    }


async def accepted(events: AsyncIterator[list[Event]]) -> None:
    """Wait until the engine has taken a request, while an error can still be an HTTP status.

    Raises:
        ApiError: it was refused.
    """
    first = (await anext(events))[0]
    if isinstance(first, Failed):
        raise ApiError(first)
    if not isinstance(first, Accepted):
        raise ApiError(Failed(500, f"the engine began with {type(first).__name__}", None, "internal_error"))


def _logprob(token: Token) -> dict[str, Any]:
    best = [_entry(other.text, other.logprob) for other in token.alternatives]
    return {**_entry(token.text, token.logprob), "top_logprobs": best}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
