"""Generation for measures: the serving engine, ticked in this process, behind the callable that ``evals`` takes."""

import hashlib
import struct
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fathom.errors import ConfigError
from fathom.evals.generation import Generate, Generation, Sampling

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM
    from fathom_serve.engine.engine import Engine
    from fathom_serve.engine.flight import Flight

UNBOUNDED = 1 << 30
"""A measure queues all its prompts at once."""


def engine_generate(
    model: "LoopedLM",
    decode: Callable[[list[int]], str],
    stop_ids: frozenset[int],
    max_active: int = 16,
    kv_memory_mb: int = 512,
) -> Generate:
    """Answers by the engine that serves, so that a measured answer is a served one.

    Args:
        decode: token ids to text, special tokens left out.
        stop_ids: tokens that end an answer.
        max_active: answers in flight.
        kv_memory_mb: keys and values of all of them, MiB.
    """
    from fathom_serve.engine.engine import Engine
    from fathom_serve.engine.limits import EngineLimits

    limits = EngineLimits(max_active=max_active, max_queued=UNBOUNDED, kv_memory_mb=kv_memory_mb)
    engine = Engine(model, limits, decode, stop_ids)

    def generate(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        flights = [_submit(engine, number, prompt, sampling) for number, prompt in enumerate(prompts)]
        _run(engine, len(flights))
        return [_generation(flight, decode) for flight in flights]

    return generate


def seed_of(seed: int, number: int) -> int:
    """The seed of one prompt: prompts with the same seed would share their noise, position by position."""
    return int.from_bytes(hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=7).digest(), "little")


def _submit(engine: "Engine", number: int, prompt: Sequence[int], sampling: Sampling) -> "Flight":
    from fathom_serve.engine import request

    chosen = request.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=seed_of(sampling.seed, number),
        max_tokens=sampling.max_tokens,
    )
    depth = request.Depth(sampling.threshold, sampling.max_depth)
    try:
        return engine.submit(request.Request(str(number), tuple(prompt), chosen, depth))
    except request.RequestRefused as refused:
        engine.abandon()
        raise ConfigError(f"prompt {number + 1}: {refused.failed.message}", "lower --max-tokens or --samples") from None


def _run(engine: "Engine", count: int) -> None:
    """Tick until every answer has ended; counts them on a terminal's stderr."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fathom_serve.engine.request import Failed, Finished

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("answers", total=count)
        while engine.busy:
            for told in engine.tick():
                if isinstance(told.event, Failed):
                    raise RuntimeError(f"answer {told.request_id}: {told.event.message}")
                if isinstance(told.event, Finished):
                    progress.advance(task)


def _generation(flight: "Flight", decode: Callable[[list[int]], str]) -> Generation:
    tokens = flight.ids[flight.prompt_tokens :]
    return Generation(decode(tokens), tokens, list(flight.answer_depths), flight.depths[: flight.prompt_tokens - 1])
