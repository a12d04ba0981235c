"""One process, nothing sharded: the reference that the other strategies are tested against."""

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from fathom.config.schema import OptimizerConfig
from fathom.model.collectives import Collectives
from fathom.parallel.strategy import MOMENTS, Reader, Shard, make_adamw, set_rate


class SingleStrategy:
    """AdamW on parameters of which this process holds a contiguous range each: here, all of it."""

    def __init__(
        self,
        root: nn.Module,
        optimizer: OptimizerConfig,
        collectives: Collectives,
        device: torch.device,
        added: Collection[str] = (),
    ) -> None:
        self.rank, self.world = collectives.rank, collectives.world
        self.device = device
        self.collectives = collectives
        self.root = root
        self.updates = 0
        self.parameters = {name: p for name, p in root.named_parameters() if p.requires_grad}
        self.optimizer = make_adamw(self.parameters, optimizer, added)

    def local(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a parameter, gradient or moment, flat and without a copy."""
        return tensor.detach().view(-1)

    def start(self, parameter: nn.Parameter) -> int:
        """Index of this rank's first value in the flattened parameter."""
        return 0

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float, clip_norm: float) -> float:
        gradients = [self.local(p.grad) for p in self.parameters.values() if p.grad is not None]
        norm = self._norm(gradients)
        if math.isfinite(norm):
            # The small constant is PyTorch's and DeepSpeed's: all strategies clip to the same bit of rounding.
            if norm + 1e-6 > clip_norm:
                torch._foreach_mul_(gradients, clip_norm / (norm + 1e-6))
            set_rate(self.optimizer.param_groups, learning_rate)
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _norm(self, gradients: list[Tensor]) -> float:
        held = [gradient for gradient in gradients if gradient.numel()]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        if held:
            squares = torch.stack(torch._foreach_norm(held)).double().square().sum()
        return math.sqrt(float(self.sum(squares)))

    def sum(self, tensor: Tensor) -> Tensor:
        return self.collectives.sum(tensor)

    def parameter_shards(self) -> dict[str, Shard]:
        return {name: Shard(self.local(p), tuple(p.shape), self.start(p)) for name, p in self.parameters.items()}

    def shards(self) -> dict[str, Shard]:
        out = {}
        for name, held in self.parameter_shards().items():
            out[f"param/{name}"] = held
            state = self.optimizer.state.get(self.parameters[name])
            for moment in MOMENTS:
                kept = self.local(state[moment]) if state else torch.zeros_like(held.values)
                out[f"{moment}/{name}"] = held._replace(values=kept)
        return out

    @torch.no_grad()
    def load_shards(self, read: Reader, updates: int) -> None:
        self.updates = updates
        for name, parameter in self.parameters.items():
            self._fill(parameter, f"param/{name}", parameter, read)
            state = self.optimizer.state[parameter]
            state["step"] = torch.tensor(float(updates))
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter)
                self._fill(state[moment], f"{moment}/{name}", parameter, read)

    def _fill(self, tensor: Tensor, key: str, parameter: nn.Parameter, read: Reader) -> None:
        mine, start = self.local(tensor), self.start(parameter)
        if mine.numel():
            mine.copy_(read(key, start, start + mine.numel()))

    def full_model_state(self) -> dict[str, Tensor] | None:
        return {name: value.detach().to("cpu", copy=True) for name, value in self.root.named_parameters()}
