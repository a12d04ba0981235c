"""Jobs on a Ray cluster: submit a recipe, follow its log, ask how it is, stop it.

A job gets this package as a module folder and a working folder with nothing but the resolved recipe. It runs once; its
id follows from the recipe, so that submitting the same recipe twice does not start it twice.
"""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from fathom.config.load import config_dict, config_digest, parse_config
from fathom.config.schema import RunConfig
from fathom.errors import ConfigError, ServiceError
from fathom.model.fit import checked_method
from fathom.orchestrate.run import check_sources
from fathom.orchestrate.stack import stack_state, use_stack
from fathom.storage import files
from fathom.train.place import STOP

ANSWER_WITHIN_S = 8.0
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
RECIPE = "recipe.json"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Job(NamedTuple):
    """One job of a cluster.

    Attributes:
        id: its submission id.
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        message: Ray's words about the status.
        name: of the recipe, empty for jobs that are not ours.
        run_uri: where the run keeps its files.
        seconds: since it started, until now or its end.
    """

    id: str
    status: str
    message: str
    name: str
    run_uri: str
    seconds: float


class Jobs:
    """The jobs of one cluster.

    Args:
        address: of the cluster's dashboard, ``http://host:8265``; None takes
            ``$RAY_API_SERVER_ADDRESS``, else the local stack's.

    Raises:
        ConfigError: no address is given and no stack is up.
        ServiceError: nothing answers there within ten seconds, or it refuses the token.
    """

    def __init__(self, address: str | None = None) -> None:
        stack = stack_state()
        chosen = address or os.environ.get("RAY_API_SERVER_ADDRESS") or stack.get("dashboard_url")
        if not chosen:
            raise ConfigError("no Ray cluster is named and no local stack is up", "give --address, or `fathom up`")
        if "://" not in chosen:
            chosen = f"http://{chosen}"
        self.address = chosen.rstrip("/")
        if self.address == stack.get("dashboard_url"):
            use_stack(stack)
        check_answers(self.address)
        from ray.job_submission import JobSubmissionClient

        for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.WARNING)  # else: lines about packages and closed connections
        with ray_faults(self.address):
            self.client: Any = JobSubmissionClient(self.address)

    @property
    def on_this_machine(self) -> bool:
        """Whether the cluster sees this machine's files."""
        return urlsplit(self.address).hostname in LOOPBACK

    def submit(self, cfg: RunConfig, fresh: bool = False, allow_change: list[str] | None = None) -> str:
        """Send a recipe; the id of its job. A job of this recipe that has not ended is left alone.

        Raises:
            ConfigError: the recipe names local files that the cluster cannot see, or an unknown method.
            DataError, StorageError: the cluster is on this machine, and a data file cannot be opened.
        """
        checked_method(cfg.method)  # refuses an unknown one
        if self.on_this_machine:
            check_sources(cfg)
        cfg = for_cluster(cfg, self.on_this_machine)
        prefix = f"fathom-{cfg.name}-{config_digest(cfg)[:8]}"
        for job in self.list():
            if job.id.startswith(prefix) and job.status not in ENDED:
                return job.id
        attempt = sum(job.id.startswith(prefix) for job in self.list())
        job_id = f"{prefix}-{attempt + 1}"
        arguments = ["python", "-m", "fathom", "train", RECIPE, *(["--fresh"] if fresh else [])]
        arguments += [part for key in allow_change or [] for part in ("--allow-change", key)]
        with tempfile.TemporaryDirectory() as folder, ray_faults(self.address):
            (Path(folder) / RECIPE).write_text(json.dumps(config_dict(cfg), indent=1))
            self.client.submit_job(
                entrypoint=shlex.join(arguments),
                submission_id=job_id,
                runtime_env=runtime_env(Path(folder)),
                metadata={"name": cfg.name, "run_uri": files.join(cfg.storage, "runs", cfg.name)},
            )
        return job_id

    def list(self) -> "list[Job]":
        """All jobs that were submitted, newest last."""
        with ray_faults(self.address):
            details = self.client.list_jobs()
        found = [(each.start_time or 0, as_job(each)) for each in details if each.submission_id]
        return [job for _, job in sorted(found)]

    def get(self, job_id: str) -> Job:
        """One job.

        Raises:
            ConfigError: there is none of this id.
        """
        for job in self.list():
            if job.id == job_id:
                return job
        known = ", ".join(job.id for job in self.list()[-5:]) or "none"
        raise ConfigError(f"no job {job_id!r} at {self.address}", f"known jobs: {known}")

    def follow(self, job_id: str, write: Callable[[str], None]) -> Job:
        """Pass on a job's log until it ends."""

        async def copy() -> None:
            lines: AsyncIterator[str] = self.client.tail_job_logs(job_id)
            async for text in lines:
                write(text)

        with ray_faults(self.address):
            asyncio.run(copy())
        while (job := self.get(job_id)).status not in ENDED:
            time.sleep(0.5)
        return job

    def stop(self, job_id: str, grace_s: float) -> Job:
        """Ask a run to commit a checkpoint and end; end it after ``grace_s`` seconds.

        The request is an object in the run's storage, so this machine needs access to it; without, the job is ended
        at once and goes on from its last checkpoint when it is submitted again.
        """
        job = self.get(job_id)
        if job.status in ENDED:
            return job
        deadline = time.monotonic() + grace_s
        if job.run_uri and job.status == "RUNNING":
            with contextlib.suppress(Exception):  # no access: the hard way below
                files.write_bytes(files.join(job.run_uri, STOP), b"")
                while time.monotonic() < deadline and self.get(job_id).status not in ENDED:
                    time.sleep(1.0)
        if self.get(job_id).status not in ENDED:
            with ray_faults(self.address):
                self.client.stop_job(job_id)
            while self.get(job_id).status not in ENDED:
                time.sleep(0.5)
        return self.get(job_id)


def for_cluster(cfg: RunConfig, on_this_machine: bool) -> RunConfig:
    """The recipe as the cluster can run it: local places become absolute where the cluster shares them.

    Raises:
        ConfigError: it names places on this machine and the cluster is elsewhere.
    """
    tree = config_dict(cfg)
    for section, key in (
        (tree, "storage"),
        (tree["data"], "train"),
        (tree["data"], "heldout"),
        (tree["model"], "base"),
    ):
        value = section[key]
        if not isinstance(value, str) or not is_local(value, always=key == "storage"):
            continue
        if not on_this_machine and not Path(value).is_absolute():
            raise ConfigError(
                f"{key} is {value!r}, a place on this machine, and the cluster is not on it",
                "put it into object storage and give its s3:// URI with --set, or a path that all machines share",
            )
        section[key] = str(Path(value).absolute())
    return parse_config(tree)


def is_local(value: str, always: bool) -> bool:
    """Whether a value of a recipe is a path here; names of hubs, generators and packages are not."""
    return "://" not in value and ":" not in value and (always or Path(value).exists())


def runtime_env(folder: Path) -> dict[str, Any]:
    """What a job brings along: its recipe, this package, and the settings of storage and tracking."""
    import fathom

    variables = passed_environment()
    if "MLFLOW_TRACKING_URI" not in variables and stack_state():
        variables["MLFLOW_TRACKING_URI"] = stack_state()["mlflow_uri"]
    return {
        "working_dir": str(folder),
        "py_modules": [str(Path(fathom.__file__).parent)],
        "env_vars": variables,
        "excludes": ["__pycache__"],
    }


def passed_environment() -> dict[str, str]:
    """The settings of this process that work on a cluster needs, too: of storage, tracking, hub and cache."""
    passed = ("AWS_", "MLFLOW_", "HF_", "FATHOM_CACHE", "PIP_FIND_LINKS")
    return {name: value for name, value in os.environ.items() if name.startswith(passed)}


def check_answers(address: str) -> None:
    """Raise ServiceError unless a Ray dashboard answers at an address within :data:`ANSWER_WITHIN_S`."""
    try:
        httpx.get(f"{address}/api/version", timeout=ANSWER_WITHIN_S, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServiceError(
            f"no Ray cluster answers at {address}: {type(error).__name__} {error}",
            "check the address (the dashboard's, port 8265 by default) and the way to it, or `fathom up`",
        ) from error


@contextlib.contextmanager
def ray_faults(address: str) -> Iterator[None]:
    """Ray's faults as ones with a remedy."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, ConnectionError, RuntimeError) as error:
        text = str(error).strip().splitlines()
        denied = any(word in str(error).lower() for word in ("401", "403", "unauthor", "token"))
        raise ServiceError(
            f"Ray at {address} refused: {text[0] if text else type(error).__name__}",
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
            if denied
            else "read the message above; `fathom status` lists the cluster's jobs",
        ) from error


def as_job(details: Any) -> Job:
    """Ray's description of a job, in ours."""
    begin, end = details.start_time or 0, details.end_time or time.time() * 1000
    metadata = details.metadata or {}
    return Job(
        details.submission_id,
        getattr(details.status, "value", str(details.status)),
        details.message or "",
        metadata.get("name", ""),
        metadata.get("run_uri", ""),
        max(end - begin, 0) / 1000 if begin else 0.0,
    )
