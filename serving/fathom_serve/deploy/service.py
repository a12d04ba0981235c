"""A model folder as a :class:`~fathom_serve.api.backend.Backend` in this process."""

import json
import os
import secrets
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch

from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError
from fathom.model.folder import load_model, load_tokenizer
from fathom_serve.api.backend import Generation, ModelCard
from fathom_serve.deploy.source import Source
from fathom_serve.engine.engine import Engine
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.loop import EngineLoop
from fathom_serve.engine.request import Event, Failed, Request, Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class EngineService:
    """Loads a model, renders prompts as training did, and streams answers.

    Args:
        folder: local model folder.
        source: what it is called and where it came from.
        limits: sizes of the engine.
        dtype: ``float32``, ``bfloat16`` or ``auto`` (bfloat16 on a GPU, else float32).
        threads: torch threads; default all cores.
    """

    def __init__(
        self,
        folder: Path,
        source: Source,
        limits: EngineLimits,
        dtype: str = "auto",
        threads: int | None = None,
    ) -> None:
        # Ray sets one thread per CPU that the replica asks for, which is a fraction.
        torch.set_num_threads(threads or os.cpu_count() or 1)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(folder, dtype=pick_dtype(dtype, device)).to(device)
        # Two tokenizers: the step loop decodes in its thread while this one renders.
        self.renderer = Renderer(load_tokenizer(folder))
        self.engine = Engine(model, limits, text_decoder(load_tokenizer(folder)), self.renderer.stop_ids)
        self.loop = EngineLoop(self.engine)
        temperature, top_p = sampling_defaults(folder)
        method = self.engine.model.method
        self._card = ModelCard(
            name=source.name,
            created=int(time.time()),
            method=method.name,
            max_depth=method.max_depth,
            threshold=method.threshold if model.routing.dial else None,
            context=self.engine.context,
            source=source.uri,
            version=source.version,
            temperature=temperature,
            top_p=top_p,
        )

    async def card(self) -> ModelCard:
        """The model."""
        return self._card

    async def health(self) -> str | None:
        """None when the step loop moves."""
        return self.loop.health()

    async def generate(self, generation: Generation) -> AsyncGenerator[list[Event], None]:
        """Events of one answer; closing the iterator aborts it."""
        try:
            request = self.request(generation)
        except DataError as error:
            yield [Failed(400, error.message, "messages", "invalid_messages")]
            return
        events = self.loop.stream(request)
        try:
            async for batch in events:
                yield batch
        finally:
            await events.aclose()

    def request(self, generation: Generation) -> Request:
        """Render the prompt, and fill in the answer length and the seed. All are one tenant: there are no keys yet.

        Raises:
            DataError: the chat template refuses the messages.
        """
        prompt = tuple(self.renderer.prompt([dict(message) for message in generation.messages]))
        room = max(1, self.engine.context - len(prompt))
        sampling = Sampling(
            temperature=generation.temperature,
            top_p=generation.top_p,
            seed=secrets.randbits(63) if generation.seed is None else generation.seed,
            seed_drawn=generation.seed is None,
            max_tokens=generation.max_tokens or min(self.engine.limits.default_max_tokens, room),
            stop=generation.stop,
            top_logprobs=generation.top_logprobs,
        )
        return Request(generation.id, prompt, sampling, generation.depth)

    def close(self) -> None:
        """End the step loop."""
        self.loop.close()


def pick_dtype(name: str, device: str) -> torch.dtype:
    """The dtype of a name, or of the device for ``auto``.

    Raises:
        ConfigError: no such dtype.
    """
    if name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown", f"give auto or one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def text_decoder(tokenizer: Any) -> Any:
    """Token ids to text without special tokens, exactly as they spell it."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return decode


def sampling_defaults(folder: Path) -> tuple[float, float]:
    """Temperature and top_p of the model's ``generation_config.json``; 1 and 1 where it names none."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("do_sample") is False:
        return 0.0, 1.0
    return float(found.get("temperature") or 1.0), float(found.get("top_p") or 1.0)
