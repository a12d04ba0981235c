"""The spool keeps every event, whatever happens to its writer or its server."""

import json
import math
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from fathom.cli.main import app
from fathom.errors import ConfigError, ModelError, ServiceError
from fathom.tracking import tracker as module
from fathom.tracking.registry import resolve_model
from fathom.tracking.sender import flatten
from fathom.tracking.server import default_uri
from fathom.tracking.spool import Position, Spool
from fathom.tracking.tracker import Tracker, sync_spool

NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once


def kinds(spool: Spool, offset: int = 0) -> list[str]:
    return [event["kind"] for event, _ in spool.read(offset)]


def test_events_come_back_in_order_from_any_offset(tmp_path):
    spool = Spool(tmp_path)
    for step in range(5):
        spool.append("metrics", step=step, values={"é": 1.0})
    events = list(spool.read(0))
    assert [event["step"] for event, _ in events] == list(range(5))
    assert [event["step"] for event, _ in spool.read(events[2][1])] == [3, 4]
    assert events[-1][1] == spool.size()


def test_a_torn_line_costs_only_itself(tmp_path):
    spool = Spool(tmp_path)
    spool.append("a")
    with open(spool.events, "ab") as file:
        file.write(b'{"kind": "torn", "val')
    assert kinds(spool) == ["a"]  # not complete yet
    Spool(tmp_path).append("b")
    assert kinds(spool) == ["a", "b"]


def test_threads_do_not_mix_their_lines(tmp_path):
    spool = Spool(tmp_path)
    work = [threading.Thread(target=lambda: [spool.append("m", x="y" * 500) for _ in range(50)]) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(kinds(spool)) == 200


def test_positions_are_kept_by_server(tmp_path):
    spool = Spool(tmp_path)
    spool.acknowledge("http://a", Position("run", "0", 10))
    spool.acknowledge("http://b", Position("other", "1", 5))
    assert Spool(tmp_path).position("http://a") == Position("run", "0", 10)
    assert spool.position("http://c") == Position()


def test_one_writer(tmp_path):
    code = f"""
import sys, pathlib
from fathom.tracking.spool import Spool
with Spool(pathlib.Path({str(tmp_path)!r})).writing():
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        Spool(tmp_path).append("start")
        with pytest.raises(ServiceError, match="running job"):
            sync_spool(tmp_path, NOWHERE)
        holder.communicate("")
    with Spool(tmp_path).writing():
        pass


def test_training_goes_on_without_a_server(tmp_path, caplog):
    tracker = Tracker(tmp_path / "spool", NOWHERE, "exp", "run", {})
    begin = time.monotonic()
    tracker.start({"train": {"steps": 3}}, {})
    for step in range(100):
        tracker.metrics(step, {"loss": 1.0})
    (tmp_path / "plot.svg").write_text("<svg/>")
    tracker.artifact(tmp_path / "plot.svg", "plots")
    assert tracker.register("m", str(tmp_path), "d" * 64, timeout_s=20) is None
    assert not tracker.finish("FINISHED", timeout_s=20)
    assert time.monotonic() - begin < 15
    assert tracker.run_id is None and tracker.url is None
    found = kinds(Spool(tmp_path / "spool"))
    assert found == ["start", *["metrics"] * 100, "artifact", "register", "finish"]
    warnings = [record.getMessage() for record in caplog.records if "does not answer" in record.getMessage()]
    assert len(warnings) == 1 and NOWHERE in warnings[0]
    assert "fathom tracking sync" in caplog.text


def test_without_a_uri_events_are_only_kept(tmp_path):
    tracker = Tracker(tmp_path, None, "exp", "run")
    tracker.start({}, {})
    tracker.metrics(0, {"loss": math.nan, "other": math.inf})
    assert tracker.register("m", "/x", "d") is None
    assert not tracker.finish()
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "events.jsonl").read_text().splitlines()
    ]
    assert lines[1]["values"] == {"loss": "nan", "other": "inf"}


def test_a_full_disk_does_not_stop_training(tmp_path, caplog, monkeypatch):
    tracker = Tracker(tmp_path, None, "exp", "run")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker.spool, "append", full)
    monkeypatch.setattr(module, "number_text", float)
    tracker.start({}, {})
    tracker.metrics(0, {"loss": 1.0})
    tracker.artifact(tmp_path / "missing.svg")
    tracker.finish()
    assert caplog.text.count("No space left") == 1
    assert "missing.svg is not tracked" in caplog.text


def test_weights_are_not_artifacts(tmp_path, caplog):
    big = tmp_path / "model.safetensors"
    with open(big, "wb") as file:
        file.truncate(60_000_000)
    tracker = Tracker(tmp_path / "spool", None, "exp", "run")
    tracker.artifact(big)
    assert kinds(tracker.spool) == [] and "60,000,000 bytes" in caplog.text


def test_syncing_what_is_no_spool(tmp_path):
    with pytest.raises(ConfigError, match=r"events\.jsonl|no tracking events"):
        sync_spool(tmp_path, NOWHERE)
    Spool(tmp_path).append("start")
    with pytest.raises(ServiceError, match="does not answer"):
        sync_spool(tmp_path, NOWHERE)


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1]}) == {"a.b": "1", "a.c.d": "None", "e": "[1]"}


@pytest.mark.parametrize("uri", ["models:/", "models:/a", "models:/a/b", "models:/a@", "a@b"])
def test_uris_that_name_no_version(uri):
    with pytest.raises(ModelError, match="names no model version"):
        resolve_model(uri, NOWHERE)


def test_which_server(tmp_path, monkeypatch):
    monkeypatch.setenv("FATHOM_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_uri() is None
    with pytest.raises(ServiceError, match="no tracking server"):
        resolve_model("models:/a@b")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://env")
    assert default_uri() == "http://env"
    (tmp_path / "stack").mkdir()
    record = {"ready": True, "state": {"mlflow_uri": "http://stack"}}
    (tmp_path / "stack" / "stack.json").write_text(json.dumps(record))
    assert default_uri() == "http://stack"
    assert default_uri("http://named") == "http://named"


def test_the_command_says_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["tracking", "sync", str(tmp_path), "--tracking-uri", NOWHERE])
    assert isinstance(result.exception, ConfigError) and result.exception.exit_code == 2
