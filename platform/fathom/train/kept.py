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

    Whichever workers run on those machines now store what lies there, however many they are. Other leftovers of
    earlier attempts are removed from this machine.

    Returns:
        the name of the series of checkpoints, which is another one after a fresh start.

    Raises:
        StorageError: the store refuses it again.
    """
    run, latest = group.gather_json([store.identity(), newest_step(store)] if group.rank == 0 else None)[0]
    here = kept_here(work) if group.local_rank == 0 else []
    told = [note for notes in group.gather_json([note for _, note in here]) for note in notes]
    told = [note for note in told if note["run"] == run and note["step"] > latest]
    if told:
        step = max(note["step"] for note in told)
        parts = {note["rank"]: note for note in told if note["step"] == step}
        missing = sorted(set(range(max(note["world"] for note in parts.values()))) - set(parts))
        if missing:
            log.warning(
                "step %d, which an earlier attempt kept, lacks the parts of workers %s: it is given up", step, missing
            )
        else:
            log.warning("storing step %d, which an earlier attempt kept", step)
            folders = [folder for folder, note in here if (note["run"], note["step"]) == (run, step)]
            fault = publish(group, store, Staged(step, folders, parts[0]["meta"]), keep)
            if fault is not None:
                raise not_stored(step, work, fault)
    group.barrier()
    if group.local_rank == 0:
        shutil.rmtree(work / STAGING, ignore_errors=True)
    return run


def newest_step(store: CheckpointStore) -> int:
    """Of the committed checkpoints; -1 without any."""
    latest = store.latest()
    return -1 if latest is None else latest.step


def kept_here(work: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The parts that were kept on this machine, each with its note; those whose bytes changed since do not count."""
    kept = []
    for folder in sorted((work / STAGING).glob("step-*")):
        if not (folder / MANIFEST).exists():
            continue
        try:
            manifest = read_manifest(str(folder))
            verify_files(str(folder), manifest.files, folder)
        except CheckpointError as error:
            log.warning("a kept checkpoint is passed over: %s", error.message)
            continue
        kept.append((folder, manifest.meta))
    return kept
