"""FSDP2: every parameter split along its first dimension, gathered layer by layer."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fathom.config.schema import OptimizerConfig
from fathom.model.collectives import Collectives
from fathom.parallel.single import SingleStrategy


class FsdpStrategy(SingleStrategy):
    """The single strategy on each rank's chunk; gathers and reductions are FSDP2's.

    Layers stay gathered from their first pass to their backward (``reshard_after_forward=False``): a looped layer
    runs several times in a forward, and resharding in between would gather it once per pass.
    """

    def __init__(
        self,
        root: nn.Module,
        optimizer: OptimizerConfig,
        units: Sequence[nn.Module],
        collectives: Collectives,
        device: torch.device,
        added: Collection[str] = (),
    ) -> None:
        # Keys and values leave a layer as views; nothing writes into them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(device.type, (collectives.world,))
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        fully_shard(root, mesh=mesh)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # Gradients are summed, not averaged. The factor is per module, not recursive, and gloo has no
                # pre-multiplied sum: it must be asked for a plain one.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        super().__init__(root, optimizer, collectives, device, added)

    def local(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            raise TypeError("FSDP2 left a tensor unsharded")
        detached: Any = tensor.detach()
        return detached.to_local().view(-1)

    def start(self, parameter: nn.Parameter) -> int:
        """Rank r holds rows r * ceil(n / world) on, none at all when those run out."""
        rows = -(-parameter.shape[0] // self.world)
        return min(self.rank * rows * (parameter.numel() // max(parameter.shape[0], 1)), parameter.numel())

    @torch.no_grad()
    def full_model_state(self) -> dict[str, Tensor] | None:
        state = {}
        for name, parameter in self.root.named_parameters():
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor()
            if self.rank == 0:
                state[name] = whole.to("cpu", copy=True)
        return state if self.rank == 0 else None
