"""``fathom up`` and ``fathom down`` with a real Ray head and a real MLflow server."""

import ipaddress
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from fathom.errors import ServiceError
from fathom.orchestrate import stack
from fathom.orchestrate.processes import MARK, claim_port, family, spawn, stop_family
from fathom.orchestrate.stack import ray_environment, stack_state

PORTS = ("--ray-port", "0", "--dashboard-port", "0", "--mlflow-port", "0")
DRIVER = """
import sys, ray
from fathom.orchestrate.stack import stack_state, use_stack
use_stack(stack_state())
ray.init(address=stack_state()["ray_address"], log_to_driver=False)
square = ray.remote(lambda n: n * n)
print("squares", ray.get([square.remote(n) for n in range(4)]))
"""


def fathom(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FATHOM_HOME": str(home)}
    command = [sys.executable, "-m", "fathom", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def started(home: Path) -> list[psutil.Process]:
    record = stack.read_record(home)
    assert record is not None
    return family(record.services, record.mark)


@pytest.mark.timeout(600)
def test_up_then_down(tmp_path):
    up = fathom(tmp_path, "up", *PORTS, "--json")
    try:
        assert up.returncode == 0, up.stderr
        state = json.loads(up.stdout)
        assert state == stack_state(tmp_path)
        assert stat.S_IMODE(os.stat(state["token_path"]).st_mode) == 0o600
        again = fathom(tmp_path, "up", *PORTS, "--json")
        assert json.loads(again.stdout) == state, "a stack that is up is left alone"
        refuses_strangers(state)
        listens_on_loopback_only(started(tmp_path))
        environment = {**os.environ, "FATHOM_HOME": str(tmp_path)}
        driver = subprocess.run([sys.executable, "-c", DRIVER], env=environment, capture_output=True, text=True)
        assert "squares [0, 1, 4, 9]" in driver.stdout, driver.stderr
        processes = started(tmp_path)
        assert len(processes) > 5
    finally:
        down = fathom(tmp_path, "down")
    assert down.stdout == "stopped ray and mlflow\n"
    _, left = psutil.wait_procs(processes, timeout=5)
    assert left == []
    assert stack_state(tmp_path) == {}
    assert not Path(state["token_path"]).exists()
    assert Path(state["store"]).is_dir(), "what was stored stays"
    assert fathom(tmp_path, "down").stdout == "nothing was running\n"


def refuses_strangers(state: dict[str, str]) -> None:
    """Without the token the job API lets nobody in; MLflow refuses a foreign Host header."""
    jobs = f"{state['dashboard_url']}/api/jobs/"
    token = Path(state["token_path"]).read_text()
    assert httpx.get(jobs, trust_env=False).status_code == 401
    assert httpx.get(jobs, headers={"Authorization": "Bearer wrong"}, trust_env=False).status_code in (401, 403)
    assert httpx.get(jobs, headers={"Authorization": f"Bearer {token}"}, trust_env=False).json() == []
    experiments = f"{state['mlflow_uri']}/api/2.0/mlflow/experiments/search"
    body = {"max_results": 1}
    assert httpx.post(experiments, json=body, trust_env=False).status_code == 200
    rebound = httpx.post(experiments, json=body, headers={"Host": "evil.example:5000"}, trust_env=False)
    assert rebound.status_code == 403


def listens_on_loopback_only(processes: list[psutil.Process]) -> None:
    listening = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 4
    addresses = [ipaddress.ip_address(ip.removeprefix("::ffff:")) for ip in listening]
    assert all(address.is_loopback for address in addresses), addresses


def test_a_taken_port_is_refused_with_the_way_out(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = fathom(tmp_path, "up", *PORTS[:-1], str(port))
    assert done.returncode == 2
    assert f"port {port} of 127.0.0.1, wanted for mlflow, is in use" in done.stderr
    assert "--mlflow-port 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert stack_state(tmp_path) == {}


def test_a_service_that_dies_while_starting_is_reported_and_nothing_stays(tmp_path, monkeypatch):
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    broken = [sys.executable, "-c", "raise SystemExit('the database is locked')"]
    monkeypatch.setattr(stack, "ray_command", lambda *_: sleeper)
    monkeypatch.setattr(stack, "mlflow_command", lambda *_: broken)
    services = []
    monkeypatch.setattr(stack, "spawn", lambda *arguments: services.append(spawn(*arguments)) or services[-1])
    with pytest.raises(ServiceError, match="the database is locked") as caught:
        stack.start_stack(stack.Ports(0, 0, 0), tmp_path)
    assert "mlflow.log" in caught.value.remedy
    assert stack.read_record(tmp_path) is None
    assert len(services) == 2
    assert not any(service.alive() for service in services)


def test_ray_that_gave_itself_up_is_started_once_more(tmp_path, monkeypatch):
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    gave_up = [sys.executable, "-c", "raise SystemExit('The current node timed out during startup.')"]
    tries = []
    monkeypatch.setattr(stack, "ray_command", lambda *_: tries.append(1) or gave_up)
    monkeypatch.setattr(stack, "mlflow_command", lambda *_: sleeper)
    with pytest.raises(ServiceError, match="timed out during startup"):
        stack.start_stack(stack.Ports(0, 0, 0), tmp_path)
    assert len(tries) == 2


def test_stopping_finds_orphans_and_spares_others(tmp_path):
    nested = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    parent = spawn("orphan", [sys.executable, "-c", nested], {}, "mark-one", tmp_path / "log")
    psutil.wait_procs([psutil.Process(parent.pid)], timeout=10)
    orphan = psutil.Process(int((tmp_path / "log").read_text()))
    other = spawn("other", ["sleep", "600"], {}, "mark-two", tmp_path / "other")
    assert orphan.environ()[MARK] == "mark-one"
    stop_family([parent], "mark-one", grace_s=1.0)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert other.alive()
    stop_family([other], "mark-two", grace_s=1.0)
    assert not other.alive()


def test_a_process_id_that_was_reused_is_not_ours():
    stranger = stack.Service("ray", os.getpid(), psutil.Process().create_time() - 100)
    assert not stranger.alive()
    assert family([stranger], "no-such-mark") == []


def test_a_free_port_is_free():
    port = claim_port("ray", 0)
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port > 0


def test_the_state_is_empty_without_a_stack(tmp_path):
    assert stack_state(tmp_path) == {}


def test_a_driver_is_told_where_the_token_is(tmp_path):
    assert ray_environment({"token_path": "/x"})["RAY_AUTH_TOKEN_PATH"] == "/x"
