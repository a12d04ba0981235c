"""Checkpoints beside training: a store that is slow, away or gone holds up its own uploads and loses nothing."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from fathom.checkpoint.store import CheckpointStore
from fathom.errors import StorageError, StorageUnavailable
from fathom.storage import files, patience
from fathom.storage.local import LocalBackend
from fathom.storage.manifest import MANIFEST
from fathom.train import saving, session
from fathom.train.place import CHECKPOINTS, Place
from support.runs import same, tiny_recipe, train_here


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "store" / "runs" / "tiny"), tmp_path / "work", [])


@pytest.fixture
def elsewhere(tmp_path: Path) -> Place:
    """Of a run that nothing disturbs."""
    return Place(str(tmp_path / "other"), tmp_path / "other-work", [])


def checkpoints(place: Place) -> CheckpointStore:
    return CheckpointStore(files.join(place.uri, CHECKPOINTS))


class Away:
    """Uploads of checkpoints fail while ``away``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = False
        genuine = LocalBackend.put

        def put(backend: LocalBackend, local: Path, path: str) -> None:
            if self.away and "/step-" in path:
                raise StorageUnavailable("the store is away", "wait")
            genuine(backend, local, path)

        monkeypatch.setattr(LocalBackend, "put", put)
        monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.02)


def test_a_checkpoint_is_committed_before_the_old_one_goes_and_the_next_one_waits(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_recipe(tmp_path, checkpoint__every_steps=2, checkpoint__keep=1)
    events: list[str] = []
    trained = threading.Event()

    def tell(name: str, path_at: int) -> None:
        genuine = getattr(LocalBackend, name)

        def telling(self: LocalBackend, *arguments: object) -> object:
            what = str(arguments[path_at]).partition("/step-0000000")[2]
            if (name, what) == ("put", "2/rank-00000.safetensors"):
                assert trained.wait(60), "training waits for an upload"
            result = genuine(self, *arguments)
            events.append(f"{name} {what}") if what else None
            return result

        monkeypatch.setattr(LocalBackend, name, telling)

    for name, path_at in (("put", 1), ("write", 0), ("remove", 0)):
        tell(name, path_at)

    def record(step: int, metrics: dict[str, float]) -> None:
        if step == 4:
            trained.set()

    train_here(cfg, place, record)
    expected = []
    for step in (2, 4, 6):
        expected += [f"remove {step}/{MANIFEST}", f"remove {step}"]
        expected += [f"put {step}/rank-00000.json", f"put {step}/rank-00000.safetensors", f"write {step}/{MANIFEST}"]
        expected += [f"remove {step - 2}/{MANIFEST}", f"remove {step - 2}"] if step > 2 else []
    assert events == expected


def test_a_store_that_comes_back_has_held_up_no_step(
    tmp_path: Path, place: Place, elsewhere: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = tiny_recipe(tmp_path)  # checkpoints at 3 and 6
    store, seen = Away(monkeypatch), []

    def record(step: int, metrics: dict[str, float]) -> None:
        store.away = step in (3, 4)
        seen.append((step, [each.step for each in checkpoints(place).committed()]))

    outcome = train_here(cfg, place, record)
    assert seen == [(step, []) for step in range(1, 6)] + [(6, seen[5][1])]
    assert checkpoints(place).steps() == [6, 3]
    assert "the store is away; trying again" in caplog.text
    assert same(outcome, train_here(cfg, elsewhere))


def test_a_checkpoint_that_waits_for_its_store_is_no_hang(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, beats = Away(monkeypatch), []

    @contextlib.contextmanager
    def watched(place: Place, rank: int, timeout_s: float) -> Iterator[Callable[[], None]]:
        yield lambda: beats.append(time.monotonic())

    def record(step: int, metrics: dict[str, float]) -> None:
        if step == 6:  # the last: the run waits for its checkpoint
            store.away = True
            threading.Timer(3.0, setattr, (store, "away", False)).start()

    monkeypatch.setattr(session, "watched", watched)
    began = time.monotonic()
    train_here(tiny_recipe(tmp_path), place, record)
    assert checkpoints(place).latest().step == 6 and time.monotonic() - began > 3.0
    assert max(late - early for early, late in pairwise(beats)) < 2.0


@pytest.mark.parametrize("fresh", [False, True])
def test_a_store_that_is_gone_ends_the_run_whose_state_the_next_start_stores(
    fresh: bool, tmp_path: Path, place: Place, elsewhere: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_recipe(tmp_path, train__steps=8, checkpoint__every_steps=2)
    store = Away(monkeypatch)
    monkeypatch.setattr(saving, "PATIENCE_S", 0.1)

    def record(step: int, metrics: dict[str, float]) -> None:
        store.away = step >= 4  # that of 4 fails, which is known at 6

    with pytest.raises(StorageError, match="cannot be stored: the store is away") as caught:
        train_here(cfg, place, record)
    assert f"the state of step 6 is safe in {place.work / 'staging'}" in caught.value.remedy
    assert checkpoints(place).latest().step == 2
    with pytest.raises(StorageError, match="cannot be stored") as caught:
        train_here(cfg, place)  # it is still away, and trying loses nothing
    assert "the state of step 6 is safe" in caught.value.remedy
    store.away = False
    if fresh:
        files.remove_tree(place.uri)
    resumed = train_here(cfg, place)
    assert resumed.started_at == (0 if fresh else 6)
    assert same(resumed, train_here(cfg, elsewhere))
    assert list((place.work / "staging").iterdir()) == []


def test_a_kept_state_whose_bytes_changed_is_not_stored(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = tiny_recipe(tmp_path)
    store = Away(monkeypatch)
    monkeypatch.setattr(saving, "PATIENCE_S", 0.1)

    def record(step: int, metrics: dict[str, float]) -> None:
        store.away = step >= 4

    with pytest.raises(StorageError, match="cannot be stored"):
        train_here(cfg, place, record)
    (kept,) = (place.work / "staging").glob("*/rank-00000.safetensors")
    data = kept.read_bytes()
    kept.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    store.away = False
    assert train_here(cfg, place).started_at == 3
    assert "kept checkpoint is passed over" in caplog.text


def test_what_a_killed_run_left_goes_when_a_later_step_is_committed(tmp_path: Path, place: Place) -> None:
    files.write_bytes(files.join(checkpoints(place).folder(1), "rank-00000.json"), b"of a run that was asked to stop")
    train_here(tiny_recipe(tmp_path), place)
    assert checkpoints(place).steps() == [6, 3]


def test_an_error_of_training_waits_for_the_checkpoint_under_way(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Away(monkeypatch)

    def record(step: int, metrics: dict[str, float]) -> None:
        store.away = step == 3
        if step == 4:
            threading.Timer(0.2, setattr, (store, "away", False)).start()
            store.away = True
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        train_here(tiny_recipe(tmp_path), place, record)
    assert checkpoints(place).steps() == [3]
