"""Bug reports of other platforms (training.md D.2) that concern checkpoints, one test each, by their number.

Here a checkpoint goes the way that a run's goes, begin, upload, commit, prune and sweep, without the training around
it; whole runs that are killed, or whose store misbehaves, are in tests/faults.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom.checkpoint.store import CheckpointStore
from fathom.storage import files, s3
from fathom.storage.local import LocalBackend
from fathom.storage.manifest import MANIFEST
from fathom.train.group import own_process
from fathom.train.saving import Staged, publish
from support.faulty_s3 import FaultyS3

WRITES = ("put", "write", "remove")
"""The backend's operations that change a store."""


class Killed(BaseException):
    """Stands for a SIGKILL: nothing may catch it and tidy up."""


def save(store: CheckpointStore, step: int, folder: Path) -> None:
    """What a run's checkpoint thread does; only the newest is kept."""
    staged = folder / f"staged-{step}"
    staged.mkdir(exist_ok=True)
    for name in ("rank-00000.safetensors", "rank-00000.json"):
        (staged / name).write_text(f"{name} of {step}" * 9)
    fault = publish(own_process(), store, Staged(step, [staged], {"step": step, "best": None}), keep=1)
    assert fault is None


def before_each_write(
    monkeypatch: pytest.MonkeyPatch, tell: Callable[[LocalBackend, str, tuple[Any, ...]], None]
) -> None:
    """Be told of every change of a store before it happens: backend, operation, arguments."""
    for name in WRITES:
        genuine = getattr(LocalBackend, name)

        def told(self: LocalBackend, *arguments: Any, name: str = name, genuine: Any = genuine) -> Any:
            tell(self, name, arguments)
            return genuine(self, *arguments)

        monkeypatch.setattr(LocalBackend, name, told)


def test_23_a_torn_checkpoint_is_never_picked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo Automodel PR 3261: killed before every write of one, with half of an upload done; the next start finds the
    last that was committed, goes on, and leaves no orphan."""
    found = []
    for nth in range(1, 100):
        store = CheckpointStore(str(tmp_path / f"store-{nth}"))
        save(store, 10, tmp_path)
        left = nth

        def die(backend: LocalBackend, name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "put":
                    Path(arguments[1]).parent.mkdir(parents=True, exist_ok=True)
                    Path(arguments[1]).write_bytes(arguments[0].read_bytes()[:7])
                raise Killed

        with monkeypatch.context() as patch:
            before_each_write(patch, die)
            try:
                save(store, 20, tmp_path)
                break
            except Killed:
                pass
        again = CheckpointStore(store.uri)
        newest = again.newest_readable(tmp_path / "got")
        assert newest is not None and (tmp_path / "got" / "rank-00000.json").read_text().endswith(str(newest.step))
        found.append(newest.step)
        again.sweep()
        save(again, 30, tmp_path)
        assert again.steps() == [30] and again.newest_readable(tmp_path / "got").step == 30
    assert found == sorted(found) and found.count(10) >= 4 and found.count(20) >= 2, found


def test_24_commit_then_point_then_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KempnerForge #102: however slow the store, a start at any moment finds a whole checkpoint, the old one until the
    new one's manifest is there, and only then does the pointer move and the old one go."""
    store, events = CheckpointStore(str(tmp_path / "store")), []
    save(store, 10, tmp_path)

    def look(backend: LocalBackend, name: str, arguments: tuple[Any, ...]) -> None:
        newest = CheckpointStore(store.uri).newest_readable(tmp_path / "got")
        assert newest is not None
        path = str(arguments[1 if name == "put" else 0]).rpartition("store/")[2].replace("step-000000", "")
        events.append(f"{newest.step}: {name} {path}")

    before_each_write(monkeypatch, look)
    save(store, 20, tmp_path)
    assert events == [
        f"10: remove 20/{MANIFEST}",
        "10: remove 20",
        "10: put 20/rank-00000.json",
        "10: put 20/rank-00000.safetensors",
        f"10: write 20/{MANIFEST}",
        "20: write LATEST",
        f"20: remove 10/{MANIFEST}",
        "20: remove 10",
    ]


def test_25_an_s3_that_breaks_connections_ends_nothing(
    s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ray #41137: what is committed is whole. Every operation under every fault: faults/test_faulty_s3.py."""
    monkeypatch.setattr(s3, "OPERATION_PAUSE_S", 0.01)
    with FaultyS3(os.environ["AWS_ENDPOINT_URL"]) as faulty:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
        store = CheckpointStore(files.join(s3_server, secrets.token_hex(4)))
        save(store, 10, tmp_path)
        faulty.every(4, "reset")
        for step in (20, 30):
            save(store, step, tmp_path)
            newest = CheckpointStore(store.uri).newest_readable(tmp_path / "got")
            assert newest is not None and newest.step == step
        assert faulty.faults >= 3
        faulty.always(None)
        assert store.steps() == [30]
