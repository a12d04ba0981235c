"""A run's workers started by Ray Train. A thin layer: Ray places and connects them, the rest is :mod:`.worker`.

Checkpoints are our own, so a failed attempt goes on from the last committed one, whatever became of Ray's actors.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fathom.checkpoint.store import CheckpointStore
from fathom.config.load import config_dict, parse_config
from fathom.config.schema import RunConfig
from fathom.errors import FathomError, ServiceError, StorageError
from fathom.orchestrate.stack import stack_state, use_stack
from fathom.storage import files
from fathom.train.place import CHECKPOINTS, STOP, Place

COLLATERAL = ("gloo", "nccl", "connection", "socket", "broken pipe", "timed out", "actor died", "actordied")
"""Words of errors that a worker has because another one is gone."""


def run_on_ray(cfg: RunConfig, place: Place, tracking_uri: str | None) -> None:
    """Run a recipe on ``parallel.workers`` Ray Train workers; after a failure, again from the last checkpoint.

    Raises:
        FathomError: a worker found a mistake that trying again cannot cure, the same failure came twice without a new
            checkpoint in between, or there were more than ``parallel.max_failures``.
        ServiceError: the Ray address does not answer.
    """
    connect()
    store = CheckpointStore(files.join(place.uri, CHECKPOINTS))
    job = {
        "config": config_dict(cfg),
        "uri": place.uri,
        "work": str(place.work),
        "allow_change": place.allow_change,
        "tracking_uri": tracking_uri,
        "folder": str(Path.cwd()),
    }
    known: set[tuple[int, str]] = set()
    for failures in range(cfg.parallel.max_failures + 1):
        fault = attempt(cfg, job, place)
        if fault is None:
            return
        step = last_committed(store, fault)
        judge(fault, step, known)
        left = cfg.parallel.max_failures - failures
        say(f"a worker failed ({first_line(fault)}); last committed step: {step}; {left} more tries")
    raise FathomError(
        f"run {cfg.name!r}: {cfg.parallel.max_failures + 1} attempts failed, the last with {first_line(fault)}",
        f"read the workers' output above; the same command goes on from step {step}",
    )


def last_committed(store: CheckpointStore, fault: BaseException) -> int:
    """The step to go on from; 0 without a checkpoint.

    Raises:
        StorageError: the store does not answer; if a worker ended for that reason, what it says, which says more.
    """
    try:
        latest = store.latest()
    except StorageError as error:
        told = [each for each in worker_errors(fault) if isinstance(each, StorageError)]
        raise (told or [error])[0] from fault
    return latest.step if latest else 0


def judge(fault: BaseException, step: int, known: set[tuple[int, str]]) -> None:
    """Raise if another attempt cannot help: a mistake, or a failure that was seen at this very checkpoint.

    Args:
        fault: what ended the attempt.
        step: last committed.
        known: (step, failure) of earlier attempts; gains this one.
    """
    errors = worker_errors(fault)
    for error in errors:
        if isinstance(error, FathomError) and not isinstance(error, StorageError):
            raise error
    own = [f"{type(error).__name__}: {error}" for error in errors if not collateral(error)]
    for text in own:
        if (step, text) in known:
            raise FathomError(
                f"the same failure twice without a new checkpoint after step {step}: {text}",
                "trying again cannot help; read the traceback in the workers' output above",
            ) from fault
        known.add((step, text))


def attempt(cfg: RunConfig, job: dict[str, Any], place: Place) -> BaseException | None:
    """Start the workers and wait for them; what ended them too early, or None.

    The wait is in a thread of its own, so that this one hears signals: the first one asks the workers to stop at a
    checkpoint, the second one ends everything.
    """
    say(f"starting {cfg.parallel.workers} workers")
    trainer = make_trainer(cfg, job)
    faults: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:  # of any kind: it is judged by the caller
            faults.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    with stop_on_signal(place):
        thread.start()
        while thread.is_alive():
            thread.join(0.5)
    return faults[0] if faults else None


def make_trainer(cfg: RunConfig, job: dict[str, Any]) -> Any:
    """Ray's trainer for one attempt. Its own storage holds only its notes, under a name that is never used again."""
    import ray
    from ray.train import FailureConfig, LoggingConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchTrainer

    from fathom.storage.arrow import arrow_filesystem

    filesystem, path = arrow_filesystem(files.join(job["uri"], "ray"))
    free = ray.available_resources()
    workers = cfg.parallel.workers
    return TorchTrainer(
        ray_worker,
        train_loop_config=job,
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=free.get("GPU", 0) >= workers,
            resources_per_worker={"CPU": share_of(free.get("CPU", 0), workers)},
        ),
        run_config=RayRunConfig(
            name=f"{cfg.name}-{uuid.uuid4().hex[:8]}",
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=cfg.parallel.max_failures),
            # Its warnings are of a busy machine, with tracebacks; what ends a worker is an error, and ours to tell.
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def share_of(cpus: float, workers: int) -> float:
    """Logical CPUs to ask for each worker: at most 1, and so few that all fit beside what runs already."""
    share = min(1.0, int(100 * cpus / workers) / 100)
    return int(share) if share == 1.0 else share


def ray_worker(job: dict[str, Any]) -> None:
    """On each worker: parse what came as plain values, join the group that Ray made, run."""
    from fathom.orchestrate.worker import run_worker
    from fathom.train.group import initialised_group

    logging.getLogger().setLevel(logging.WARNING)  # Ray Train lets every note of every package through
    with contextlib.suppress(FileNotFoundError):  # relative paths of a recipe mean the folder it was started in
        os.chdir(job["folder"])
    place = Place(job["uri"], Path(job["work"]), job["allow_change"])
    run_worker(parse_config(job["config"]), place, job["tracking_uri"], initialised_group())


def connect() -> None:
    """Join a Ray cluster: the job's own, ``$RAY_ADDRESS``, the local stack's, or one started here for this process.

    Raises:
        ServiceError: an address was given and does not answer.
    """
    import ray

    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it shows every line twice
    # Importing torch on a busy machine takes longer than the minute that Ray gives a worker.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    stack = stack_state()
    if not address and stack:
        use_stack(stack)
        address = stack["ray_address"]
    options: dict[str, Any]
    if address:
        options = {"address": address}
        remedy = "check the address, and RAY_AUTH_TOKEN_PATH for its token; or unset RAY_ADDRESS and `fathom up`"
    else:
        say("no Ray cluster is up: starting one for this run (`fathom up` keeps one)")
        # On loopback only: without a stack there is no token that would keep others out.
        options = {
            "include_dashboard": False,
            "num_cpus": max(os.cpu_count() or 1, 2),
            "_node_ip_address": "127.0.0.1",
        }
        remedy = "is the machine short of memory or processor time? try again, or `fathom up` first"
    try:
        # What our workers print comes through; Ray's own notes about starting them stay in its log files.
        quiet = ray.LoggingConfig(log_level="WARNING")
        ray.init(**options, logging_level=logging.ERROR, log_to_driver=True, logging_config=quiet)
    except Exception as error:  # Ray raises bare exceptions, too, when a node does not start in time
        where = f"Ray at {address}" if address else "a local Ray"
        raise ServiceError(f"{where} cannot be used: {first_line(error)}", remedy) from error


def worker_errors(fault: BaseException) -> list[BaseException]:
    """The exceptions of the workers themselves, unpacked from Ray's wrappers."""
    found: list[BaseException] = list(getattr(fault, "worker_failures", {}).values()) or [fault]
    return [unpacked(error) for error in found]


def unpacked(error: BaseException) -> BaseException:
    """The innermost exception of Ray's wrapper classes, or the error itself."""
    for name in ("_base_exc", "cause", "controller_failure"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException):
            return unpacked(inner)
    return error


def collateral(error: BaseException) -> bool:
    """Whether an error says only that another worker is gone."""
    text = f"{type(error).__name__} {error}".lower()
    return not isinstance(error, FathomError) and any(word in text for word in COLLATERAL)


@contextlib.contextmanager
def stop_on_signal(place: Place) -> Iterator[None]:
    """While inside, the first ctrl-C or SIGTERM leaves a request to stop in the run's storage."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _: object) -> None:
        signal.signal(number, before[number])
        files.write_bytes(files.join(place.uri, STOP), b"")
        say("asked the workers to finish their step and commit; once more to end at once")

    before: dict[int, Any] = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    inner = worker_errors(error)[0]
    lines = [line for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0] if lines else ''}"[:300]


def say(line: str) -> None:
    """Tell the person at the terminal."""
    print(line, file=sys.stderr, flush=True)
