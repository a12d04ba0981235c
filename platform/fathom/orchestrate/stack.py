"""The local stack: a Ray head, an MLflow server and a folder as object store, all on 127.0.0.1.

State is in ``.fathom/`` of the current folder (or ``$FATHOM_HOME``)::

    .fathom/mlflow.db           runs and models
    .fathom/store/              artifacts, checkpoints, exported models
    .fathom/stack/stack.json    what runs: ports, process ids, start times
    .fathom/stack/ray-token     the Ray cluster's token, readable by its owner only
    .fathom/stack/*.log

Whoever reaches a Ray head can run code on the machine, so it listens on loopback only and wants a token. Ray keeps
sockets under its temporary folder, and their paths may have about 100 characters, so that folder lies in ``/tmp``,
readable by its owner only, and goes away with the stack.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from fathom.errors import ServiceError
from fathom.orchestrate.processes import Service, claim_port, spawn, stop_family, tail

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
STOP_GRACE_S = 10.0


@dataclass(frozen=True)
class Ports:
    """Ports of the stack on 127.0.0.1; 0 takes any free one."""

    ray: int = 6379
    dashboard: int = 8265
    mlflow: int = 5000


@dataclass(frozen=True)
class Record:
    """What one ``fathom up`` started: kept on disk so that ``fathom down`` stops exactly that."""

    mark: str
    scratch: str
    ready: bool
    services: list[Service]
    state: dict[str, str]


def state_folder() -> Path:
    """Where the local stack keeps its state: ``$FATHOM_HOME``, else ``.fathom`` in the current folder."""
    return Path(os.environ.get("FATHOM_HOME", ".fathom")).absolute()


def stack_state(folder: Path | None = None) -> dict[str, str]:
    """Addresses of the running local stack, or an empty dict when it is not up.

    Returns:
        ``ray_address`` (host:port), ``dashboard_url``, ``mlflow_uri``, ``store`` (a folder), ``token_path``.
    """
    record = read_record(folder or state_folder())
    if record is None or not record.ready or not all(service.alive() for service in record.services):
        return {}
    return dict(record.state)


def ray_environment(state: dict[str, str]) -> dict[str, str]:
    """Environment variables with which a process reaches the Ray head of the local stack.

    Ray rewrites a loopback address into the machine's public one, in the head as in every driver, unless it is told
    that this is no cluster of machines; the third variable tells it, on every system.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": state["token_path"],
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def use_stack(state: dict[str, str]) -> None:
    """Point this process at the local stack's Ray head, whether or not Ray is imported already."""
    os.environ.update(ray_environment(state))
    constants = sys.modules.get("ray._private.ray_constants")
    if constants is not None:  # Ray read its environment when it was imported: have it read again
        from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        constants.__dict__["ENABLE_RAY_CLUSTER"] = False


def start_stack(
    ports: Ports = Ports(),
    folder: Path | None = None,
    cpus: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Start Ray and MLflow side by side and wait until both answer; a stack that is up already is left alone.

    Args:
        ports: where to listen.
        folder: state folder; default :func:`state_folder`.
        cpus: logical CPUs of the Ray head, which only bound how much is scheduled at once. Default: the cores of the
            machine but at least 4, so that on a laptop two workers and a served replica fit side by side.
        progress: called with one line per event.

    Returns:
        What :func:`stack_state` returns.

    Raises:
        ServiceError: a port is taken, or a service ended or did not answer in time; nothing is left running.
    """
    folder = folder or state_folder()
    with locked(folder):
        running = stack_state(folder)
        if running:
            return running
        stop_recorded(folder)
        record = launch_and_wait(ports, folder, cpus or max(4, os.cpu_count() or 1), progress)
        write_record(folder, Record(record.mark, record.scratch, True, record.services, record.state))
        return dict(record.state)


def stop_stack(folder: Path | None = None) -> list[str]:
    """Stop exactly what :func:`start_stack` started, and everything that those services started.

    Returns:
        The names of the services that were running; empty when there was nothing to stop.
    """
    folder = folder or state_folder()
    if read_record(folder) is None:
        return []
    with locked(folder):
        return stop_recorded(folder)


def launch_and_wait(ports: Ports, folder: Path, cpus: int, progress: Callable[[str], None]) -> Record:
    """Start both services and wait; once more if Ray gave itself up, which it does on a busy machine after 30 s."""
    for last in (False, True):
        record = launch(ports, folder, cpus)
        try:
            wait_ready(record, folder, progress)
            return record
        except BaseException as error:
            stop_recorded(folder)
            if last or not (isinstance(error, ServiceError) and "timed out during startup" in error.message):
                raise
            progress("ray took too long to start; trying once more")
    raise AssertionError("unreachable")


def launch(ports: Ports, folder: Path, cpus: int) -> Record:
    """Claim the ports, write the token, start both services and record them, without waiting."""
    place = folder / "stack"
    ports = Ports(
        claim_port("ray", ports.ray),
        claim_port("dashboard", ports.dashboard),
        claim_port("mlflow", ports.mlflow),
    )
    state = {
        "ray_address": f"{HOST}:{ports.ray}",
        "dashboard_url": f"http://{HOST}:{ports.dashboard}",
        "mlflow_uri": f"http://{HOST}:{ports.mlflow}",
        "store": str(folder / "store"),
        "token_path": str(place / "ray-token"),
    }
    (folder / "store" / "mlflow").mkdir(parents=True, exist_ok=True)
    write_token(Path(state["token_path"]))
    mark = secrets.token_hex(8)
    scratch = tempfile.mkdtemp(prefix="fathom-", dir="/tmp")
    services: list[Service] = []
    # A job's entrypoint says `python` and must mean this one, whether or not its environment is activated here.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    for name, command, environment in (
        ("ray", ray_command(ports, scratch, cpus), {**ray_environment(state), **RAY_SERVER_ENVIRONMENT, "PATH": path}),
        ("mlflow", mlflow_command(ports, folder), MLFLOW_SERVER_ENVIRONMENT),
    ):
        services.append(spawn(name, command, environment, mark, place / f"{name}.log"))
        write_record(folder, Record(mark, scratch, False, services, state))
    return Record(mark, scratch, False, services, state)


RAY_SERVER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # On shutdown Ray would wait up to 30 s for other machines to take over.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
MLFLOW_SERVER_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Background jobs (LLM judges) would start a dozen more processes.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}


def ray_command(ports: Ports, scratch: str, cpus: int) -> list[str]:
    """The Ray head: loopback only; every port we do not name is one the system finds free."""
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address", HOST, "--port", str(ports.ray)),
        *("--dashboard-host", HOST, "--dashboard-port", str(ports.dashboard)),
        *("--ray-client-server-port", str(claim_port("ray-client", 0)), "--dashboard-agent-listen-port", "0"),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
        *("--temp-dir", f"{scratch}/ray", "--num-cpus", str(cpus), "--object-store-memory", str(512 * 2**20)),
    ]


def mlflow_command(ports: Ports, folder: Path) -> list[str]:
    """The MLflow server: SQLite, one worker, artifacts through the server into the folder store."""
    names = [f"{host}:{ports.mlflow}" for host in (HOST, "localhost")]
    return [
        *(
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            HOST,
            "--port",
            str(ports.mlflow),
            "--workers",
            "1",
        ),
        *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        *("--artifacts-destination", (folder / "store" / "mlflow").as_uri()),
        *("--allowed-hosts", ",".join(names)),
        *("--cors-allowed-origins", ",".join(f"http://{name}" for name in names)),
    ]


def wait_ready(record: Record, folder: Path, progress: Callable[[str], None]) -> None:
    """Wait until every service answers; give up as soon as one has ended."""
    checks = {"ray": ray_answers, "mlflow": mlflow_answers}
    waiting = list(record.services)
    begin = time.monotonic()
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while waiting:
            time.sleep(0.25)
            waited_s = time.monotonic() - begin
            for service in list(waiting):
                if checks[service.name](client, record.state):
                    waiting.remove(service)
                    progress(f"{service.name} is up after {waited_s:.0f} s")
                elif not service.alive() or waited_s > START_TIMEOUT_S:
                    log = folder / "stack" / f"{service.name}.log"
                    fault = f"gave no answer in {waited_s:.0f} s" if service.alive() else "ended while starting"
                    raise ServiceError(
                        f"{service.name} {fault}; its log ends:\n{tail(log)}", f"read {log}, then try again"
                    )


def ray_answers(client: httpx.Client, state: dict[str, str]) -> bool:
    """Whether the dashboard lets us in with the token and knows of a node that runs."""
    token = Path(state["token_path"]).read_text()
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        answer = client.get(f"{state['dashboard_url']}/api/v0/nodes", headers={"Authorization": f"Bearer {token}"})
        return any(node["state"] == "ALIVE" for node in answer.json()["data"]["result"]["result"])
    return False


def mlflow_answers(client: httpx.Client, state: dict[str, str]) -> bool:
    """Whether the server says it is healthy."""
    with contextlib.suppress(httpx.HTTPError):
        return client.get(f"{state['mlflow_uri']}/health").status_code == 200
    return False


def write_token(path: Path) -> None:
    """A fresh random token in a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One start or stop at a time in a state folder."""
    (folder / "stack").mkdir(parents=True, exist_ok=True)
    with open(folder / "stack" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stop_recorded(folder: Path) -> list[str]:
    """Stop what the record names and forget it; the caller holds the lock."""
    record = read_record(folder)
    if record is None:
        return []
    names = [service.name for service in record.services if service.alive()]
    stop_family(record.services, record.mark, STOP_GRACE_S)
    shutil.rmtree(record.scratch, ignore_errors=True)
    Path(record.state["token_path"]).unlink(missing_ok=True)
    (folder / "stack" / "stack.json").unlink(missing_ok=True)
    return names


def read_record(folder: Path) -> Record | None:
    """The record of the last start, or None when nothing was started."""
    path = folder / "stack" / "stack.json"
    try:
        fields = json.loads(path.read_text())
        return Record(**{**fields, "services": [Service(**each) for each in fields["services"]]})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(
            f"{path} cannot be read: {error}", f"stop the stack's processes by hand, then remove {path}"
        ) from error


def write_record(folder: Path, record: Record) -> None:
    """Replace the record in one step."""
    path = folder / "stack" / "stack.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(record), indent=1))
    fresh.replace(path)
