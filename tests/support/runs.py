"""Tiny runs: a random base model, generated questions, and a recipe for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fathom.config.load import parse_config
from fathom.config.schema import RunConfig
from fathom.train.group import own_process
from fathom.train.inputs import fetch_inputs
from fathom.train.place import Place
from fathom.train.session import Outcome, train_worker
from support.models import tiny_base_folder


def write_questions(path: Path, numbers: range) -> None:
    """Short sums with worked answers, one JSON row a line."""
    rows = [{"question": f"{n} + {n + 3}?", "answer": f"{n} and {n + 3} make {2 * n + 3}."} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tiny_recipe(folder: Path, **changes: Any) -> RunConfig:
    """A recipe of a few steps whose base model and data lie in ``folder``.

    Args:
        folder: receives ``base`` on first use, and the run's storage.
        changes: values by dotted key, with ``__`` for the dot.
    """
    base = folder / "base"
    if not base.exists():
        tiny_base_folder(base)
        write_questions(folder / "train.jsonl", range(8))
        write_questions(folder / "heldout.jsonl", range(8, 11))
    tree: dict[str, Any] = {
        "seed": 1,
        "name": "tiny",
        "storage": str(folder / "store"),
        "model": {"base": str(base)},
        "method": {"preset": "tah2", "max_depth": 2},
        "data": {
            "train": str(folder / "train.jsonl"),
            "heldout": str(folder / "heldout.jsonl"),
            "context_tokens": 100,
        },
        "optimizer": {"learning_rate": 1e-3},
        "train": {
            "steps": 6,
            "examples_per_step": 3,
            "micro_batch_tokens": 100,
            "precision": "fp32",
            "activation_checkpointing": False,
        },
        "parallel": {"threads_per_worker": 1},
        "checkpoint": {"every_steps": 3},
    }
    for key, value in changes.items():
        *sections, leaf = key.split("__")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value
    return parse_config(tree)


def train_here(
    cfg: RunConfig,
    place: Place,
    record: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    evaluate: Any = lambda step, weights: {},
) -> Outcome:
    """Train in this process, on its CPU."""
    group = own_process()._replace(device=torch.device("cpu"))
    place.work.mkdir(parents=True, exist_ok=True)
    return train_worker(cfg, fetch_inputs(cfg, group, place.work), place, group, record, evaluate)


def same(ours: Outcome, theirs: Outcome) -> bool:
    """Whether two runs ended with the same parameters, bit for bit."""
    assert ours.weights is not None and theirs.weights is not None
    return all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)
