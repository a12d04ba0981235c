"""Against a running MLflow server: one run, no duplicates, models by source and digest."""

import json
import secrets
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fathom.cli.main import app
from fathom.errors import ModelError
from fathom.storage.manifest import publish_folder, read_manifest
from fathom.tracking import sender as sender_module
from fathom.tracking.registry import list_models, resolve_model
from fathom.tracking.server import connect
from fathom.tracking.spool import Position, Spool
from fathom.tracking.tracker import Tracker, sync_spool

WAIT_S = 60


@pytest.fixture
def client(mlflow_server):
    return connect(mlflow_server)


def track(spool, uri, steps=range(3), status="FINISHED", **start):
    tracker = Tracker(spool, uri, "fathom-tests", "a run", {"method": "tah2"})
    tracker.start(start or {"train": {"steps": 3}, "name": "x"}, {"config_digest": "c" * 64})
    for step in steps:
        tracker.metrics(step, {"loss": 3.0 - step, "nll/depth_1": 1.0 * step})
    tracker.finish(status, timeout_s=WAIT_S)
    return tracker


def history(client, run_id, name="loss"):
    return [(row.step, row.value) for row in client.get_metric_history(run_id, name)]


def test_a_run_as_mlflow_shows_it(mlflow_server, client, tmp_path):
    (tmp_path / "loss.svg").write_text("<svg/>")
    tracker = Tracker(tmp_path / "spool", mlflow_server, "fathom-tests", "a run", {"method": "tah2"})
    tracker.start({"train": {"steps": 3}, "long": "x" * 9000}, {"config_digest": "c" * 64})
    for step in range(3):
        tracker.metrics(step, {"loss": 3.0 - step, "bad": float("nan")})
    tracker.artifact(tmp_path / "loss.svg", "plots")
    (tmp_path / "loss.svg").unlink()
    assert tracker.finish("FINISHED", timeout_s=WAIT_S)
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "a run"
    assert run.data.params["train.steps"] == "3" and len(run.data.params["long"]) == 6000
    assert {"method": "tah2", "config_digest": "c" * 64, "attempt": "1"}.items() <= run.data.tags.items()
    assert history(client, tracker.run_id) == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert [file.path for file in client.list_artifacts(tracker.run_id, "plots")] == ["plots/loss.svg"]
    config = client.download_artifacts(tracker.run_id, "config.json", str(tmp_path))
    assert json.loads(Path(config).read_text())["long"] == "x" * 9000
    assert tracker.url == f"{mlflow_server}/#/experiments/{run.info.experiment_id}/runs/{tracker.run_id}"


def test_a_resumed_run_is_the_same_run(mlflow_server, client, tmp_path):
    first = track(tmp_path, mlflow_server, range(3), "FAILED")
    second = track(tmp_path, mlflow_server, range(2, 5), train={"steps": 5})
    assert first.run_id == second.run_id
    run = client.get_run(second.run_id)
    assert run.data.tags["attempt"] == "2" and run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "3"
    assert [step for step, _ in history(client, second.run_id)] == list(range(5)), "one value a step"
    names = {file.path for file in client.list_artifacts(second.run_id)}
    assert names == {"config.json", "config-attempt-2.json"}


def test_a_run_that_starts_over_is_tracked_from_its_first_step(tmp_path):
    for series, steps in (("a", range(3)), ("a", range(2, 4)), ("b", range(2))):
        tracker = Tracker(tmp_path, None, "fathom-tests", "a run", {})
        tracker.start({}, {"series": series})
        for step in steps:
            tracker.metrics(step, {"loss": 1.0})
    told = [event["step"] for event, _ in Spool(tmp_path).read(0) if event["kind"] == "metrics"]
    assert told == [0, 1, 2, 3, 0, 1]


def test_a_run_without_a_server_is_synced_once(mlflow_server, client, tmp_path):
    spool = tmp_path / "spool"
    publish_folder(_model(tmp_path), str(tmp_path / "store"), {})
    tracker = Tracker(spool, "http://127.0.0.1:9", "fathom-tests", "offline", {})
    tracker.start({"name": "x"}, {})
    for step in range(1500):
        tracker.metrics(step, {"loss": float(step)})
    name = f"offline-{secrets.token_hex(4)}"
    assert tracker.register(name, str(tmp_path / "store"), "d" * 64, timeout_s=5) is None
    tracker.finish(timeout_s=5)
    result = CliRunner().invoke(app, ["tracking", "sync", str(spool), "--tracking-uri", mlflow_server, "--json"])
    assert result.exit_code == 0, result.output
    synced = json.loads(result.stdout)
    assert synced["events"] == {"start": 1, "metrics": 1500, "register": 1, "finish": 1}
    again = CliRunner().invoke(app, ["tracking", "sync", str(spool), "--tracking-uri", mlflow_server])
    assert "nothing was missing" in again.stdout
    Spool(spool).acknowledge(mlflow_server, Position())  # as if the acknowledgement had been lost
    replayed = sync_spool(spool, mlflow_server)
    assert replayed.run_id == synced["run_id"] and replayed.events["metrics"] == 1500
    assert history(client, replayed.run_id) == [(step, float(step)) for step in range(1500)]
    assert [version.version for version in list_models(mlflow_server) if version.name == name] == ["1"]
    assert client.get_run(replayed.run_id).info.status == "FINISHED"


def test_a_killed_run_is_marked_failed(mlflow_server, client, tmp_path):
    spool = Spool(tmp_path)
    spool.append("start", key="k", attempt=1, experiment="fathom-tests", run_name="r", tags={}, digests={}, config={})
    spool.append("metrics", step=0, values={"loss": 1.0})
    synced = sync_spool(tmp_path, mlflow_server)
    assert client.get_run(synced.run_id).info.status == "FAILED"
    assert sync_spool(tmp_path, mlflow_server).events == {}


def test_a_server_that_dies_in_the_middle(mlflow_server, client, tmp_path, monkeypatch):
    calls = []
    real = sender_module.Sender._send_metrics

    def flaky(self, *events):
        real(self, *events)
        calls.append(len(events))
        if len(calls) == 1:
            raise ConnectionError("cut after the server took it")  # an OSError: never a reason to reject

    monkeypatch.setattr(sender_module.Sender, "_send_metrics", flaky)
    tracker = track(tmp_path, mlflow_server)
    sync_spool(tmp_path, mlflow_server)
    assert len(calls) >= 2
    assert history(client, tracker.run_id) == [(0, 3.0), (1, 2.0), (2, 1.0)]


def test_an_event_the_server_refuses_does_not_hold_up_the_others(mlflow_server, client, tmp_path):
    tracker = Tracker(tmp_path, mlflow_server, "fathom-tests", "refused", {})
    tracker.start({}, {})
    tracker.metrics(0, {"loss": 1.0})
    tracker.metrics(1, {"no $ signs": 1.0})
    tracker.metrics(2, {"loss": 2.0})
    assert tracker.finish(timeout_s=WAIT_S)
    assert history(client, tracker.run_id) == [(0, 1.0), (2, 2.0)]
    assert "no $ signs" in (tmp_path / "rejected.jsonl").read_text()


def _model(tmp_path):
    folder = tmp_path / "model with space+plus"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_register_and_resolve(place, mlflow_server, tmp_path, request):
    store = str(tmp_path / "store with+odd %20 name")
    if place == "s3":
        store = f"{request.getfixturevalue('s3_server')}/models/{secrets.token_hex(4)}"
    manifest = publish_folder(_model(tmp_path), store, {})
    name = f"smol-{secrets.token_hex(4)}"
    tracker = Tracker(tmp_path / "spool", mlflow_server, "fathom-tests", "registers", {})
    tracker.start({}, {})
    assert tracker.register(name, store, manifest.digest, timeout_s=WAIT_S) == "1"
    assert tracker.register(name, store, manifest.digest, timeout_s=WAIT_S) == "1"
    assert tracker.register(name, store, "e" * 64, alias="candidate", timeout_s=WAIT_S) == "2"
    tracker.finish(timeout_s=WAIT_S)
    found = resolve_model(f"models:/{name}@champion", mlflow_server)
    assert (found.version, found.source, found.digest) == ("1", store, manifest.digest)
    assert found.run_id == tracker.run_id and read_manifest(found.source) == manifest
    assert resolve_model(f"models:/{name}/2", mlflow_server).digest == "e" * 64
    listed = [version for version in list_models(mlflow_server) if version.name == name]
    assert [(version.version, version.aliases) for version in listed] == [("2", ("candidate",)), ("1", ("champion",))]
    for wrong in (f"models:/{name}@nobody", f"models:/{name}/9", "models:/no-such-model@champion"):
        with pytest.raises(ModelError, match=f"models:/{name}@champion"):
            resolve_model(wrong, mlflow_server)


def test_a_version_registered_by_others_is_not_ours(mlflow_server, client):
    name = f"foreign-{secrets.token_hex(4)}"
    client.create_registered_model(name)
    client.create_model_version(name, "s3://somewhere/else")
    with pytest.raises(ModelError, match="not registered by Fathom"):
        resolve_model(f"models:/{name}/1", mlflow_server)
