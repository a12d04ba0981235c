"""Labels whose coverage cut and class balance are over a whole optimizer step (``objective.pool: step``).

As published, the pool is one micro-batch over all ranks, and so the result depends on how a step is cut into
micro-batches. Here a pass without gradient measures the gains of all of them first; then one cut and one balance per
depth serve the whole step, and the pass with gradient follows the routes that were measured.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import Collectives
from fathom.model.rows import PackedRows
from fathom.objectives.context import Context, Draw, ran_in
from fathom.objectives.labels import DepthGains, DepthLabels, decide, depth_gains, depths_that_decide
from fathom.objectives.value_head import predicted_gains


class Decided(NamedTuple):
    """What the pass with gradient of one micro-batch takes from the one that measured it.

    Attributes:
        routes: int64 ``[rows]``, depths executed.
        labels: per depth.
    """

    routes: Tensor
    labels: list[DepthLabels]


def measure_gains(context: Context) -> list[DepthGains]:
    """Per depth, the gains of all rows that any label could make due: which ones it does is not known yet."""
    model, trace = context.model, context.trace
    forward = ran_in(context, predicted_gains(context.helper, trace, model.method.max_depth))
    return [depth_gains(forward, depth, forward.rows.supervised) for depth in depths_that_decide(model, trace)]


@torch.no_grad()
def decide_step(
    root: Callable[..., Any],
    batches: Sequence[tuple[PackedRows, Draw]],
    objective: ObjectiveConfig,
    collectives: Collectives,
) -> list[Decided]:
    """Run every micro-batch of a step once without gradient and label all of them together.

    Args:
        root: the wrapped :class:`fathom.objectives.root.TrainingRoot`.
        batches: this rank's; as many on every rank.
        objective: its constants.
        collectives: the ranks.
    """
    measured: list[tuple[Tensor, list[DepthGains]]] = [root(*rows, draw=draw, measure=True) for rows, draw in batches]
    decided = [Decided(routes, []) for routes, _ in measured]
    wanted = [rows.supervised for rows, _ in batches]
    # A micro-batch ran as many depths on every rank, so the deepest one is everybody's.
    for depth in range(max(len(gains) for _, gains in measured)):
        ran = [number for number, (_, gains) in enumerate(measured) if depth < len(gains)]
        parts = [measured[number][1][depth] for number in ran]
        due = torch.cat([wanted[number][part.index] for number, part in zip(ran, parts, strict=True)])
        union = DepthGains(*(torch.cat(field) for field in zip(*parts, strict=True)))
        labels = _split(decide(union, due, objective, collectives), [part.index.shape[0] for part in parts])
        for number, part, mine in zip(ran, parts, labels, strict=True):
            decided[number].labels.append(mine)
            wanted[number] = torch.zeros_like(wanted[number]).index_put((part.index,), mine.label)
    return decided


def _split(labels: DepthLabels, sizes: list[int]) -> list[DepthLabels]:
    """One depth's labels of the union as those of each micro-batch; cut and balance are everybody's."""
    fields = [field.split(sizes) if isinstance(field, Tensor) else [field] * len(sizes) for field in labels]
    return [DepthLabels(*each) for each in zip(*fields, strict=True)]
