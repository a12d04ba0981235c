"""Which MLflow server, whether it answers, and a client that gives up in seconds rather than minutes."""

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.errors import ServiceError

if TYPE_CHECKING:
    from mlflow import MlflowClient

PROBE_TIMEOUT_S = 5.0
CLIENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def default_uri(explicit: str | None = None) -> str | None:
    """The tracking server to use: the one named, else the local stack's, else ``$MLFLOW_TRACKING_URI``."""
    if explicit:
        return explicit
    record = Path(os.environ.get("FATHOM_HOME", ".fathom")) / "stack" / "stack.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        body = json.loads(record.read_text(encoding="utf-8"))
        if body["ready"]:
            return str(body["state"]["mlflow_uri"])
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def connect(uri: str) -> "MlflowClient":
    """A client of a server that answers.

    Raises:
        ServiceError: it does not.
    """
    if uri.startswith(("http://", "https://")):
        import httpx

        try:
            httpx.get(f"{uri.rstrip('/')}/health", timeout=PROBE_TIMEOUT_S).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceError(
                f"MLflow at {uri} does not answer ({type(error).__name__})",
                "start it with `fathom up`, or set tracking.uri or MLFLOW_TRACKING_URI",
            ) from error
    for name, value in CLIENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)
