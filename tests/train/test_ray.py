"""The real thing: two Ray Train workers, one of them killed, and the run ends as an undisturbed one does."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fathom.checkpoint.store import CheckpointStore
from fathom.errors import ConfigError, FathomError, ServiceError, StorageError, StorageUnavailable
from fathom.orchestrate.jobs import Jobs, for_cluster
from fathom.orchestrate.ray_train import judge, last_committed, share_of
from fathom.orchestrate.run import run_recipe
from fathom.storage.manifest import fetch_folder
from fathom.train.place import CHECKPOINTS
from support.runs import tiny_recipe


def train_processes(token_path: str) -> list[int]:
    """Process ids of the Ray Train workers of the cluster that this token opens, and of no other."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = token_path.encode() in (folder / "environ").read_bytes()
            if ours and b"RayTrainWorker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def kill_one_after(store: CheckpointStore, step: int, token_path: str, killed: list[int]) -> None:
    """SIGKILL a worker as soon as a checkpoint is committed."""
    while (latest := store.latest()) is None or latest.step < step:
        time.sleep(0.1)
    killed += train_processes(token_path)[:1]
    for process in killed:
        os.kill(process, signal.SIGKILL)


MEASURED = {
    "train__steps": 30,
    "train__eval_every_steps": 15,
    "train__ema_decay": 0.5,
    "checkpoint__best_metric": "heldout/nll",
}
"""Both workers hear what the first one measured of their average."""


@pytest.mark.timeout(600)
def test_a_worker_is_killed_and_the_run_ends_as_if_it_had_not_been(
    tmp_path: Path, ray_cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATHOM_HOME", ray_cluster["home"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ray_cluster["mlflow_uri"])
    cfg = tiny_recipe(
        tmp_path,
        parallel={"strategy": "fsdp", "workers": 2, "threads_per_worker": 1},
        checkpoint__every_steps=3,
        **MEASURED,
        tracking__register_as="tiny-ray",
    )
    killed: list[int] = []
    store = CheckpointStore(str(tmp_path / "store" / "runs" / cfg.name / CHECKPOINTS))
    killer = threading.Thread(target=kill_one_after, args=(store, 3, ray_cluster["token_path"], killed), daemon=True)
    killer.start()
    result = run_recipe(cfg, folder=tmp_path / "home")
    assert len(killed) == 1
    assert result.finished
    assert result.resumed_from >= 3
    assert (result.steps, result.updates) == (30, 30)
    alone = run_recipe(
        tiny_recipe(tmp_path, name="alone", storage=str(tmp_path / "alone"), **MEASURED), folder=tmp_path / "own"
    )
    assert result.best is not None and alone.best is not None
    assert result.best == alone.best | {"value": pytest.approx(alone.best["value"], rel=1e-3)}
    assert result.heldout["trained"]["nll"] == pytest.approx(alone.heldout["trained"]["nll"], rel=1e-3)
    assert result.model_uri is not None
    assert fetch_folder(result.model_uri, tmp_path / "model").digest == result.model_digest
    assert result.version == "1"
    assert run_recipe(cfg, folder=tmp_path / "home") == result, "a complete run is not repeated"


def test_a_job_that_no_cluster_answers_for_is_refused_soon() -> None:
    begin = time.monotonic()
    with pytest.raises(ServiceError, match="no Ray cluster answers at"):
        Jobs("http://127.0.0.1:9")
    assert time.monotonic() - begin < 10


def test_without_an_address_or_a_stack_there_is_nothing_to_submit_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="no Ray cluster is named"):
        Jobs()


def test_local_places_become_absolute_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny_recipe(tmp_path, storage="store")
    monkeypatch.chdir(tmp_path)
    assert for_cluster(cfg, on_this_machine=True).storage == str(tmp_path / "store")
    with pytest.raises(ConfigError, match="storage is 'store', a place on this machine"):
        for_cluster(cfg, on_this_machine=False)


class Failed(Exception):
    """As Ray's: wraps what the workers raised."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__("failed")
        self.worker_failures = dict(enumerate(errors))


def test_a_mistake_is_not_tried_again() -> None:
    with pytest.raises(ConfigError):
        judge(Failed(ConnectionError("peer"), ConfigError("wrong")), 0, set())


def test_a_failure_that_repeats_at_the_same_checkpoint_ends_the_run() -> None:
    known: set[tuple[int, str]] = set()
    judge(Failed(ValueError("bug")), 3, known)
    judge(Failed(ValueError("bug")), 6, known)
    with pytest.raises(FathomError, match="same failure twice without a new checkpoint after step 6: ValueError: bug"):
        judge(Failed(ValueError("bug")), 6, known)


def test_lost_workers_and_a_store_that_hiccups_are_tried_again() -> None:
    known: set[tuple[int, str]] = set()
    for _ in range(3):
        judge(Failed(RuntimeError("gloo: Connection closed by peer")), 3, known)
    assert not known, "another worker's death is nobody's own failure"
    judge(Failed(StorageError("unreachable")), 3, known)
    assert [step for step, _ in known] == [3]


def test_a_store_that_is_gone_ends_the_run_with_what_the_workers_say_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path))
    assert last_committed(store, ValueError("bug")) == 0

    def gone(self: CheckpointStore) -> None:
        raise StorageUnavailable("cannot reach it")

    monkeypatch.setattr(CheckpointStore, "latest", gone)
    with pytest.raises(StorageError, match="the state of step 6 is safe"):
        last_committed(store, Failed(RuntimeError("gloo"), StorageError("gone", "the state of step 6 is safe")))
    with pytest.raises(StorageUnavailable, match="cannot reach it"):
        last_committed(store, Failed(RuntimeError("gloo")))


@pytest.mark.parametrize(("cpus", "workers", "share"), [(4, 2, 1), (2, 2, 1), (1, 2, 0.5), (1, 3, 0.33)])
def test_workers_ask_for_so_little_that_all_fit(cpus: float, workers: int, share: float) -> None:
    assert share_of(cpus, workers) == share
