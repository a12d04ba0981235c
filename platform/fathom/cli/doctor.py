"""``fathom doctor``: is this machine ready, and if not, what to do."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from fathom.errors import ServiceError

PACKAGES = ("torch", "ray", "mlflow", "deepspeed", "transformers", "pyarrow", "s3fs")
FREE_DISK_WANTED_GB = 10.0
FREE_MEMORY_WANTED_GB = 4.0

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy`` is empty when all is well."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: Python, packages, devices, memory, disk, the local stack, MLflow and S3.

    Exits with 2 when something is broken; warnings alone exit with 0.
    """
    findings = []
    for check in CHECKS:
        for finding in check():
            findings.append(finding)
            if not as_json:
                typer.echo(f"{finding.status:<5}{finding.name:<14}{finding.detail}")
                if finding.remedy:
                    typer.echo(f"{'':<19}fix: {finding.remedy}")
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    broken = [finding.name for finding in findings if finding.status == "fail"]
    if broken:
        raise ServiceError(f"not ready: {', '.join(broken)}", "see the lines marked fail")


def python_version() -> Iterator[Finding]:
    """The interpreter, and that the standard library's ``platform`` is not shadowed by our folder."""
    import platform

    version = platform.python_version()
    good = (3, 10) <= sys.version_info[:2] < (3, 13)
    yield Finding("python", "ok" if good else "fail", version, "" if good else "use Python 3.10, 3.11 or 3.12")


def packages() -> Iterator[Finding]:
    """The heavy dependencies and their versions, without importing them."""
    for name in PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "fail", "not installed", "install fathomlm with its dependencies: pip install fathomlm")


def devices() -> Iterator[Finding]:
    """GPUs, or the CPU with its number of cores."""
    import torch

    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    yield Finding("device", "ok", names or f"CPU, {os.cpu_count()} cores, no GPU")


def memory() -> Iterator[Finding]:
    """Free memory."""
    import psutil

    free_gb = psutil.virtual_memory().available / 1e9
    low = free_gb < FREE_MEMORY_WANTED_GB
    remedy = f"{FREE_MEMORY_WANTED_GB:.0f} GB are needed for a 135M model: close other programs" if low else ""
    yield Finding("memory", "warn" if low else "ok", f"{free_gb:.1f} GB free", remedy)


def disk() -> Iterator[Finding]:
    """Free space where runs and models are stored."""
    from fathom.orchestrate.stack import state_folder

    folder = state_folder()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_gb = shutil.disk_usage(there).free / 1e9
    low = free_gb < FREE_DISK_WANTED_GB
    remedy = "free some space, or set FATHOM_HOME to a folder on a larger disk" if low else ""
    yield Finding("disk", "warn" if low else "ok", f"{free_gb:.0f} GB free for {folder}", remedy)


def local_stack() -> Iterator[Finding]:
    """The stack of ``fathom up``, and whether its services answer."""
    import httpx

    from fathom.orchestrate.stack import mlflow_answers, ray_answers, stack_state

    state = stack_state()
    if not state:
        yield Finding("stack", "ok", "not running (fathom up starts it)")
        return
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        services: dict[str, tuple[str, Callable[[httpx.Client, dict[str, str]], bool]]] = {
            "ray": (state["dashboard_url"], ray_answers),
            "mlflow": (state["mlflow_uri"], mlflow_answers),
        }
        for name, (address, answers) in services.items():
            up = answers(client, state)
            remedy = "" if up else "restart it: fathom down, then fathom up"
            yield Finding(f"stack {name}", "ok" if up else "fail", address, remedy)


def tracking_server() -> Iterator[Finding]:
    """The MLflow server that ``MLFLOW_TRACKING_URI`` names."""
    import httpx

    address = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not address.startswith("http"):
        return
    with contextlib.suppress(httpx.HTTPError):
        if httpx.get(f"{address.rstrip('/')}/health", timeout=5.0).status_code == 200:
            yield Finding("mlflow", "ok", address)
            return
    yield Finding("mlflow", "warn", f"{address} does not answer", "runs go on and spool; later: fathom tracking sync")


def object_store() -> Iterator[Finding]:
    """The S3 endpoint that ``AWS_ENDPOINT_URL`` names, with the keys of the environment."""
    address = os.environ.get("AWS_ENDPOINT_URL", "")
    if not address:
        return
    import s3fs

    quick = {"connect_timeout": 5, "read_timeout": 5, "retries": {"max_attempts": 1}}
    try:
        store = s3fs.S3FileSystem(skip_instance_cache=True, config_kwargs=quick, endpoint_url=address)
        store.retries = 1
        buckets = store.ls("")
        yield Finding("s3", "ok", f"{address}, {len(buckets)} buckets")
    except Exception as error:  # botocore, aiohttp and the system each raise their own
        yield Finding("s3", "fail", f"{address}: {type(error).__name__}: {error}", "check AWS_ENDPOINT_URL and the key")


def cache() -> Iterator[Finding]:
    """Whether downloaded models can be kept."""
    from fathom.model.hub import cache_root

    folder = cache_root()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    good = os.access(there, os.W_OK)
    yield Finding(
        "cache",
        "ok" if good else "fail",
        str(folder),
        "" if good else "set FATHOM_CACHE to a writable folder",
    )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python_version,
    packages,
    devices,
    memory,
    disk,
    cache,
    local_stack,
    tracking_server,
    object_store,
)
