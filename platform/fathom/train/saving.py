"""Checkpoints while training goes on: staged to this machine's disk at once, stored by a thread of each worker.

The threads upload, agree that all did, and rank 0 commits, then drops old checkpoints: that order holds however slow
the store is. One checkpoint is on its way at most; the next one waits for it, and so does the run's end. A store that
is away stalls the upload alone, until :data:`PATIENCE_S` are over: then the newest state is left on the disk,
complete, and the next start stores it first (:mod:`fathom.train.kept`).
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from fathom.checkpoint.shards import FlatShard, write_shards
from fathom.checkpoint.store import CheckpointStore
from fathom.config.load import config_dict, config_digest
from fathom.config.schema import RunConfig
from fathom.errors import FathomError, StorageError
from fathom.parallel.strategy import Strategy
from fathom.storage.manifest import seal_folder
from fathom.storage.patience import patiently
from fathom.train.group import Group
from fathom.train.progressed import Progressed
from fathom.train.state import best_of

log = logging.getLogger(__name__)
STAGING = "staging"
PATIENCE_S = 600.0
"""How long a checkpoint waits for a store that is away, before the run gives up."""


class Staged(NamedTuple):
    """A checkpoint of which this worker has a part on its disk.

    Attributes:
        step: optimizer steps done.
        folders: the part's files; after a restart perhaps the parts of several workers, or of none.
        meta: of the checkpoint, alike on all workers.
    """

    step: int
    folders: list[Path]
    meta: dict[str, Any]


class Saver:
    """Makes a run's checkpoints; called on all workers in step. As a context it lets none of them be cut off.

    Args:
        cfg: the recipe.
        strategy: holds the state.
        group: the workers.
        store: where checkpoints go.
        data_digest: of the training data, told in every checkpoint.
        work: of this machine's disk.
        run: from :func:`fathom.train.kept.store_kept`.
        committed: the step that this attempt goes on from.
        alive: told while a checkpoint waits for its store, which is no hang.

    Attributes:
        committed: the newest step that is safe in the store.
    """

    def __init__(
        self,
        cfg: RunConfig,
        strategy: Strategy,
        group: Group,
        store: CheckpointStore,
        data_digest: str,
        work: Path,
        run: str,
        committed: int,
        alive: Callable[[], None],
    ) -> None:
        self.cfg = cfg
        self.strategy = strategy
        self.group = group
        self.aside = group.aside()
        self.store = store
        self.data_digest = data_digest
        self.work = work
        self.run = run
        self.committed = committed
        self.alive = alive
        self.under_way: tuple[threading.Thread, Staged, float] | None = None
        self.fault: Exception | None = None

    def save(self, state: Progressed, wait: bool) -> None:
        """Stage the state as it is now, and store it beside training.

        Args:
            state: the run's counters.
            wait: return only when it is committed.

        Raises:
            StorageError: this checkpoint or the one before could not be stored; the state is on the workers' disks.
        """
        fault = self.settle()
        staged = self.stage(state)
        if fault is None:
            thread = threading.Thread(target=self.store_staged, args=(staged,), name="checkpoint", daemon=True)
            self.under_way = (thread, staged, time.monotonic())
            thread.start()
            fault = self.settle() if wait else None
        if fault is not None:
            error = self.keep(staged, fault)
            self.group.barrier()  # nobody leaves, which would end the others, before all have kept theirs
            raise error

    def stage(self, state: Progressed) -> Staged:
        """Write this worker's part to its disk."""
        folder = self.work / STAGING / f"step-{state.step:08d}-rank-{self.group.rank:05d}"
        shutil.rmtree(folder, ignore_errors=True)
        shards = {key: FlatShard(*shard) for key, shard in self.strategy.shards().items()}
        write_shards(folder, self.group.rank, self.group.world, shards)
        meta = {
            "step": state.step,
            "config": config_dict(self.cfg),
            "config_digest": config_digest(self.cfg),
            "data_digest": self.data_digest,
            "best": best_of(self.cfg, state),
            "progressed": state.as_json(),
        }
        return Staged(state.step, [folder], meta)

    def store_staged(self, staged: Staged) -> None:
        """What the thread does."""
        try:
            self.fault = publish(self.aside, self.store, staged, self.cfg.checkpoint.keep)
            if self.fault is None:
                self.committed = staged.step
        except Exception as error:  # another worker is gone
            self.fault = error

    def settle(self) -> Exception | None:
        """Wait for the checkpoint that is under way; what went wrong with it, alike on all workers."""
        if self.under_way is not None:
            thread, _, since = self.under_way
            thread.join(1.0)
            while thread.is_alive():
                if time.monotonic() - since < PATIENCE_S:
                    self.alive()
                thread.join(1.0)
        self.under_way, fault, self.fault = None, self.fault, None
        return fault

    def keep(self, staged: Staged, fault: Exception) -> Exception:
        """Leave a checkpoint that the store would not take to the next start; the error to raise."""
        if not isinstance(fault, StorageError):
            return fault
        note = {"run": self.run, "step": staged.step, "rank": self.group.rank, "world": self.group.world}
        seal_folder(staged.folders[0], note | {"meta": staged.meta if self.group.rank == 0 else None})
        return not_stored(staged.step, self.work, fault)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Let a checkpoint that is under way arrive, whatever ended training; only ctrl-C does not wait."""
        if self.under_way is None or (kind is not None and issubclass(kind, KeyboardInterrupt)):
            return
        staged = self.under_way[1]
        fault = self.settle()
        if fault is not None:
            log.error("%s", self.keep(staged, fault))


def not_stored(step: int, work: Path, fault: StorageError) -> StorageError:
    """The error that ends a run whose store does not take its checkpoints."""
    return StorageError(
        f"checkpoints cannot be stored: {fault.message}",
        f"{fault.remedy}; the state of step {step} is safe in {work / STAGING} on each worker's machine, and the same "
        "command stores it and goes on from there",
    )


def publish(group: Group, store: CheckpointStore, staged: Staged, keep: int) -> StorageError | None:
    """Upload all workers' parts; then rank 0 commits and, after that, drops old checkpoints. All of it has
    :data:`PATIENCE_S` together.

    Returns:
        what went wrong, alike on all workers; None when the checkpoint is committed.
    """
    end = time.monotonic() + PATIENCE_S
    _, fault = agreed(group, end, (lambda: store.begin(staged.step)) if group.rank == 0 else None)
    if fault is None:
        every, fault = agreed(group, end, lambda: upload(store, staged))
        if fault is None:
            uploaded = {name: info for each in every for name, info in each.items()}
            _, fault = agreed(group, end, (lambda: commit(store, staged, uploaded, keep)) if group.rank == 0 else None)
    if fault is None:
        for folder in staged.folders:
            shutil.rmtree(folder, ignore_errors=True)
    return fault


def upload(store: CheckpointStore, staged: Staged) -> dict[str, Any]:
    """All files that this worker has of a checkpoint; their sizes and digests by name."""
    sent: dict[str, Any] = {}
    for folder in staged.folders:
        sent |= store.upload_rank(staged.step, folder)
    return sent


def commit(store: CheckpointStore, staged: Staged, uploaded: dict[str, Any], keep: int) -> None:
    """Make a checkpoint visible, then drop those that it replaces and what was never finished before it."""
    store.commit(staged.step, uploaded, staged.meta)
    best = staged.meta["best"]
    store.prune(keep, staged.step, spare=None if best is None else best["step"])
    store.sweep()


def agreed(group: Group, end: float, action: Callable[[], Any] | None) -> tuple[list[Any], StorageError | None]:
    """Do this worker's part, patiently until ``end``, then hear of all others: what each did, and the first thing that
    went wrong."""
    told: dict[str, Any] = {"done": None}
    if action is not None:
        try:
            told = {"done": patiently(action, end - time.monotonic())}
        except FathomError as error:
            told = {"fault": [error.message, error.remedy]}
        except Exception as error:  # a defect: the others must hear of it, or they would wait
            log.exception("a checkpoint could not be stored")
            told = {"fault": [f"{type(error).__name__}: {error}", "read the traceback in this worker's output"]}
    every = group.gather_json(told)
    faults = [StorageError(*each["fault"]) for each in every if "fault" in each]
    return [each.get("done") for each in every], faults[0] if faults else None
