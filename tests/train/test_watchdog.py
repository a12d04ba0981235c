"""A worker that hangs is reported with its stack and ends; whatever it finishes in time counts as a sign of life."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fathom.errors import ConfigError
from fathom.train import session
from fathom.train.group import own_process
from fathom.train.inputs import fetch_inputs
from fathom.train.place import Place
from support.runs import tiny_recipe

SCRIPT = """
import sys, threading, time
from pathlib import Path
from fathom.train.place import Place
from fathom.train.watchdog import watched

def wait_for_ever(lock):
    lock.acquire()

def main(uri, work):
    with watched(Place(uri, Path(work), []), 3, 1.0) as alive:
        for _ in range(6):  # longer than the timeout, but not silent
            time.sleep(0.4)
            alive()
        print("lived", flush=True)
        lock = threading.Lock()
        lock.acquire()
        wait_for_ever(lock)

main(*sys.argv[1:])
"""


def test_a_hanging_worker_reports_its_stack_and_ends(tmp_path: Path) -> None:
    uri = tmp_path / "store" / "run"
    command = [sys.executable, "-c", SCRIPT, str(uri), str(tmp_path / "work")]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    assert done.stdout == "lived\n"
    (stored,) = (uri / "hangs").glob("*-rank-00003.txt")
    said = stored.read_text()
    assert "worker 3 hangs: no step, checkpoint or evaluation was finished in 1 s" in said
    assert "in wait_for_ever" in said and "in main" in said
    assert said in done.stderr


def test_what_a_run_finishes_are_its_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []

    @contextlib.contextmanager
    def counted(place: Place, rank: int, timeout_s: float) -> Iterator[Callable[[], None]]:
        assert timeout_s == 77.0
        yield lambda: beats.append(1)

    monkeypatch.setattr(session, "watched", counted)
    cfg = tiny_recipe(
        tmp_path,
        train__steps=4,
        train__hang_timeout_s=77.0,
        train__eval_every_steps=2,
        train__profile_steps=[2, 3],
        checkpoint__every_steps=3,
    )
    group = own_process()._replace(device=torch.device("cpu"))
    place = Place(str(tmp_path / "run"), tmp_path / "work", [])
    place.work.mkdir()
    inputs = fetch_inputs(cfg, group, place.work)
    session.train_worker(cfg, inputs, place, group, lambda step, metrics: None, lambda step, weights: {})
    assert len(beats) == 4 + 1 + 2, "steps, an evaluation, checkpoints"
    trace = json.loads(gzip.decompress((tmp_path / "run" / "profile" / "steps-2-3-rank-00000.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#AdamW") for name in names if name) == 2


def test_nothing_watches_by_default(tmp_path: Path) -> None:
    from fathom.train.watchdog import watched

    with watched(Place(str(tmp_path), tmp_path, []), 0, tiny_recipe(tmp_path).train.hang_timeout_s):
        time.sleep(0.01)
    assert not (tmp_path / "hangs").exists()


def test_a_window_of_steps_has_an_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile_steps is"):
        tiny_recipe(tmp_path, train__profile_steps=[3, 2])
