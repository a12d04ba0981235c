"""An append-only file of tracking events, and how far each server has acknowledged them.

The spool folder::

    events.jsonl     one event a line, with the time it happened; only ever appended to
    artifacts/       copies of the small files that events name
    servers.json     per tracking server: run id, experiment id, bytes of events.jsonl acknowledged
    rejected.jsonl   events that a server refused for good, with its reason
    writer.lock      held by whoever sends events, so that there is one writer

An event's timestamp is fixed when it is spooled, so sending it twice gives the same metric row, not two.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fathom.errors import ServiceError

ARTIFACT_LIMIT_BYTES = 50_000_000  # larger files belong into object storage


class Position(NamedTuple):
    """What one server knows of this spool.

    Attributes:
        run_id: the run there; empty before it exists.
        experiment_id: its experiment.
        offset: bytes of ``events.jsonl`` that arrived.
    """

    run_id: str = ""
    experiment_id: str = ""
    offset: int = 0


class Spool:
    """The events of one run. Safe to append to from several threads.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events = folder / "events.jsonl"
        self._append_lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, kind: str, **fields: Any) -> None:
        """Add an event with the present time; what the operating system has then survives a kill.

        Raises:
            OSError: the disk is full or not writable.
        """
        event = {"kind": kind, "time_ms": int(time.time() * 1000), **fields}
        line = json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._append_lock, open(self.events, "ab") as file:
            if file.tell() and not self._ends_with_newline():
                line = b"\n" + line  # a killed writer left half a line
            file.write(line)

    def _ends_with_newline(self) -> bool:
        with open(self.events, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def read(self, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Complete events after a byte offset, each with the offset behind it. Torn lines are passed over."""
        if not self.events.exists():
            return
        with open(self.events, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict) and "kind" in event:
                        yield event, offset

    def size(self) -> int:
        """Bytes of events."""
        return self.events.stat().st_size if self.events.exists() else 0

    def keep_artifact(self, source: Path) -> str:
        """Copy a small file into the spool.

        Returns:
            its path below the spool folder.

        Raises:
            ValueError: it is larger than 50 MB.
            OSError: it cannot be read, or the disk is full.
        """
        size = source.stat().st_size
        if size > ARTIFACT_LIMIT_BYTES:
            raise ValueError(f"{source} has {size:,} bytes; the limit is {ARTIFACT_LIMIT_BYTES:,}")
        name = f"artifacts/{secrets.token_hex(6)}/{source.name}"
        (self.folder / name).parent.mkdir(parents=True)
        shutil.copyfile(source, self.folder / name)
        return name

    def position(self, server: str) -> Position:
        """What a server has acknowledged; nothing when it was never reached."""
        return Position(**self._servers().get(server, {}))

    def acknowledge(self, server: str, position: Position) -> None:
        """Note what a server has."""
        self._replace("servers.json", {**self._servers(), server: position._asdict()})

    def _servers(self) -> dict[str, Any]:
        path = self.folder / "servers.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _replace(self, name: str, body: Any) -> None:
        partial = self.folder / f".{name}.partial"
        partial.write_text(json.dumps(body, indent=1), encoding="utf-8")
        os.replace(partial, self.folder / name)

    def reject(self, event: dict[str, Any], reason: str) -> None:
        """Keep an event that a server refused for good."""
        with open(self.folder / "rejected.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"reason": reason, "event": event}, ensure_ascii=False) + "\n")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one writer.

        Raises:
            ServiceError: another process is sending this spool's events.
        """
        with open(self.folder / "writer.lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ServiceError(
                    f"{self.folder}: a running job is sending these events", "wait until the job has ended"
                ) from error
            yield
