"""Submit, track, deploy, as a person does: the commands, against a Ray cluster, MLflow and an S3 server that run."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from fathom.checkpoint.store import CheckpointStore
from fathom.cli.main import main
from fathom.config.load import config_dict
from fathom.orchestrate.processes import claim_port
from fathom.orchestrate.run import read_result
from support.runs import tiny_recipe


def fathom(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints, once it has succeeded."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    said = capsys.readouterr()
    assert not left.value.code, said.err
    return said.out


@pytest.fixture
def stack(
    ray_cluster: dict[str, str], s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """The local stack, found as `fathom up` leaves it; Serve is shut down afterwards."""
    monkeypatch.setenv("FATHOM_HOME", ray_cluster["home"])
    monkeypatch.setenv("FATHOM_CACHE", str(tmp_path / "cache"))
    yield ray_cluster
    token = {"Authorization": f"Bearer {Path(ray_cluster['token_path']).read_text()}"}
    httpx.delete(f"{ray_cluster['dashboard_url']}/api/serve/applications/", headers=token, timeout=60)


def recipe(folder: Path, **changes: object) -> str:
    """A recipe file (JSON is YAML)."""
    cfg = tiny_recipe(folder, **changes)
    path = folder / f"{cfg.name}.yaml"
    path.write_text(json.dumps(config_dict(cfg)))
    return str(path)


@pytest.mark.timeout(600)
def test_submit_track_deploy_ask_and_stop(
    stack: dict[str, str], s3_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    storage = f"{s3_server}/journeys"
    workers = {"strategy": "fsdp", "workers": 2, "threads_per_worker": 1}
    path = recipe(tmp_path, name="journey", storage=storage, parallel=workers, tracking__register_as="journey")
    assert fathom(capsys, "submit", path).startswith("SUCCEEDED")
    assert f"{storage}/runs/journey" in fathom(capsys, "status")

    (version,) = json.loads(fathom(capsys, "models", "journey", "--json"))
    assert version["source"].startswith(f"{storage}/models/journey/")
    assert version["aliases"] == ["champion"]
    result = read_result(f"{storage}/runs/journey")
    assert (result.model_uri, result.model_digest) == (version["source"], version["digest"])
    assert result.run_id is not None
    run = MlflowClient(stack["mlflow_uri"]).get_run(result.run_id)
    assert run.info.status == "FINISHED" and "mean_depth" in run.data.metrics

    port = claim_port("endpoint", 0)
    deploy = [sys.executable, "-m", "fathom", "deploy", "models:/journey@champion", "--threads", "1"]
    done = subprocess.run([*deploy, "--port", str(port)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    answer = client.chat.completions.create(
        model="journey",
        messages=[{"role": "user", "content": "3 + 6?"}],
        max_tokens=4,
        extra_body={"depth": {"tau_exit": 0.0}},
    )
    assert answer.usage is not None and answer.usage.model_extra is not None
    assert answer.usage.model_extra["depth"]["histogram"] == {"1": 0, "2": answer.usage.completion_tokens}

    path = recipe(tmp_path, name="longer", storage=storage, train__steps=100_000, checkpoint__every_steps=50_000)
    fathom(capsys, "submit", path, "--no-follow")
    (job,) = [each for each in json.loads(fathom(capsys, "status", "--json")) if each["name"] == "longer"]
    deadline = time.monotonic() + 120
    while "step 1/" not in logs(job["id"]) and time.monotonic() < deadline:
        time.sleep(1)
    assert json.loads(fathom(capsys, "stop", job["id"], "--json"))[0]["status"] in ("SUCCEEDED", "STOPPED")
    committed = CheckpointStore(f"{storage}/runs/longer/checkpoints").latest()
    stopped = read_result(f"{storage}/runs/longer")
    assert committed is not None and not stopped.finished
    assert 0 < committed.step == stopped.steps < 50_000


def logs(job_id: str) -> str:
    """What a job has printed."""
    from fathom.orchestrate.jobs import Jobs

    return Jobs().client.get_job_logs(job_id)
