"""Write the Serve configuration of a deployment, apply it to a Ray cluster, and wait until it answers."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx

from fathom.errors import ServiceError

HOST = "127.0.0.1"
APPLICATION = "fathom"
IMPORT_PATH = "fathom_serve.deploy.app:build"
READY_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 600.0
POLL_S = 0.5


def serve_config(args: dict[str, Any], port: int, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The Serve configuration, as ``serve deploy`` reads it: one proxy, on loopback, on the head node.

    Args:
        args: of the application (:class:`fathom_serve.deploy.app.DeployArgs`).
        port: of the endpoint.
        environment: variables of the replicas, for example where the object store is and who asks.
    """
    application = {"name": APPLICATION, "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
    if environment:
        application["runtime_env"] = {"env_vars": environment}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": HOST, "port": port, "request_timeout_s": ANSWER_TIMEOUT_S},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [application],
    }


def require_port(port: int) -> None:
    """Check that nothing listens on a port of 127.0.0.1.

    Raises:
        ServiceError: something does.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServiceError(
                f"port {port} of {HOST} is in use", "stop what listens there, or choose another with --port"
            ) from error


def apply(config: dict[str, Any], progress: Callable[[str], None] = lambda line: None) -> str:
    """Deploy to the Ray cluster that this process is connected to; an application that runs already is updated.

    Args:
        config: from :func:`serve_config`.
        progress: called with one line per change of state.

    Returns:
        The endpoint's base URL, for the ``openai`` client.

    Raises:
        ServiceError: the port is taken, Serve listens elsewhere already, or the application does not come up.
    """
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    port = config["http_options"]["port"]
    running = _get_global_client(raise_if_no_controller_running=False)
    if running is None:
        require_port(port)
        progress("starting Ray Serve")
        serve.start(
            proxy_location=config["proxy_location"],
            http_options=config["http_options"],
            logging_config=config["logging_config"],
        )
    elif running.http_config.port != port:
        raise ServiceError(
            f"Ray Serve of this cluster listens on port {running.http_config.port} already, not on {port}",
            f"deploy with --port {running.http_config.port}, or stop Serve first",
        )
    client = _get_global_client()
    assert client is not None
    began = time.time()
    client.deploy_apps(ServeDeploySchema.model_validate(config))
    _wait_running(began, progress)
    url = f"http://{HOST}:{port}"
    _wait_answering(url)
    return f"{url}/v1"


def _wait_running(began: float, progress: Callable[[str], None]) -> None:
    """Wait for this deployment, not for one that ran before: its state must be newer than ``began``."""
    from ray import serve

    deadline = time.monotonic() + READY_TIMEOUT_S
    told = ""
    while True:
        state = serve.status().applications.get(APPLICATION)
        line = "waiting for Ray Serve" if state is None else _describe(state)
        if line != told:
            progress(line)
            told = line
        fresh = state is not None and state.last_deployed_time_s >= began - 1
        if state is not None and fresh and state.status == "RUNNING":
            return
        if state is not None and fresh and state.status == "DEPLOY_FAILED":
            raise ServiceError(f"the application did not start: {_reason(state)}", "fix the cause and deploy again")
        if time.monotonic() > deadline:
            raise ServiceError(
                f"the application is not ready after {READY_TIMEOUT_S:.0f} s: {line}", "look at the cluster's free CPUs"
            )
        time.sleep(POLL_S)


def _describe(state: Any) -> str:
    parts = []
    for name, deployment in sorted(state.deployments.items()):
        counts = ", ".join(f"{count} {str(kind).lower()}" for kind, count in deployment.replica_states.items() if count)
        parts.append(f"{name}: {counts or deployment.status.value.lower()}")
    return "; ".join(parts) or state.status.value.lower()


def _reason(state: Any) -> str:
    """The last line of a replica's traceback says what happened; the rest is where."""
    messages = [deployment.message for deployment in state.deployments.values() if deployment.message]
    lines = [line.strip() for line in (messages or [state.message])[0].splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":", 1)[0]]
    return (errors or lines or ["no reason given"])[-1]


def _wait_answering(url: str) -> None:
    """The proxy learns of the route a moment after the application runs."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.HTTPError):  # not listening yet
            if httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise ServiceError(f"{url}/health does not answer", "look at the Serve logs of the Ray head")
        time.sleep(POLL_S)
