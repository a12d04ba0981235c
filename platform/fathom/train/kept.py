"""Checkpoints that a store would not take, left on the workers' disks for the next start to store."""

import logging
import shutil
from pathlib import Path
from typing import Any

from fathom.checkpoint.store import CheckpointStore
from fathom.errors import CheckpointError
from fathom.storage.manifest import MANIFEST, read_manifest, verify_files
from fathom.train.group import Group
from fathom.train.saving import STAGING, Staged, not_stored, publish

log = logging.getLogger(__name__)


def store_kept(group: Group, store: CheckpointStore, work: Path, keep: int) -> str:
    """Store what an earlier attempt had to keep on its workers' disks, if all of it is there and newer than the store.

    Other leftovers of earlier attempts are removed from this machine.

    Returns:
        the name of the series of checkpoints, which is another one after a fresh start.

    Raises:
        StorageError: the store refuses it again.
    """
    run, latest = group.gather_json([store.identity(), newest_step(store)] if group.rank == 0 else None)[0]
    kept = kept_here(work, group.rank)
    told = group.gather_json(kept and [kept[1]["run"], kept[1]["world"], kept[0].step])
    if kept is not None and told == [[run, group.world, kept[0].step]] * group.world and kept[0].step > latest:
        log.warning("storing step %d, which an earlier attempt kept", kept[0].step)
        fault = publish(group, store, kept[0], keep)
        if fault is not None:
            raise not_stored(kept[0], fault)
    group.barrier()
    if group.local_rank == 0:
        shutil.rmtree(work / STAGING, ignore_errors=True)
    return run


def newest_step(store: CheckpointStore) -> int:
    """Of the committed checkpoints; -1 without any."""
    latest = store.latest()
    return -1 if latest is None else latest.step


def kept_here(work: Path, rank: int) -> tuple[Staged, dict[str, Any]] | None:
    """This worker's newest kept part and its note; one whose bytes changed since does not count."""
    for folder in sorted((work / STAGING).glob(f"step-*-rank-{rank:05d}"), reverse=True):
        if not (folder / MANIFEST).exists():
            continue
        try:
            manifest = read_manifest(str(folder))
            verify_files(str(folder), manifest.files, folder)
        except CheckpointError as error:
            log.warning("a kept checkpoint is passed over: %s", error.message)
            continue
        meta = manifest.meta["meta"]
        return Staged(meta["step"], folder, meta), manifest.meta
    return None
