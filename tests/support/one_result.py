"""One step of training in many ways: the same ragged documents, routes and labels, cut and spread at will.

Routes are scripted, and labels with their coverage cut and class balance recorded once, from everything in one forward:
both are decided by comparisons, which another order of additions may turn. What is left must agree to rounding. The
optimizer is plain descent, which shows gradients as they are, where AdamW would show little but their signs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fathom.config.schema import ObjectiveConfig, OptimizerConfig
from fathom.model.collectives import LOCAL, Collectives
from fathom.model.levels import LoopOptions
from fathom.model.rows import PackedRows, pack_documents
from fathom.objectives.labels import DepthLabels, Ran, depth_labels
from fathom.objectives.root import TrainingRoot
from fathom.parallel import single, zero
from fathom.parallel.strategy import RATE_FACTOR, Strategy, create_strategy
from support.models import tiny_model

METHODS = {"standard": ("standard", 1), "tah2, M=2": ("tah2", 2), "tah2, M=4": ("tah2", 4), "abbie-d": ("abbie-d", 3)}
DOCUMENTS = 32
OBJECTIVE = ObjectiveConfig(decider_weight=1.0)
OPTIMIZER = OptimizerConfig(learning_rate=0.1)
CLIP_NORM = 0.7
REVEALING_RATE = 64.0
"""So large that one step of descent is the gradient times it, to more digits than fp32 arithmetic has."""
WAYS = {"gradient": (REVEALING_RATE, 1), "parameters": (0.1, 2)}
"""Learning rate and number of steps, from the first parameters each."""

Cells = list[list[int]]
"""The documents of each micro-batch, ascending."""


class Recorded(NamedTuple):
    """A step's rows in one forward, with what was decided about them.

    Attributes:
        rows: of all documents.
        routes: int64 ``[rows]``, depths executed.
        labels: per depth, over the rows that executed it; none where the method needs none.
    """

    rows: PackedRows
    routes: Tensor
    labels: list[DepthLabels]


@cache
def documents() -> list[tuple[list[int], list[bool]]]:
    """Ragged; one in nine has no target."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 12, (DOCUMENTS,), generator=generator).tolist()
    return [
        (torch.randint(97, (n,), generator=generator).tolist(), [number % 9 != 8 and at > n // 3 for at in range(n)])
        for number, n in enumerate(lengths)
    ]


def whole() -> Cells:
    """Everything in one forward."""
    return [list(range(DOCUMENTS))]


def cut_into(forwards: int) -> Cells:
    """As many forwards; with 32, a document each, which is not packed at all."""
    return [list(range(number, DOCUMENTS, forwards)) for number in range(forwards)]


def spread(rank: int) -> tuple[Cells, Cells]:
    """A rank's part of four micro-batches, and what both ranks hold of each. Documents whose number leaves 1 over 4
    never go on: the second rank has nothing else in the first micro-batch, and nothing at all in the last."""
    quiet = list(range(1, DOCUMENTS, 4))
    others = [number for number in range(DOCUMENTS) if number % 4 != 1]
    cells = [(others[:6], quiet[:5]), (others[6:9], others[9:16]), (quiet[5:], others[16:20]), (others[20:], [])]
    return [list(each[rank]) for each in cells], [sorted(one + two) for one, two in cells]


def make_root(name: str, collectives: Collectives = LOCAL, checkpointing: bool = False) -> TrainingRoot:
    method, depths = METHODS[name]
    model = tiny_model(method, depths, dtype=torch.float32, num_hidden_layers=4 if name == "abbie-d" else 2)
    return TrainingRoot(model, OBJECTIVE, collectives, checkpointing=checkpointing)


@cache
def record(name: str) -> Recorded:
    """Scripted routes and the labels of one forward of everything."""
    root = make_root(name)
    rows = pack_documents(documents(), range(DOCUMENTS))
    depths = root.model.method.max_depth
    drawn = torch.randint(1, depths + 1, (rows.count,), generator=torch.Generator().manual_seed(6))
    routes = torch.where(rows.example % 4 == 1, 1, drawn)
    if root.objective.measure is None:
        return Recorded(rows, routes, [])
    trace = root.model(rows, options=LoopOptions(routes=routes))
    assert torch.equal(trace.executed, routes)
    return Recorded(rows, routes, depth_labels(Ran(root.model, trace, rows, OBJECTIVE, LOCAL, 1024)))


def part(step: Recorded, mine: Sequence[int], everybody: Sequence[int]) -> dict[str, Any]:
    """Arguments of the root for these documents, of a micro-batch that holds those of everybody."""
    texts = documents()
    rows = pack_documents([texts[number] for number in mine], mine)
    keep, theirs = (torch.isin(step.rows.example, torch.tensor(each)) for each in (mine, everybody))
    deepest = int(step.routes[theirs].max())
    labels = []
    for depth, at in enumerate(step.labels[:deepest], start=1):
        ran = keep[step.routes >= depth]
        cut: dict[str, Any] = {
            name: value[ran] if isinstance(value, Tensor) else value for name, value in at._asdict().items()
        }
        labels.append(DepthLabels(**cut))
    return {**rows._asdict(), "routes": step.routes[keep], "labels": labels if step.labels else None}


def descend(strategy: Strategy, step: Recorded, mine: Cells, everybody: Cells, rate: float, steps: int) -> list[float]:
    """Steps of descent through a strategy; the norms it reports."""
    count = float(step.rows.supervised.sum())
    batches = [part(step, *cells) for cells in zip(mine, everybody, strict=True)]
    norms = []
    for _ in range(steps):
        for number, given in enumerate(batches):
            loss, _ = strategy.root(**given)
            strategy.backward(loss / count, last=number == len(batches) - 1)
        norms.append(strategy.step(rate, CLIP_NORM))
    return norms


@contextmanager
def plain_descent() -> Iterator[None]:
    """Strategies that are made meanwhile take steps along the gradient itself."""

    def make(parameters: Mapping[str, nn.Parameter], *_: object) -> torch.optim.SGD:
        return torch.optim.SGD([{"params": list(parameters.values()), RATE_FACTOR: 1.0}], lr=OPTIMIZER.learning_rate)

    with patch.object(single, "make_adamw", make), patch.object(zero, "make_adamw", make):
        yield


class Result(NamedTuple):
    """Of one way.

    Attributes:
        found: on rank 0, the clipped ``gradient`` at the first parameters and the ``parameters`` after steps, flat.
        norms: of the gradients of all steps, as the strategy reports them.
    """

    found: dict[str, Tensor]
    norms: list[float]


Wrap = Callable[[TrainingRoot], Strategy]


def train(
    wrap: Wrap, name: str, mine: Cells, everybody: Cells, group: Collectives = LOCAL, checkpointing: bool = False
) -> Result:
    """Both of :data:`WAYS`, each with a strategy of its own that starts from the same parameters."""
    found, norms = {}, []
    for what, (rate, steps) in WAYS.items():
        root = make_root(name, group, checkpointing)
        start = {key: value.detach().clone() for key, value in root.named_parameters()}
        with plain_descent():
            strategy = wrap(root)
        norms += descend(strategy, record(name), mine, everybody, rate, steps)
        state = strategy.full_model_state()
        if state is not None:
            moved = flat(start) - flat(state)
            found[what] = moved / rate if what == "gradient" else flat(state)
    return Result(found, norms)


def flat(state: Mapping[str, Tensor]) -> Tensor:
    """All parameters end to end, fp64."""
    return torch.cat([state[name].flatten().double() for name in sorted(state)])


def wrap_single(root: TrainingRoot) -> Strategy:
    """The reference."""
    return create_strategy("single", root, OPTIMIZER, [], LOCAL)


@cache
def reference(name: str) -> Result:
    """Everything in one forward of one process, nothing recomputed."""
    result = train(wrap_single, name, whole(), whole())
    assert min(result.norms) > 2 * CLIP_NORM, "nothing was clipped: this would show little"
    assert abs(float(result.found["gradient"].norm()) - CLIP_NORM) < 1e-5 * CLIP_NORM
    return result


def apart(ours: Result, theirs: Result) -> dict[str, float]:
    """How far two results are from each other: relative of gradients and norms, absolute of parameters."""
    gradient, expected = ours.found["gradient"], theirs.found["gradient"]
    pairs = list(zip(ours.norms, theirs.norms, strict=True))
    return {
        "gradient": float((gradient - expected).norm() / expected.norm()),
        "parameters": float((ours.found["parameters"] - theirs.found["parameters"]).abs().max()),
        "norms": max(abs(mine - yours) / yours for mine, yours in pairs),
    }


BOUNDS = {"gradient": 1e-5, "parameters": 1e-6, "norms": 1e-5}


def agree(ours: Result, theirs: Result) -> bool:
    """Whether they are one result."""
    return all(distance < BOUNDS[what] for what, distance in apart(ours, theirs).items())
