"""Checkpoints of one run in a store: ``{uri}/step-00000060/``, there only once its manifest is.

Every rank uploads its own files, then rank 0 commits. Whoever is killed in between leaves a folder without a
manifest, which no reader sees and :meth:`CheckpointStore.sweep` removes.
"""

import logging
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fathom.errors import CheckpointError, StorageError, StorageUnavailable
from fathom.storage import files
from fathom.storage.files import FileInfo
from fathom.storage.manifest import MANIFEST, Manifest, fetch_files, read_manifest, write_manifest

log = logging.getLogger(__name__)
IDENTITY, LATEST = "IDENTITY", "LATEST"
STEP_FOLDER = re.compile(r"step-(\d{8,})")


class Committed(NamedTuple):
    """A checkpoint that is complete.

    Attributes:
        step: optimizer steps done.
        uri: its folder.
        files: by relative name.
        meta: what the writer said: data cursor, config digest, probe loss.
        digest: of its manifest.
    """

    step: int
    uri: str
    files: dict[str, FileInfo]
    meta: dict[str, Any]
    digest: str


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        uri: folder or ``s3://`` prefix that belongs to the run.
    """

    def __init__(self, uri: str) -> None:
        self.uri = files.absolute(uri)

    def folder(self, step: int) -> str:
        """URI of a step's folder."""
        return files.join(self.uri, f"step-{step:08d}")

    def identity(self) -> str:
        """The name of this series of checkpoints, made when first asked for; after a fresh start it is another one."""
        where = files.join(self.uri, IDENTITY)
        if not files.exists(where):
            files.write_bytes(where, secrets.token_hex(8).encode())
        return files.read_bytes(where).decode()

    def begin(self, step: int) -> None:
        """Remove what an earlier attempt at this step left, so that nobody reads a mixture.

        Rank 0 only, before any rank uploads.
        """
        self._remove(step)

    def upload_rank(self, step: int, local: Path) -> dict[str, dict[str, Any]]:
        """Upload one rank's staged files, whose names no other rank uses, after :meth:`begin`.

        Returns:
            size and sha256 by file name, JSON-able: what :meth:`commit` wants from every rank.

        Raises:
            StorageError: the store refused, or a file arrived cut.
        """
        sent = files.upload_tree(local, self.folder(step), without=(MANIFEST,))
        return {name: info._asdict() for name, info in sent.items()}

    def commit(self, step: int, uploaded: Mapping[str, Mapping[str, Any]], meta: dict[str, Any]) -> Committed:
        """Make a step visible, once every rank has uploaded. Rank 0 only.

        Args:
            step: optimizer steps done.
            uploaded: what :meth:`upload_rank` returned, of all ranks together.
            meta: JSON that readers get back.

        Raises:
            CheckpointError: an uploaded file is not there.
            StorageError: the store refused.
        """
        uri = self.folder(step)
        unlisted = sorted(set(uploaded) - set(files.list_files(uri)))
        missing = [name for name in unlisted if not files.exists(files.join(uri, name))]
        if missing:
            raise CheckpointError(f"{uri}: {', '.join(missing)} did not arrive", "resume from the last checkpoint")
        contents = {name: FileInfo(int(info["size"]), str(info["sha256"])) for name, info in uploaded.items()}
        committed = _committed(step, uri, write_manifest(uri, contents, meta))
        files.write_bytes(files.join(self.uri, LATEST), str(step).encode())
        return committed

    def steps(self) -> list[int]:
        """Steps that have a folder, newest first, committed or not.

        The last one that was committed is among them even where a stale listing lacks it.
        """
        names = files.list_names(self.uri)
        found = {int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name))}
        latest = files.join(self.uri, LATEST)
        if files.exists(latest):
            found |= self._pointed(files.read_bytes(latest))
        return sorted(found, reverse=True)

    def _pointed(self, latest: bytes) -> set[int]:
        """The step that the pointer names, if complete. It is only a hint: a damaged one is passed over."""
        try:
            step = int(latest)
        except ValueError:
            log.warning("%s: %s is damaged and passed over", self.uri, LATEST)
            return set()
        return {step} if files.exists(files.join(self.folder(step), MANIFEST)) else set()

    def committed(self) -> list[Committed]:
        """Complete checkpoints, newest first. A manifest that does not parse is warned of and skipped."""
        kept = (self._read(step) for step in self.steps())
        return [checkpoint for checkpoint in kept if checkpoint is not None]

    def latest(self) -> Committed | None:
        """The newest complete checkpoint."""
        for step in self.steps():
            checkpoint = self._read(step)
            if checkpoint is not None:
                return checkpoint
        return None

    def fetch(self, checkpoint: Committed, local: Path) -> None:
        """Download a checkpoint and verify every byte.

        Raises:
            CheckpointError: a file is missing or damaged; the message names it.
            StorageError: the store refused.
        """
        fetch_files(checkpoint.uri, checkpoint.files, local)

    def newest_readable(self, local: Path) -> Committed | None:
        """Fetch the newest checkpoint whose bytes are intact; damaged ones are warned of and passed over.

        Args:
            local: emptied, then holds the files of the checkpoint that is returned.

        Raises:
            CheckpointError: there are checkpoints and every one is damaged.
        """
        damaged: list[int] = []
        for step in self.steps():
            checkpoint = self._read(step)
            if checkpoint is None:
                damaged += [step] if files.exists(files.join(self.folder(step), MANIFEST)) else []
                continue
            shutil.rmtree(local, ignore_errors=True)
            local.mkdir(parents=True)
            try:
                self.fetch(checkpoint, local)
            except CheckpointError as error:
                log.warning("checkpoint of step %d is passed over: %s", step, error.message)
                shutil.rmtree(local)
                damaged.append(step)
                continue
            return checkpoint
        if damaged:  # starting over in silence would cost hours, and in the end the old checkpoints
            raise CheckpointError(
                f"{self.uri}: every checkpoint is damaged (steps {', '.join(map(str, damaged))})",
                "restore one from a backup, or start over with --fresh",
            )
        return None

    def prune(self, keep: int, newest: int | None = None, spare: int | None = None) -> list[int]:
        """Remove all but the newest complete checkpoints.

        Args:
            keep: how many stay, at least 1.
            newest: the step that was just committed. Later ones were passed over, so they are damaged: they neither
                count nor go.
            spare: a step that stays besides, the best one.

        Returns:
            the steps removed.
        """
        complete = [found.step for found in self.committed() if newest is None or found.step <= newest]
        removed = [step for step in complete[max(keep, 1) :] if step != spare]
        for step in removed:
            self._remove(step)
        return removed

    def sweep(self) -> list[int]:
        """Remove what killed runs left: writes that were cut off, and folders without a manifest, older than the
        newest complete checkpoint. No upload may be under way.

        Returns:
            the steps removed.
        """
        try:
            files.tidy(self.uri)
        except StorageUnavailable:
            raise
        except StorageError as error:  # a key that may write need not have this right, nor every store this request
            log.warning("uploads that were cut off are not removed: %s", error.message)
        newest = self.latest()
        if newest is None:
            return []
        older = [step for step in self.steps() if step < newest.step]
        left = [step for step in older if not files.exists(files.join(self.folder(step), MANIFEST))]
        for step in left:
            self._remove(step)
        return left

    def _remove(self, step: int) -> None:
        """The manifest first: a reader that comes now sees no checkpoint rather than half of one."""
        files.remove_tree(files.join(self.folder(step), MANIFEST))
        files.remove_tree(self.folder(step))

    def _read(self, step: int) -> Committed | None:
        uri = self.folder(step)
        if not files.exists(files.join(uri, MANIFEST)):
            return None
        try:
            return _committed(step, uri, read_manifest(uri))
        except CheckpointError as error:
            log.warning("checkpoint of step %d is passed over: %s", step, error.message)
            return None


def _committed(step: int, uri: str, manifest: Manifest) -> Committed:
    return Committed(step, uri, manifest.files, manifest.meta, manifest.digest)
