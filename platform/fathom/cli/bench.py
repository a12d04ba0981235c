"""What the measures of ``fathom eval`` work on: a loaded model, held-out data, a task's items and their answers."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fathom.errors import ConfigError

if TYPE_CHECKING:
    from fathom.config.schema import RunConfig
    from fathom.data.prepared import Prepared
    from fathom.data.template import Renderer
    from fathom.evals.accuracy import Flops, Responses
    from fathom.evals.batches import Sizes
    from fathom.evals.generation import Generate, Sampling
    from fathom.evals.items import Item
    from fathom.model.looped import LoopedLM


class Asked(NamedTuple):
    """What a person asked for beyond the recipe.

    Attributes:
        names: measures.
        skips: whether measures that the method does not have are left out rather than refused.
        task: source of the items; None takes the held-out data.
        samples, temperature, max_tokens, match: of accuracy.
        cutoffs: of the accuracy curve.
        thresholds: of the curves that move it.
    """

    names: list[str]
    skips: bool
    task: str | None
    samples: int
    temperature: float
    max_tokens: int
    match: str
    cutoffs: list[int]
    thresholds: list[float]


@dataclass(frozen=True)
class Bench:
    """A loaded model and the data it is measured on."""

    config: "RunConfig"
    model: "LoopedLM"
    folder: Path
    prepared: "Prepared"
    asked: Asked

    @property
    def sizes(self) -> "Sizes":
        """Of a forward: as in training."""
        from fathom.evals.batches import Sizes

        return Sizes(self.config.train.micro_batch_tokens, self.config.train.head_chunk_rows)

    @property
    def name(self) -> str:
        """Of the model, in plots."""
        method = self.model.method
        return f"{method.name} M={method.max_depth}" if method.max_depth > 1 else method.name

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
        from fathom.model.folder import load_tokenizer

        return load_tokenizer(self.folder)

    def decode(self, ids: list[int]) -> str:
        """Token ids to text, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def flops(self) -> "Flops":
        """Decode FLOPs of an answer of this model."""
        from fathom.model.flops import decode_flops

        return partial(decode_flops, self.model.config, self.model.method)

    @cached_property
    def renderer(self) -> "Renderer":
        """The model's, of prompts."""
        from fathom.data.template import Renderer

        return Renderer(self.tokenizer, self.config.data.chat_format)

    @cached_property
    def generate(self) -> "Generate":
        """The engine."""
        from fathom.cli.answers import engine_generate

        return engine_generate(self.model, self.decode, self.renderer.stop_ids)

    @property
    def sampling(self) -> "Sampling":
        """As asked."""
        from fathom.evals.generation import Sampling

        return Sampling(self.asked.max_tokens, self.asked.temperature, seed=self.config.seed)

    @cached_property
    def items(self) -> "list[Item]":
        """The task's.

        Raises:
            ConfigError: an answer would not fit the model's context.
        """
        from fathom.evals.items import read_items

        asked, data = self.asked, self.config.data
        source = asked.task or data.heldout
        assert source is not None  # a bench has held-out data
        items = read_items(source, data, self.renderer, data.max_heldout_examples)
        context = self.model.config.max_positions
        for item in items:
            if len(item.prompt) + asked.max_tokens > context:
                raise ConfigError(
                    f"{item.where}: a prompt of {len(item.prompt)} tokens and --max-tokens {asked.max_tokens} are more "
                    f"than the {context} that this model takes",
                    "lower --max-tokens, or take the row out",
                )
        return items

    @cached_property
    def responses(self) -> "Responses":
        """The task's answers, generated once for accuracy and its curve."""
        from fathom.evals.accuracy import respond

        return respond(self.items, self.generate, self.sampling, self.asked.samples)


@contextlib.contextmanager
def open_bench(
    config: "RunConfig", reference: str, step_zero: bool, asked: Asked, max_depth: int | None = None
) -> Iterator[Bench]:
    """Load a model and prepare a recipe's held-out data.

    Args:
        config: its ``data`` says what is scored; with ``step_zero``, its ``method`` and ``seed`` convert the model.
        reference: what ``fathom deploy`` takes, or a recipe's ``model.base``.
        asked: the measures.
        max_depth: M, if not the model's own.

    Raises:
        ConfigError: the recipe has no held-out data, or the model cannot run so deep.
    """
    from fathom.data.prepared import prepare
    from fathom.data.sources import require_source
    from fathom.data.template import Renderer
    from fathom.model.folder import load_model, load_tokenizer
    from fathom_serve.deploy.source import local_folder, resolve

    if config.data.heldout is None:
        raise ConfigError(
            "data.heldout is not set: there is nothing to score on",
            "name held-out data in the recipe",
        )
    if asked.task is not None:
        require_source("--task", asked.task)
    folder = local_folder(resolve(reference, config.tracking.uri))
    start = (config.method, config.model) if step_zero else (None, None)
    model = load_model(folder, start[0], seed=config.seed, weights=start[1])
    if max_depth is not None:
        model.set_max_depth(max_depth)
    with tempfile.TemporaryDirectory() as work:
        prepared = prepare(
            config.data,
            "heldout",
            Renderer(load_tokenizer(folder), config.data.chat_format),
            Path(work) / "heldout",
        )
        yield Bench(config, model, folder, prepared, asked)
