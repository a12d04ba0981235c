"""What ranks must agree on inside one forward, as three small operations.

The loop and the objective call these in the same order on every rank, whatever rows a rank holds, so that
data-dependent depth can never leave one rank waiting in a collective that another skipped.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Collectives(Protocol):
    """The data-parallel group as the model sees it."""

    rank: int
    world: int

    def any(self, flag: bool) -> bool:
        """True on every rank if it is true on one."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Element-wise sum over ranks; the argument is left as it is."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenation of the ranks' 1-D tensors, which may differ in length, in rank order."""
        ...


class OneProcess:
    """The group of one."""

    rank = 0
    world = 1

    def any(self, flag: bool) -> bool:
        return flag

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


class ProcessGroup:
    """An initialised ``torch.distributed`` group (the default group when none is given)."""

    def __init__(self, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None) -> None:
        self.device = torch.device(device)
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def any(self, flag: bool) -> bool:
        votes = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        return bool(votes.item())

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.group)
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        # Lengths first, then rows padded to the longest: gloo and NCCL gather equal shapes only.
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        dist.all_gather(
            lengths,
            torch.tensor([tensor.shape[0]], device=self.device),
            group=self.group,
        )
        counts = [int(length.item()) for length in lengths]
        padded = tensor.new_zeros(max(*counts, 1))
        padded[: tensor.shape[0]] = tensor.detach()
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


LOCAL: Collectives = OneProcess()
