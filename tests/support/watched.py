"""The training loop with a strategy that learns nothing and writes down what it was shown, on any number of ranks."""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fathom.config.schema import RunConfig
from fathom.data.prepared import Prepared
from fathom.model.collectives import LOCAL
from fathom.model.rows import PackedRows
from fathom.objectives.stats import stat_names
from fathom.train.loop import Hooks, run_steps
from fathom.train.progressed import Progressed
from fathom.train.refused import RefusedSteps
from support.models import tiny_model

NAMES = stat_names(1)


class Killed(Exception):
    """Stands for a SIGKILL of all ranks."""


@dataclass
class Watched:
    """What a run did over all its attempts.

    Attributes:
        examples: the conversations of every step that was run, over ranks and micro-batches; one list an attempt.
        rates: learning rates of every step, likewise.
        saved: the run's own state as the last checkpoint holds it.
        finished: whether the last attempt reached the last step.
    """

    examples: dict[int, list[list[int]]] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    saved: dict[str, Any] | None = None
    finished: bool = False

    def attempt(self, cfg: RunConfig, data: Prepared, world: int = 1, kill_after: int | None = None) -> None:
        """Go on from the last checkpoint; with ``kill_after``, die behind that step, before it could be committed."""
        ranks = [_Rank(number, world, _Meeting(world)) for number in range(world)]
        for each in ranks:
            each.meeting = ranks[0].meeting
        ends: dict[int, Progressed] = {}
        saved = self.saved

        def run(rank: _Rank) -> None:
            state = Progressed(total=cfg.train.steps or 0) if saved is None else Progressed.from_json(saved)

            def record(step: int, metrics: dict[str, float]) -> None:
                rank.close(step)
                if step == kill_after:
                    raise Killed

            def commit(state: Progressed, wait: bool) -> None:
                if rank.rank == 0:
                    self.saved = state.as_json()

            refused = RefusedSteps("unused", rank.rank, data)
            hooks = Hooks(record, commit, lambda: 0, lambda step: {}, lambda: False, refused)
            try:
                run_steps(cfg, rank, tiny_model("standard"), NAMES, data, state, hooks)  # pyright: ignore
            except Killed:
                return
            ends[rank.rank] = state

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.finished = len(ends) == world and all(state.step == state.total for state in ends.values())
        assert self.finished or kill_after is not None, "a rank failed"
        for step in ranks[0].shown:
            assert len({rank.rates[step] for rank in ranks}) == 1
            union = sorted(example for rank in ranks for example in rank.shown[step])
            self.examples.setdefault(step, []).append(union)
            self.rates.setdefault(step, []).append(ranks[0].rates[step])


class _Meeting:
    """Adds up what all ranks bring."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=60)
        self.brought: list[Tensor] = [torch.zeros(0)] * world

    def sum(self, rank: int, tensor: Tensor) -> Tensor:
        self.brought[rank] = tensor
        self.barrier.wait()
        total = torch.stack(self.brought).sum(0)
        self.barrier.wait()
        return total


class _Rank:
    """A :class:`fathom.parallel.strategy.Strategy` of one rank."""

    collectives = LOCAL
    device = torch.device("cpu")
    updates = 0

    def __init__(self, rank: int, world: int, meeting: _Meeting) -> None:
        self.rank, self.world, self.meeting = rank, world, meeting
        self.open: list[int] = []
        self.rate = 0.0
        self.shown: dict[int, list[int]] = {}
        self.rates: dict[int, float] = {}

    def root(self, *fields: Tensor, draw: object) -> tuple[Tensor, Tensor]:
        rows = PackedRows(*fields)
        self.open += rows.example[rows.positions == 0].tolist()
        supervised, count = float(rows.supervised.sum()), float(rows.count)
        values = {"rows": count, "rows/1": count, "pairs/1": count, "supervised": supervised, "executed/1": supervised}
        stats = torch.tensor([values.get(name, 0.0) for name in NAMES], dtype=torch.float64)
        return torch.zeros(()), stats

    def backward(self, loss: Tensor, last: bool) -> None:
        pass

    def step(self, learning_rate: float, clip_norm: float) -> float:
        self.rate = learning_rate
        self.updates += 1
        return 1.0

    def sum(self, tensor: Tensor) -> Tensor:
        return self.meeting.sum(self.rank, tensor)

    def close(self, step: int) -> None:
        self.shown[step], self.rates[step], self.open = self.open, self.rate, []
