"""Held-out measurements of a run: the base model, the converted model before its first step, the trained one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom.config.schema import RunConfig
from fathom.data.prepared import Prepared
from fathom.evals.heldout import HeldoutReport, heldout_nll
from fathom.model.folder import load_model
from fathom.model.looped import LoopedLM


def measure(cfg: RunConfig, model: LoopedLM, heldout: Prepared, device: torch.device) -> HeldoutReport:
    """Score a model in the recipe's precision, on all cores: the other workers wait."""
    model.to(device).eval()
    bf16 = cfg.train.precision == "bf16"
    with all_cores(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        return heldout_nll(model, heldout, cfg.train.micro_batch_tokens, head_chunk_rows=cfg.train.head_chunk_rows)


def measure_before(cfg: RunConfig, base: Path, heldout: Prepared, device: torch.device) -> dict[str, HeldoutReport]:
    """The base model as it was pretrained, unless the run starts from scratch, and as the method converts it."""
    reports = {}
    if cfg.model.weights == "pretrained":
        reports["base"] = measure(cfg, load_model(base), heldout, device)
    if cfg.method.preset == "standard" and reports:
        return reports
    converted = load_model(base, cfg.method, seed=cfg.seed, weights=cfg.model)
    return reports | {"converted": measure(cfg, converted, heldout, device)}


def with_weights(cfg: RunConfig, base: Path, weights: dict[str, Tensor]) -> LoopedLM:
    """An unsharded copy of the model with these parameters."""
    model = load_model(base, cfg.method, seed=cfg.seed, weights=cfg.model)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    lost = [name for name in missing if name in dict(model.named_parameters())]
    if lost or unexpected:
        raise RuntimeError(f"weights do not fit the model: {lost} missing, {unexpected} unexpected")
    return model


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Use every core of the machine for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(os.cpu_count() or 1, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def report_from_json(fields: dict[str, Any]) -> HeldoutReport:
    """What ``HeldoutReport.as_json`` gave, after a trip through JSON: its keys are depths again."""
    read: dict[str, Any] = {
        name: {int(depth): tuple(part) if isinstance(part, list) else part for depth, part in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }
    return HeldoutReport(**read)
