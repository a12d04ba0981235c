"""Whole runs on an S3 store that misbehaves end as runs on a good one."""

import os
import secrets
from pathlib import Path

import pytest

from fathom.checkpoint.store import CheckpointStore
from fathom.config.schema import RunConfig
from fathom.storage import files, patience, s3
from fathom.train.place import CHECKPOINTS, Place
from fathom.train.session import Outcome
from support.faulty_s3 import FaultyS3
from support.runs import same, tiny_recipe, train_here


class Killed(BaseException):
    """Stands for a SIGKILL."""


def run_twice(cfg: RunConfig, place: Place, kill_after: int) -> Outcome:
    """A run that is killed, then goes on."""

    def record(step: int, metrics: dict[str, float]) -> None:
        if step == kill_after:
            raise Killed

    with pytest.raises(Killed):
        train_here(cfg, place, record)
    return train_here(cfg, place)


def test_one_request_in_twenty_goes_wrong(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny_recipe(tmp_path, train__steps=5, checkpoint__every_steps=2, checkpoint__keep=1)
    whole = train_here(cfg, Place(str(tmp_path / "whole"), tmp_path / "whole-work", []))
    with FaultyS3(os.environ["AWS_ENDPOINT_URL"]) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        place = Place(files.join(s3_server, secrets.token_hex(4)), tmp_path / "work", [])
        store.every(20, "slow down", "reset", "cut", "stale")
        outcome = run_twice(cfg, place, kill_after=3)
        assert outcome.started_at == 2
        assert same(outcome, whole)
        assert store.faults >= 4
        checkpoints = CheckpointStore(files.join(place.uri, CHECKPOINTS))
        store.always(None)
        assert checkpoints.steps() == [5]
        assert checkpoints.newest_readable(tmp_path / "got").step == 5


def test_a_store_that_is_dead_for_a_while_holds_up_no_step(
    s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_recipe(tmp_path)
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.5)
    with FaultyS3(os.environ["AWS_ENDPOINT_URL"]) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setattr(s3, "PROBE_AGAIN_S", 0.0)
        place = Place(files.join(s3_server, secrets.token_hex(4)), tmp_path / "work", [])
        faults = []

        def record(step: int, metrics: dict[str, float]) -> None:
            if step in (3, 5):  # the checkpoint of step 3 cannot go before step 5 is done
                store.always("reset" if step == 3 else None)
                faults.append(store.faults)

        assert train_here(cfg, place, record).finished
        assert CheckpointStore(files.join(place.uri, CHECKPOINTS)).steps() == [6, 3]
        assert faults[0] == 0


def test_a_listing_that_is_old_hides_nothing(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny_recipe(tmp_path, train__steps=5, checkpoint__every_steps=2, checkpoint__keep=1)
    with FaultyS3(os.environ["AWS_ENDPOINT_URL"]) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        place = Place(files.join(s3_server, secrets.token_hex(4)), tmp_path / "work", [])
        store.always("stale")
        assert run_twice(cfg, place, kill_after=3).started_at == 2
        assert train_here(cfg, place).started_at == 5
