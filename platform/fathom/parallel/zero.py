"""DeepSpeed ZeRO-3: parameters, gradients and moments partitioned flat and evenly, with padding.

What DeepSpeed 0.19 does unasked, and is told here not to: clip at 1.0, drop gradients on accumulation by hand, build
a shared-memory extension with a compiler on first use, build its own Adam, and pick CUDA beside a gloo group.
"""

import os
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from fathom.config.schema import OptimizerConfig
from fathom.model.collectives import Collectives
from fathom.parallel.strategy import MOMENTS, Reader, Shard, make_adamw, set_rate

PERSIST_ELEMENTS = 100_000
"""Parameters up to this size (norms, biases) stay gathered on every rank between steps."""


class ZeroStrategy:
    """ZeRO stage 3 in fp32 around torch's AdamW. Mixed precision is the root's own autocast.

    Args:
        persist_elements: see :data:`PERSIST_ELEMENTS`; tests use 0, or tiny models would not be partitioned at all.
    """

    def __init__(
        self,
        root: nn.Module,
        optimizer: OptimizerConfig,
        collectives: Collectives,
        device: torch.device,
        added: Collection[str] = (),
        persist_elements: int = PERSIST_ELEMENTS,
    ) -> None:
        deepspeed = import_deepspeed(device)
        self.rank, self.world = collectives.rank, collectives.world
        self.device = device
        self.collectives = collectives
        self.updates = 0
        # While the parameters still have their shapes, and before the engine takes them.
        trained = {name: parameter for name, parameter in root.named_parameters() if parameter.requires_grad}
        engine, partitioned, _, _ = deepspeed.initialize(
            model=root,
            optimizer=make_adamw(trained, optimizer, added),
            config=zero_config(optimizer.clip_norm, self.world, persist_elements),
            dist_init_required=False,
        )
        self.root = engine
        self.engine: Any = engine
        self.partitioned: Any = partitioned
        self.parameters: dict[str, Any] = trained

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; gradients here are sums.
        self.engine.backward(loss * self.world)

    def step(self, learning_rate: float, clip_norm: float) -> float:
        self.partitioned.clip_grad = clip_norm
        set_rate(self.partitioned.param_groups, learning_rate)
        self.engine.step()
        # A norm that is not finite discards the step inside DeepSpeed.
        self.updates += not self.partitioned.overflow
        return float(self.partitioned._global_grad_norm)

    def sum(self, tensor: Tensor) -> Tensor:
        return self.collectives.sum(tensor)

    def _span(self, parameter: Any) -> tuple[int, int]:
        """[start, stop) of this rank's partition, without its padding."""
        part = parameter.ds_tensor.numel()
        start = min(self.rank * part, parameter.ds_numel)
        return start, min(start + part, parameter.ds_numel)

    def parameter_shards(self) -> dict[str, Shard]:
        from deepspeed.utils import safe_get_local_fp32_param

        out = {}
        for name, parameter in self.parameters.items():
            start, stop = self._span(parameter)
            values = safe_get_local_fp32_param(parameter)[: stop - start]
            out[name] = Shard(values.detach(), tuple(parameter.ds_shape), start)
        return out

    def shards(self) -> dict[str, Shard]:
        from deepspeed.utils import safe_get_local_optimizer_state

        out = {}
        for name, held in self.parameter_shards().items():
            out[f"param/{name}"] = held
            for moment in MOMENTS:
                kept = torch.zeros_like(held.values)
                if self.updates:
                    state = safe_get_local_optimizer_state(self.parameters[name], moment)
                    kept = state[: held.values.numel()].detach()
                out[f"{moment}/{name}"] = held._replace(values=kept)
        return out

    @torch.no_grad()
    def load_shards(self, read: Reader, updates: int) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        self.updates = updates
        for flat in self.partitioned.fp32_partitioned_groups_flat:
            state = self.partitioned.optimizer.state[flat]
            state["step"] = torch.tensor(float(updates))
            state |= {moment: torch.zeros_like(flat) for moment in MOMENTS}
        persistent = self.partitioned.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
        for name, parameter in self.parameters.items():
            values = self._read(f"param/{name}", parameter, read)
            safe_set_local_fp32_param(parameter, values)
            parameter.ds_tensor.data.copy_(values)
            for moment in MOMENTS:
                safe_set_local_optimizer_state(parameter, self._read(f"{moment}/{name}", parameter, read), moment)
        if persistent:
            persistent[0].all_gather(persistent)

    def _read(self, key: str, parameter: Any, read: Reader) -> Tensor:
        """This rank's partition, padded with zeros as DeepSpeed keeps it."""
        start, stop = self._span(parameter)
        padded = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32, device=self.device)
        if stop > start:
            padded[: stop - start].copy_(read(key, start, stop))
        return padded

    @torch.no_grad()
    def full_model_state(self) -> dict[str, Tensor] | None:
        import deepspeed

        state = {}
        for name, parameter in self.root.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if self.rank == 0:
                    state[name] = parameter.detach().to("cpu", copy=True)
        return state if self.rank == 0 else None


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, set up for the device that the process group uses, without any compiler."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Of torch, about the names by which DeepSpeed calls it.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # Only `inference_all_reduce` uses it, and on first use it would be compiled for two minutes.
    __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def zero_config(clip_norm: float, world: int, persist_elements: int) -> dict[str, Any]:
    """DeepSpeed's configuration, with everything written out that has a default we must not get."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world,
        "gradient_clipping": clip_norm,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": persist_elements,
            "reduce_bucket_size": 5 * 10**7,
            "stage3_prefetch_bucket_size": 5 * 10**7 if persist_elements else 0,
            "stage3_max_live_parameters": 10**9 if persist_elements else 0,
            "stage3_max_reuse_distance": 10**9 if persist_elements else 0,
        },
    }
