"""What a step asked of the machine: memory, and the share of its peak arithmetic that training used."""

import re
import resource
import sys

import torch

from fathom.config.schema import RunConfig
from fathom.model.looped import LoopedLM
from fathom.objectives.table import objective_of

PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 990e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Dense bf16 FLOP/s by NVIDIA's data sheets; the first name that is in a device's counts."""
BACKWARD = 2.0
"""FLOPs of a backward over those of its forward."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak of one device, FLOP/s; None for one that is not in the table, and for fp32."""
    if precision != "bf16":
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory of this process so far: allocated on its GPU, or resident on the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def machine_metrics(
    cfg: RunConfig, model: LoopedLM, device: torch.device, world: int, flops_per_token: float, tokens_per_second: float
) -> dict[str, float]:
    """``peak_memory_bytes`` of this process; and ``mfu``, model FLOPs utilisation, where it has a meaning.

    Its FLOPs are the forward's at the depths that were run, and the backward's. Look-ahead and recomputation cost time
    and are not counted. Where some passes have no backward it is left out.

    Args:
        cfg: the recipe.
        model: what is trained.
        device: of this process.
        world: devices that share the tokens.
        flops_per_token: of the forward.
        tokens_per_second: over all devices.
    """
    found = {"peak_memory_bytes": float(peak_memory_bytes(device))}
    if device.type != "cuda" or not every_pass_learns(cfg, model):
        return found
    peak = peak_flops(torch.cuda.get_device_name(device), cfg.train.precision)
    if peak is not None:
        found["mfu"] = (1.0 + BACKWARD) * flops_per_token * tokens_per_second / (world * peak)
    return found


def every_pass_learns(cfg: RunConfig, model: LoopedLM) -> bool:
    """Whether all that is run forward is also run backward."""
    objective = objective_of(model.method, cfg.objective)
    return objective.trains == "all" and not objective.alternates_gradient and cfg.objective.mean_depth is None
