"""What the training loop asks of a sharding strategy, and nothing more.

All strategies hold fp32 parameters and AdamW moments, give the same parameters after k steps on the same data, and
describe their state in the same words: flat ranges of flattened tensors, named alike, so that any of them continues
from what any other saved, on any number of workers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fathom.config.schema import OptimizerConfig
from fathom.model.collectives import Collectives

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two averages; the keys of the state are ``param/NAME`` and ``exp_avg/NAME``, ``exp_avg_sq/NAME``."""


class Shard(NamedTuple):
    """A contiguous range of a flattened tensor: what one rank holds of it.

    Attributes:
        values: fp32 ``[n]``, possibly empty.
        shape: of the whole tensor.
        start: index of the first value in the flattened whole.
    """

    values: Tensor
    shape: tuple[int, ...]
    start: int


Reader = Callable[[str, int, int], Tensor]
"""``read(key, start, stop)``: that range of the flattened tensor, as ``[stop - start]``."""


class Strategy(Protocol):
    """A wrapped root module with its optimizer. Every method is called on all ranks, in the same order."""

    rank: int
    world: int
    device: torch.device
    collectives: Collectives
    root: nn.Module
    updates: int
    """Optimizer steps applied so far; AdamW's bias correction follows from it."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of ``loss``; gradients of all ranks and micro-batches are SUMMED.

        Args:
            loss: this rank's share of the step's loss, already divided by the step's global count.
            last: whether this is the step's last micro-batch.
        """
        ...

    def step(self, learning_rate: float, clip_norm: float) -> float:
        """Clip, update, clear gradients.

        Returns:
            The norm of the whole gradient over all ranks, before clipping. If it is not finite nothing is updated.
        """
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Element-wise sum over ranks."""
        ...

    def shards(self) -> dict[str, Shard]:
        """This rank's ranges of parameters and moments by key; values are not copied."""
        ...

    def load_shards(self, read: Reader, updates: int) -> None:
        """Take parameters and moments from a saved state; call before the first forward."""
        ...

    def full_model_state(self) -> dict[str, Tensor] | None:
        """All parameters whole, on the CPU, by the root's parameter names, on rank 0; None on other ranks."""
        ...


def create_strategy(
    name: str,
    root: nn.Module,
    optimizer: OptimizerConfig,
    units: Sequence[nn.Module],
    collectives: Collectives,
    device: torch.device | str = "cpu",
) -> Strategy:
    """Wrap ``root`` for training.

    Args:
        name: ``single``, ``fsdp`` or ``zero``.
        root: called once per micro-batch; its parameters are fp32 and alike on all ranks.
        optimizer: AdamW's constants.
        units: submodules that are gathered as one each (the decoder layers); everything else is the root's unit.
        collectives: the data-parallel group. For ``fsdp`` and ``zero`` torch.distributed is initialised.
        device: where this rank computes.
    """
    device = torch.device(device)
    root.to(device)
    if name == "single":
        from fathom.parallel.single import SingleStrategy

        return SingleStrategy(root, optimizer, collectives, device)
    if name == "fsdp":
        from fathom.parallel.fsdp import FsdpStrategy

        return FsdpStrategy(root, optimizer, units, collectives, device)
    if name == "zero":
        from fathom.parallel.zero import ZeroStrategy

        return ZeroStrategy(root, optimizer, collectives, device)
    raise ValueError(f"unknown strategy {name!r}: single, fsdp or zero")


def make_adamw(parameters: list[nn.Parameter], cfg: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of every strategy; the learning rate is set anew at each step."""
    return torch.optim.AdamW(
        parameters,
        lr=cfg.learning_rate,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.epsilon,
        weight_decay=cfg.weight_decay,
        foreach=True,
    )
