"""Servers that tests share: each starts on first use, listens on loopback and ends with the session."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything reads it: tiny matrices are not worth sharing out, and threads that wait for each other burn the cores
# that other processes want (ten times the time on a busy machine).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before anything reads them: no calls home, no display, no hub, and never the developer's own stack.
os.environ.update(
    {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MPLBACKEND": "Agg",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
)


@pytest.fixture(scope="session", autouse=True)
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``$FATHOM_HOME`` is an empty folder, in which no stack runs."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FATHOM_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URI of an empty bucket of a running S3 server; the environment points at it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing-key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="fathom-test")
        yield "s3://fathom-test"
    server.stop()


@pytest.fixture(scope="session")
def local_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The product's own stack on free ports: its ``stack_state()``, and ``home`` for ``$FATHOM_HOME``."""
    from fathom.orchestrate.stack import Ports, start_stack, stop_stack

    folder = tmp_path_factory.mktemp("stack")
    state = start_stack(Ports(0, 0, 0), folder, cpus=4)
    yield {**state, "home": str(folder)}
    stop_stack(folder)


@pytest.fixture(scope="session")
def mlflow_server(local_stack: dict[str, str]) -> str:
    """URI of a running MLflow server."""
    return local_stack["mlflow_uri"]


@pytest.fixture(scope="session")
def ray_cluster(local_stack: dict[str, str]) -> Iterator[dict[str, str]]:
    """A running Ray head with token authentication that this process may ``ray.init(address=...)``."""
    from fathom.orchestrate.stack import ray_environment, use_stack

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_environment(local_stack).items():
            patch.setenv(name, value)
        use_stack(local_stack)
        yield local_stack
        if "ray" in sys.modules:
            import ray

            ray.shutdown()
