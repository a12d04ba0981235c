"""How much work a report may be: the sizes of models, data and runs, in one table for ``--quick`` and the full one."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fathom.claims.tasks import Chains, Sums, Task, Text
from fathom.claims.train import Plan
from fathom.config.schema import ObjectiveConfig
from fathom.model.config import BackboneConfig, read_config
from fathom.model.looped import LoopedLM
from fathom.model.methods import make_method

HEAD_WIDTH = 32


class Run(NamedTuple):
    """One training run of every seed.

    Attributes:
        name: unique in a report.
        preset: of ``fathom.model.methods``.
        max_depth: M.
        layers: of the backbone; None for the budget's.
        task: ``chains``, ``sums`` or ``text``.
        scratch: trained from random weights for the base's and its own steps, instead of from the seed's base.
        lengthen: times the steps of post-training.
        axes: changed axes of the preset, its threshold among them.
        objective: changed constants of the objective.
        embedding_scale: the updater starts at the embedding table's RMS.
        start: the run whose weights it goes on from, instead of the base's.
        share_of: the run of the same seed whose mean depth a random routing must have.
        labels_of: the run of the same seed whose mistakes (top token is not the target) ask for the last depth.
    """

    name: str
    preset: str = "standard"
    max_depth: int = 1
    layers: int | None = None
    task: str = "chains"
    scratch: bool = False
    lengthen: int = 1
    axes: tuple[tuple[str, Any], ...] = ()
    objective: tuple[tuple[str, Any], ...] = ()
    embedding_scale: bool = False
    start: "Run | None" = None
    share_of: "Run | None" = None
    labels_of: "Run | None" = None


@dataclass(frozen=True)
class Budget:
    """The numbers of a report; everything that a run depends on besides its :class:`Run` and the seed.

    Attributes:
        name: ``quick`` or ``full``.
        seeds: how many, numbered from 1.
        group, longest, digits, context_tokens: of the chains and sums.
        window: characters of a text document.
        width, layers, text_layers: of the models.
        base_steps, steps: of the base and of post-training.
        text_base_steps, text_steps: the same for text.
        documents, text_documents: of one step.
        base_rate, rate: peak learning rates.
        heldout: documents that are scored.
        depths: M of the TaH2 models.
        lengthen: post-training steps of the longer Standard over those of the others.
        thorough: also what is dear or wants many seeds: TaH's two stages, depth on sums and text, the options.
        source: the text of ``--data``.
        device: torch's name of where models live.
    """

    name: str
    seeds: int
    group: str = "C5"
    longest: int = 5
    digits: int = 3
    context_tokens: int = 96
    window: int = 128
    width: int = 64
    layers: int = 2
    text_layers: int = 3
    base_steps: int = 700
    steps: int = 300
    text_base_steps: int = 150
    text_steps: int = 50
    documents: int = 8
    text_documents: int = 8
    base_rate: float = 3e-3
    rate: float = 2e-3
    heldout: int = 96
    depths: tuple[int, ...] = (2, 4)
    lengthen: int = 3
    thorough: bool = False
    source: str | None = None
    device: str = "cpu"

    def scaled(self, factor: int) -> "Budget":
        """The same report with models ``factor`` times as wide and as many times the documents in a step."""
        return replace(
            self,
            width=self.width * factor,
            documents=self.documents * factor,
            text_documents=self.text_documents * factor,
            base_rate=self.base_rate / factor,
            rate=self.rate / factor,
        )

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """The tasks by the names that runs use."""
        return {
            "chains": Chains(self.group, self.longest, self.context_tokens),
            "sums": Sums(self.digits, self.context_tokens),
            "text": Text(self.window, self.source),
        }

    def layers_of(self, run: Run) -> int:
        """Layers of a run's backbone."""
        return run.layers or (self.text_layers if run.task == "text" else self.layers)

    def base_of(self, run: Run) -> Run:
        """The run that a run's base weights come from."""
        layers = self.layers_of(run)
        return Run(f"base of {layers} layers on {run.task}", layers=layers, task=run.task, scratch=True)

    def needs(self, run: Run) -> list[Run]:
        """The runs that come before a run."""
        first = run.start or (None if run.scratch else self.base_of(run))
        return [other for other in (first, run.share_of, run.labels_of) if other is not None]

    def plan(self, run: Run) -> Plan:
        """How a run trains. Post-training goes on with the documents after those of the base, or of its start."""
        text = run.task == "text"
        documents = self.text_documents if text else self.documents
        base = Plan(self.text_base_steps if text else self.base_steps, documents, self.base_rate)
        steps = (self.text_steps if text else self.steps) * run.lengthen
        if run == self.base_of(run):
            return base
        if run.scratch:
            return base._replace(steps=base.steps + steps)
        return Plan(steps, documents, self.rate, self.plan(run.start).after if run.start else base.after)

    def backbone(self, run: Run) -> BackboneConfig:
        """The shape of a run's model."""
        source = {
            "model_type": "llama",
            "vocab_size": self.tasks[run.task].vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.width * 11 // 4,
            "num_hidden_layers": self.layers_of(run),
            "num_attention_heads": max(self.width // HEAD_WIDTH, 1),
            "num_key_value_heads": max(self.width // HEAD_WIDTH, 1),
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
        return read_config(source, "fathom claims")

    def model(self, run: Run) -> LoopedLM:
        """A run's model, its weights not yet set."""
        return LoopedLM(self.backbone(run), make_method(run.preset, run.max_depth, **dict(run.axes)))

    def objective(self, run: Run) -> ObjectiveConfig:
        """A run's constants."""
        return ObjectiveConfig(**dict(run.objective))


QUICK = Budget("quick", seeds=3)
FULL = Budget(
    "full",
    seeds=5,
    longest=6,
    layers=4,
    base_steps=1000,
    steps=270,
    text_base_steps=200,
    text_steps=100,
    depths=(2, 4, 8),
    thorough=True,
)
