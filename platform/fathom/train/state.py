"""Training state from checkpoints, which any number of workers read; :mod:`fathom.train.saving` writes them."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fathom.checkpoint.shards import ShardReader
from fathom.checkpoint.store import CheckpointStore
from fathom.config.load import changed_keys, config_dict
from fathom.config.schema import RunConfig
from fathom.errors import CheckpointError, ResumeRefused
from fathom.parallel.strategy import Strategy
from fathom.train.group import Group
from fathom.train.progressed import Progressed


class Found(NamedTuple):
    """A checkpoint on this machine's disk, verified.

    Attributes:
        step: steps done.
        meta: what its writer said about it.
        folder: its files.
    """

    step: int
    meta: dict[str, Any]
    folder: Path


def find_checkpoint(group: Group, store: CheckpointStore, work: Path) -> Found | None:
    """The newest checkpoint whose bytes are right, fetched to this machine; None where a run begins.

    Raises:
        CheckpointError: machines see different checkpoints.
    """
    folder = work / "restored"
    note = folder.with_suffix(".json")
    if group.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        committed = store.newest_readable(folder)
        note.write_text(json.dumps(None if committed is None else [committed.step, committed.meta]))
    group.barrier()
    found = json.loads(note.read_text())
    steps = group.gather_json(found and found[0])
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"workers found different checkpoints: steps {steps}", "give all machines the same storage"
        )
    return found and Found(found[0], found[1], folder)


def refuse_changes(cfg: RunConfig, meta: dict[str, Any], allow_change: list[str]) -> None:
    """Raise ResumeRefused if a checkpoint was written by another configuration.

    Args:
        meta: of the checkpoint.
        allow_change: dotted keys that may differ; a section allows all its keys.
    """
    keys = changed_keys(meta["config"], config_dict(cfg))
    changed = [key for key in keys if not allowed(key, allow_change)]
    if changed:
        raise ResumeRefused(
            f"run {cfg.name!r} has a checkpoint at step {meta['step']} from another configuration: "
            f"{', '.join(changed)} changed",
            f"start over with --fresh, choose another name, or go on with {options(changed)}",
        )


def refuse_other_data(cfg: RunConfig, meta: dict[str, Any], data_digest: str, allow_change: list[str]) -> None:
    """Raise ResumeRefused if a checkpoint was trained on other tokens, unless ``data`` may differ."""
    if meta["data_digest"] != data_digest and not allowed("data.train", allow_change):
        raise ResumeRefused(
            f"run {cfg.name!r} has a checkpoint at step {meta['step']} that was trained on other data: "
            f"{', '.join(cfg.data.train_sources)} gives different tokens now",
            "restore the data, start over with --fresh, or go on with --allow-change data",
        )


def allowed(key: str, allow_change: list[str]) -> bool:
    """Whether a dotted key or one of its sections is in the list."""
    return any(key == each or key.startswith(f"{each}.") for each in allow_change)


def options(keys: list[str]) -> str:
    """The command-line options that allow these keys to differ."""
    return " ".join(f"--allow-change {key}" for key in keys)


def best_of(cfg: RunConfig, state: Progressed) -> dict[str, Any] | None:
    """Which checkpoint is the best one so far, and by what; None before any was measured."""
    if state.best_value is None:
        return None
    return {"step": state.best_step, "metric": cfg.checkpoint.best_metric, "value": state.best_value}


def read_weights(store: CheckpointStore, step: int, weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The model's weights as a committed checkpoint has them; those that it does not train as they are.

    Args:
        weights: of now, by the model's parameter names.
        folder: emptied, then holds the checkpoint while it is read.

    Raises:
        CheckpointError: the checkpoint is gone or damaged.
    """
    found = next((each for each in store.committed() if each.step == step), None)
    if found is None:
        raise CheckpointError(
            f"{store.folder(step)}: the best checkpoint is gone", "go on with --allow-change checkpoint.best_metric"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    store.fetch(found, folder)
    reader = ShardReader(folder)
    held = set(reader.keys())
    kind = "ema" if averaged(held) else "param"
    trained = {name: f"{kind}/model.{name}" for name in weights}
    read = {name: reader.read_all(key) for name, key in trained.items() if key in held}
    shutil.rmtree(folder)
    return weights | read


def restore_state(cfg: RunConfig, strategy: Strategy, folder: Path, meta: dict[str, Any]) -> Progressed:
    """Load parameters and moments from a fetched checkpoint; the run's own counters.

    What was best by another metric, or on other held-out data, is not the best any more.
    """
    state = Progressed.from_json(meta["progressed"])
    state.refused_in_a_row = 0
    changed = changed_keys(meta["config"], config_dict(cfg))
    if any(key == "checkpoint.best_metric" or key.startswith("data.") for key in changed):
        state.best_step, state.best_value, state.evals_since_best = 0, None, 0
    reader = ShardReader(folder)
    has_average = averaged(reader.keys())

    def read(key: str, start: int, stop: int) -> Tensor:
        # an average that this checkpoint lacks begins here, as the parameters are
        kept = key if has_average else key.replace("ema/", "param/", 1)
        return reader.read(kept, start, stop)

    strategy.load_shards(read, state.updates)
    return state


def averaged(keys: Iterable[str]) -> bool:
    """Whether a checkpoint holds an average of its parameters."""
    return any(key.startswith("ema/") for key in keys)
