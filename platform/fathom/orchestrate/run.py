"""A run as a whole: from a recipe to a measured, published, registered model.

All of it happens on the workers, rank 0 doing what is done once, so that one process writes to the tracker and
the machine that started the run needs nothing but the recipe.
"""

import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fathom.checkpoint.store import CheckpointStore
from fathom.config.load import config_digest
from fathom.config.schema import RunConfig
from fathom.data.sources import require_source
from fathom.errors import ResumeRefused
from fathom.model.fit import checked_method
from fathom.orchestrate.stack import stack_state, state_folder
from fathom.storage import files
from fathom.train.inputs import require_labels
from fathom.train.place import CHECKPOINTS, STOP, Place
from fathom.train.state import refuse_changes

RESULT = "result.json"


@dataclass(frozen=True)
class RunResult:
    """Summary of a run; JSON-able with :meth:`as_json`.

    Attributes:
        name: of the recipe.
        finished: False when it was stopped before its last step; then there is no model.
        config_digest: of the resolved recipe.
        steps, updates: optimizer steps done, and applied.
        refused_steps, empty_steps: not applied because the gradient was not finite; without a supervised token.
        tokens, supervised_tokens: trained on.
        train_seconds: in optimizer steps, over all attempts.
        tokens_per_second: over those.
        resumed_from: step of the checkpoint that the last attempt began from, 0 for none.
        best: step, metric and value of the best checkpoint, which is the published model; None without
            ``checkpoint.best_metric``.
        heldout: scores by model (``base``, ``converted``, ``trained``), each as ``HeldoutReport.as_json``.
        data: digests and counts.
        model_uri, model_digest: the published folder, and the digest of its manifest.
        registered_as, version: in the model registry, if it answered.
        run_id, run_url: in the tracker, if it answered.
        plots: URIs.
    """

    name: str
    finished: bool
    config_digest: str
    steps: int
    updates: int
    refused_steps: int
    empty_steps: int
    tokens: int
    supervised_tokens: int
    train_seconds: float
    tokens_per_second: float
    resumed_from: int
    best: dict[str, Any] | None
    heldout: dict[str, dict[str, Any]]
    data: dict[str, Any]
    model_uri: str | None
    model_digest: str | None
    registered_as: str | None
    version: str | None
    run_id: str | None
    run_url: str | None
    plots: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_recipe(
    cfg: RunConfig, fresh: bool = False, allow_change: list[str] | None = None, folder: Path | None = None
) -> RunResult:
    """Train a recipe, in this process (strategy ``single``) or on Ray workers, and do all that belongs to it.

    A run that was interrupted goes on from its last committed checkpoint; one that is complete is not repeated.

    Args:
        cfg: the recipe.
        fresh: forget what an earlier run of this name left.
        allow_change: configuration keys that may differ from those of the checkpoint.
        folder: where this machine keeps state; default :func:`fathom.orchestrate.stack.state_folder`.

    Raises:
        FathomError: a mistake in the recipe, its data or model; a refused resume; a service that does not answer.
    """
    checked_method(cfg.method)  # refuses an unknown one
    uri = files.absolute(files.join(cfg.storage, "runs", cfg.name))
    work = (folder or state_folder()) / "runs" / cfg.name
    place = Place(uri, work, allow_change or [])
    complete = None if fresh else complete_result(cfg, uri, place.allow_change)
    if complete is not None:
        note(f"run {cfg.name!r} is complete; --fresh starts it over")
        return complete
    check_sources(cfg)
    if fresh:
        files.remove_tree(uri)
        shutil.rmtree(work, ignore_errors=True)
    files.remove_tree(files.join(uri, STOP))
    committed = CheckpointStore(files.join(uri, CHECKPOINTS)).latest()
    if committed is not None:
        refuse_changes(cfg, committed.meta, place.allow_change)
    begin = time.monotonic()
    if cfg.parallel.strategy == "single":
        from fathom.orchestrate.worker import run_worker
        from fathom.train.group import own_process

        run_worker(cfg, place, tracking_uri(cfg), own_process())
    else:
        from fathom.orchestrate.ray_train import run_on_ray

        run_on_ray(cfg, place, tracking_uri(cfg))
    note(f"run {cfg.name!r} took {(time.monotonic() - begin) / 60:.1f} min")
    return read_result(uri)


def check_sources(cfg: RunConfig) -> None:
    """Open the recipe's data once, before anything is started, or removed for a fresh start.

    Raises:
        DataError, StorageError: a data file that cannot be opened.
        ConfigError: the method learns from depth labels, and nothing makes any.
    """
    require_labels(cfg)
    for source in cfg.data.train_sources:
        require_source("data.train", source)
    for key in ("heldout", "decontaminate_against"):
        if (source := getattr(cfg.data, key)) is not None:
            require_source(f"data.{key}", source)


def tracking_uri(cfg: RunConfig) -> str | None:
    """Where events go: the recipe's server, ``$MLFLOW_TRACKING_URI``, the local stack's; None keeps them spooled."""
    return cfg.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or stack_state().get("mlflow_uri")


def read_result(uri: str) -> RunResult:
    """The summary that a run's workers left in its storage."""
    return RunResult(**json.loads(files.read_bytes(files.join(uri, RESULT))))


def complete_result(cfg: RunConfig, uri: str, allow_change: list[str]) -> RunResult | None:
    """The summary of an earlier run that finished with this configuration; None where there is something to do.

    Raises:
        ResumeRefused: one of this name finished with another configuration, in keys that are not allowed to differ.
    """
    if not files.exists(files.join(uri, RESULT)):
        return None
    result = read_result(uri)
    if not result.finished:
        return None
    if result.config_digest != config_digest(cfg):
        committed = CheckpointStore(files.join(uri, CHECKPOINTS)).latest()
        if committed is not None:
            refuse_changes(cfg, committed.meta, allow_change)
            return None  # allowed to go on from there, for example for more steps
        raise ResumeRefused(
            f"run {cfg.name!r} finished with another configuration", "choose another name, or start over with --fresh"
        )
    return result


def note(line: str) -> None:
    """Tell the person at the terminal."""
    print(line, file=sys.stderr, flush=True)
