"""What the training loop asks of a sharding strategy, and nothing more.

All strategies hold fp32 parameters and AdamW moments, give the same parameters after k steps on the same data, and
describe their state in the same words: flat ranges of flattened tensors, named alike, so that any of them continues
from what any other saved, on any number of workers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fathom.config.schema import OptimizerConfig
from fathom.model.collectives import Collectives

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two averages; the keys of the state are ``param/NAME`` and ``exp_avg/NAME``, ``exp_avg_sq/NAME``."""


RATE_FACTOR = "rate_factor"
"""Of a group of parameters: its learning rate over the step's."""


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

        Args:
            learning_rate: of the base model's parameters; added parts learn at ``optimizer.added_rate_factor`` of it.
            clip_norm: largest norm of the whole gradient.

        Returns:
            The norm of the whole gradient over all ranks, before clipping. If it is not finite nothing is updated.
        """
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Element-wise sum over ranks."""
        ...

    def parameter_shards(self) -> dict[str, Shard]:
        """This rank's ranges of the parameters that learn, by name; values are not copied."""
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
    added: Collection[str] = (),
) -> Strategy:
    """Wrap ``root`` for training.

    Args:
        name: ``single``, ``fsdp`` or ``zero``.
        root: called once per micro-batch; its parameters are fp32 and alike on all ranks.
        optimizer: AdamW's constants.
        units: submodules that are gathered as one each (the decoder layers); everything else is the root's unit.
        collectives: the data-parallel group. For ``fsdp`` and ``zero`` torch.distributed is initialised.
        device: where this rank computes.
        added: names of the parameters that the base model lacks.
    """
    device = torch.device(device)
    root.to(device)
    if name == "single":
        from fathom.parallel.single import SingleStrategy

        return SingleStrategy(root, optimizer, collectives, device, added)
    if name == "fsdp":
        from fathom.parallel.fsdp import FsdpStrategy

        return FsdpStrategy(root, optimizer, units, collectives, device, added)
    if name == "zero":
        from fathom.parallel.zero import ZeroStrategy

        return ZeroStrategy(root, optimizer, collectives, device, added)
    raise ValueError(f"unknown strategy {name!r}: single, fsdp or zero")


def make_adamw(
    parameters: Mapping[str, nn.Parameter], cfg: OptimizerConfig, added: Collection[str] = ()
) -> torch.optim.AdamW:
    """The optimizer of every strategy; :func:`set_rate` gives it each step's learning rate.

    Only matrices decay: norms, biases and other 1-D parameters are scales and offsets that have no reason to be near
    zero (as the TaH2 paper has it, methods 1.7).

    Args:
        parameters: those that learn, by name, in their whole shapes.
        cfg: AdamW's constants.
        added: names of those that the base model lacks.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = cfg.weight_decay if parameter.dim() > 1 else 0.0
        factor = cfg.added_rate_factor if name in added else 1.0
        groups.setdefault((decay, factor), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": decay, RATE_FACTOR: factor}
            for (decay, factor), members in groups.items()
        ],
        lr=cfg.learning_rate,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.epsilon,
        foreach=True,
    )


def set_rate(groups: list[dict[str, Any]], learning_rate: float) -> None:
    """Give each of :func:`make_adamw`'s groups its own multiple of a step's learning rate."""
    for group in groups:
        group["lr"] = learning_rate * group[RATE_FACTOR]
