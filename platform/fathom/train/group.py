"""The workers of a run, as the code above the strategies sees them."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fathom.model.collectives import LOCAL, Collectives, ProcessGroup

T = TypeVar("T")
ASIDE_TIMEOUT = timedelta(hours=1)
"""How long threads beside training wait for each other: longer than an upload and its patience."""


class Group(NamedTuple):
    """This worker among all.

    Attributes:
        collectives: of all workers.
        local_rank: among the workers of this machine; 0 fetches and prepares for the others.
        local_world: how many workers share this machine.
        device: where this worker computes.
    """

    collectives: Collectives
    local_rank: int
    local_world: int
    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this worker; 0 writes what is written once."""
        return self.collectives.rank

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.collectives.world

    def barrier(self) -> None:
        """Wait for all workers."""
        self.collectives.any(False)

    def aside(self) -> "Group":
        """The same workers for one other thread of each, on the CPU: its collectives and ours do not meet.

        Called on all workers together.
        """
        if not isinstance(self.collectives, ProcessGroup):
            return self
        group: Any = dist.new_group(backend="gloo", timeout=ASIDE_TIMEOUT)
        return self._replace(collectives=ProcessGroup(group=group), device=torch.device("cpu"))

    def first_here(self, action: Callable[[], T]) -> T:
        """Run an action on one worker of each machine, then on the others, which find its work done."""
        result: T | None = action() if self.local_rank == 0 else None
        self.barrier()
        return action() if result is None else result

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's JSON value, in rank order, on every worker."""
        line = json.dumps(value).encode() + b"\n"
        mine = torch.frombuffer(bytearray(line), dtype=torch.uint8).to(self.device)
        every = bytes(self.collectives.gather(mine).cpu().tolist())
        return [json.loads(each) for each in every.splitlines()]


def own_process() -> Group:
    """A group of one, on a GPU if there is one."""
    return Group(LOCAL, 0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def initialised_group() -> Group:
    """The group that torch.distributed was initialised with, for example by Ray Train."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(f"cuda:{local_rank}") if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = ProcessGroup(device)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return Group(group, local_rank, local_world, device)
