"""An exponential moving average of the parameters beside any strategy, sharded as its parameters are."""

import torch
from torch import Tensor

from fathom.parallel.strategy import Reader, Shard, Strategy


class AveragedStrategy:
    """A strategy whose model is the average: ``a <- decay a + (1 - decay) p`` after every applied step.

    Training goes on from the parameters. What :meth:`full_model_state` gives, and so what is evaluated and published,
    is the average. It begins as the parameters do, costs one more fp32 copy of this rank's ranges, and is in the state
    as ``ema/NAME``.

    Args:
        inner: what trains.
        decay: above 0, below 1.
    """

    def __init__(self, inner: Strategy, decay: float) -> None:
        self.inner, self.decay = inner, decay
        self.rank, self.world, self.device = inner.rank, inner.world, inner.device
        self.collectives, self.root, self.updates = inner.collectives, inner.root, inner.updates
        self.averages = {name: held.values.clone() for name, held in inner.parameter_shards().items()}

    def backward(self, loss: Tensor, last: bool) -> None:
        self.inner.backward(loss, last)

    def step(self, learning_rate: float, clip_norm: float) -> float:
        norm = self.inner.step(learning_rate, clip_norm)
        if self.inner.updates > self.updates:
            held = self.inner.parameter_shards()
            parameters = [held[name].values for name in self.averages]
            torch._foreach_lerp_(list(self.averages.values()), parameters, 1.0 - self.decay)
        self.updates = self.inner.updates
        return norm

    def sum(self, tensor: Tensor) -> Tensor:
        return self.inner.sum(tensor)

    def parameter_shards(self) -> dict[str, Shard]:
        return self.inner.parameter_shards()

    def shards(self) -> dict[str, Shard]:
        held = self.inner.parameter_shards()
        averages = {f"ema/{name}": held[name]._replace(values=values) for name, values in self.averages.items()}
        return self.inner.shards() | averages

    def load_shards(self, read: Reader, updates: int) -> None:
        self.inner.load_shards(read, updates)
        self.updates = updates
        for name, held in self.inner.parameter_shards().items():
            if held.values.numel():
                self.averages[name].copy_(read(f"ema/{name}", held.start, held.start + held.values.numel()))

    @torch.no_grad()
    def full_model_state(self) -> dict[str, Tensor] | None:
        state = self.inner.full_model_state()  # with what is not trained
        for name, held in self.inner.parameter_shards().items():
            whole = self.collectives.gather(self.averages[name])  # ranges are in rank order
            if state is not None:
                state[name] = whole.view(held.shape).to("cpu", copy=True)
        return state
