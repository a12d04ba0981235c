"""What an objective gets and gives. Losses are sums over supervised rows, never means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import Collectives
from fathom.model.levels import LoopOptions, Trace
from fathom.model.looped import LoopedLM
from fathom.model.rows import PackedRows
from fathom.objectives.labels import DepthGains, DepthLabels, Ran


class Draw(NamedTuple):
    """What a forward may depend on besides its rows, alike on all ranks.

    Attributes:
        key: follows from the run's seed, the step and the micro-batch.
        progress: steps done over steps of the run.
    """

    key: int = 0
    progress: float = 1.0


class Context(NamedTuple):
    """A forward whose loss is wanted.

    Attributes:
        labels: per depth, where they were decided beforehand for the whole step.
        helper: what ``Objective.helper`` made; None without one.
    """

    model: LoopedLM
    trace: Trace
    rows: PackedRows
    config: ObjectiveConfig
    collectives: Collectives
    head_chunk_rows: int
    draw: Draw = Draw()
    labels: list[DepthLabels] | None = None
    helper: nn.Module | None = None


def ran_in(context: Context, predicted: list[Tensor] | None) -> Ran:
    """The forward of a context, for its gains; ``predicted`` is a value head's."""
    return Ran(
        context.model,
        context.trace,
        context.rows,
        context.config,
        context.collectives,
        context.head_chunk_rows,
        context.draw.key,
        predicted,
    )


class Loss(NamedTuple):
    """Sums over supervised rows.

    Attributes:
        total: scalar with its graph; what is minimised.
        routing: scalar, the part that teaches routing, before its weight.
        labels: of methods that measure gains, per depth.
        predicted: those gains by a value head, per depth, over the rows of that depth's trace.
    """

    total: Tensor
    routing: Tensor
    labels: Sequence[DepthLabels] = ()
    predicted: Sequence[Tensor] = ()


Need = Literal["decider", "plan", "each_depth", "every_row", "labels"]


@dataclass(frozen=True)
class Objective:
    """A way to learn.

    Attributes:
        loss: the sum to minimise.
        options: changes how the forward is run, from the draw; default as it is.
        measure: the gains of a forward, from which labels can be decided for a whole step (``objective.pool``).
        helper: makes a module that learns beside the model and is no part of it, from the run's seed; or None. All its
            parameters must have a gradient on every rank.
        trains: ``all`` parameters, or the ``decider``'s alone.
        needs: what it looks at: a ``decider`` asked at every depth; a router's ``plan``; a distribution at
            ``each_depth``; ``every_row`` at all depths; depth ``labels`` of the data (``data.label_model``).
        alternates_gradient: whether passes without a gradient lie between passes that have one.
    """

    loss: Callable[[Context], Loss]
    options: Callable[[LoopOptions, LoopedLM, ObjectiveConfig, Draw], LoopOptions] | None = None
    measure: Callable[[Context], list[DepthGains]] | None = None
    helper: Callable[[LoopedLM, ObjectiveConfig, int], nn.Module | None] | None = None
    trains: str = "all"
    needs: tuple[Need, ...] = ()
    alternates_gradient: bool = False
