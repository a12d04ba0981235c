"""The one writer of a run: every call spools and returns; a thread sends. Nothing here raises into training."""

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fathom.errors import ConfigError, ServiceError
from fathom.storage import files
from fathom.tracking.sender import Sender, number_text
from fathom.tracking.server import connect
from fathom.tracking.spool import Spool

log = logging.getLogger(__name__)
FLUSH_EVERY_S = 2.0
LONGEST_PAUSE_S = 30.0
SERIES = "series"


class Tracker:
    """Tracks one run. A spool folder that exists continues its run as another attempt.

    Args:
        spool: folder of this run's events; keep it between attempts.
        uri: MLflow tracking server; ``None`` only spools.
        experiment: its name, made when missing.
        run_name: shown in MLflow.
        tags: of the run.
    """

    def __init__(
        self, spool: Path, uri: str | None, experiment: str, run_name: str, tags: Mapping[str, str] | None = None
    ) -> None:
        self.spool = Spool(spool)
        self.uri = uri
        self.experiment = experiment
        self.run_name = run_name
        self.tags = dict(tags or {})
        self._sender: Sender | None = None
        self._failing = False
        self._complained: set[str] = set()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._hold = contextlib.ExitStack()
        self._holding = threading.Lock()
        self._held = False
        self._tracked: dict[str, int] = {}  # newest step of earlier attempts, by metric

    def start(self, config: dict[str, Any], digests: Mapping[str, str]) -> None:
        """Begin an attempt: resolved configuration as parameters and ``config.json``, digests as tags.

        One of these, :data:`SERIES`, names the checkpoints that attempts go on from: only an attempt of the same series
        repeats steps of an earlier one.
        """
        with contextlib.suppress(ServiceError, OSError):  # the thread tries again
            self._hold_spool()
        starts: list[dict[str, Any]] = []
        for event, _ in self.spool.read(0):
            starts += [event] if event["kind"] == "start" else []
            if event["kind"] == "metrics" and starts and starts[-1]["digests"].get(SERIES) == digests.get(SERIES):
                step = event["step"]
                self._tracked |= {name: max(step, self._tracked.get(name, step)) for name in event["values"]}
        self._append(
            "start",
            key=starts[0]["key"] if starts else secrets.token_hex(16),
            attempt=len(starts) + 1,
            experiment=self.experiment,
            run_name=self.run_name,
            tags={name: str(value) for name, value in self.tags.items()},
            digests={name: str(value) for name, value in digests.items()},
            config=json.loads(json.dumps(config, default=str)),
        )
        if self.uri is not None:
            self._thread = threading.Thread(target=self._run, name="fathom-tracking", daemon=True)
            self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step, by name. What an earlier attempt told of a step that is run again stays as it is."""
        new = {name: number_text(value) for name, value in values.items() if step > self._tracked.get(name, -1)}
        if new:
            self._append("metrics", step=int(step), values=new)

    def artifact(self, path: Path | str, folder: str = "") -> None:
        """A small file (a plot, a report), copied now and logged below ``folder`` of the run's artifacts."""
        try:
            kept = self.spool.keep_artifact(Path(path))
        except (OSError, ValueError) as error:
            self._complain("artifact", f"{path} is not tracked: {error}")
            return
        self._append("artifact", file=kept, folder=folder)

    def register(
        self, name: str, source_uri: str, digest: str, alias: str = "champion", timeout_s: float = 60.0
    ) -> str | None:
        """Register a published model folder as a version and point an alias at it.

        Returns:
            the version, or ``None`` when the server did not take it in time; the spool then keeps it for
            ``fathom tracking sync``.
        """
        key = secrets.token_hex(8)
        source = files.absolute(source_uri)
        self._append("register", key=key, name=name, source=source, digest=digest, alias=alias)
        self._wait(lambda: key in self._versions() or self._pending() == 0, timeout_s)
        return self._versions().get(key)

    def finish(self, status: str = "FINISHED", timeout_s: float = 30.0) -> bool:
        """End the attempt: ``FINISHED``, ``FAILED`` or ``KILLED``.

        Returns:
            whether the server has everything; if not, ``fathom tracking sync`` sends the rest.
        """
        self._append("finish", status=status)
        arrived = self._wait(lambda: self._pending() == 0, timeout_s)
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            if not arrived:
                log.warning(
                    "MLflow has not received everything; send the rest with: fathom tracking sync %s", self.spool.folder
                )
        if self._thread is None or not self._thread.is_alive():  # else it is in the middle of a request
            self._hold.close()
        return arrived

    @property
    def run_id(self) -> str | None:
        """The run's id in MLflow, once it exists there."""
        return (self.spool.position(self.uri).run_id or None) if self.uri is not None else None

    @property
    def url(self) -> str | None:
        """The run's page in MLflow, once it exists there."""
        if self.uri is None or self.run_id is None:
            return None
        experiment = self.spool.position(self.uri).experiment_id
        return f"{self.uri.rstrip('/')}/#/experiments/{experiment}/runs/{self.run_id}"

    def _append(self, kind: str, **fields: Any) -> None:
        try:
            self.spool.append(kind, **fields)
        except (OSError, TypeError, ValueError) as error:
            self._complain("spool", f"a {kind} event is lost: {self.spool.folder}: {error}")
        if kind != "metrics":
            self._wake.set()

    def _complain(self, about: str, message: str) -> None:
        """Warn once per subject."""
        if about not in self._complained:
            self._complained.add(about)
            log.warning("tracking: %s", message)

    def _versions(self) -> dict[str, str]:
        return self._sender.versions if self._sender is not None else {}

    def _pending(self) -> int:
        sent = self._sender.position.offset if self._sender is not None else -1
        return self.spool.size() - sent

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for the sending thread; not for a server that is known to be away."""
        end = time.monotonic() + timeout_s
        while self._thread is not None and not done() and time.monotonic() < end:
            if self._failing or not self._thread.is_alive():
                break
            time.sleep(0.05)
        return self._thread is not None and done()

    def _run(self) -> None:
        """The sending thread: whatever happens here, training goes on."""
        pause = FLUSH_EVERY_S
        while not self._ending.is_set():
            try:
                self._flush()
                if self._failing:
                    log.warning("tracking: MLflow at %s answers again", self.uri)
                self._failing, pause = False, FLUSH_EVERY_S
            except Exception as error:
                self._failing = True
                message = error.message if isinstance(error, ServiceError) else f"{type(error).__name__}: {error}"
                self._complain("server", f"{message}; training goes on, events stay in {self.spool.folder}")
                pause = min(pause * 2, LONGEST_PAUSE_S)
            self._wake.wait(pause)
            self._wake.clear()

    def _flush(self) -> None:
        assert self.uri is not None
        self._hold_spool()
        if self._sender is None or self._failing:
            versions = self._versions()
            self._sender = Sender(self.spool, self.uri, connect(self.uri))
            self._sender.versions = versions
        self._sender.send_all()

    def _hold_spool(self) -> None:
        """Be the only writer from the first moment that is possible until the end of the attempt.

        Raises:
            ServiceError: an earlier attempt, or a replay, still sends this spool's events.
        """
        with self._holding:
            if not self._held:
                self._hold.enter_context(self.spool.writing())
                self._held = True


class Synced(NamedTuple):
    """What a replay sent.

    Attributes:
        run_id: the run in MLflow.
        events: by kind, ``rejected`` among them; empty when the server had everything.
    """

    run_id: str
    events: dict[str, int]


def sync_spool(spool: Path, uri: str) -> Synced:
    """Send what a server has not acknowledged. Repeating it changes nothing.

    A run whose last attempt never finished was killed: it is marked FAILED.

    Raises:
        ConfigError: no spool there.
        ServiceError: the server does not answer or failed, or a running job still writes this spool.
    """
    from mlflow.exceptions import MlflowException

    if not (spool / "events.jsonl").is_file():
        raise ConfigError(f"{spool}: no tracking events there", "give the folder that holds events.jsonl")
    events = Spool(spool)
    with events.writing():
        last = [event["kind"] for event, _ in events.read(0) if event["kind"] in ("start", "finish")]
        if last and last[-1] == "start":
            events.append("finish", status="FAILED")
        sender = Sender(events, uri, connect(uri))
        try:
            sender.send_all()
        except MlflowException as error:
            raise ServiceError(f"MLflow at {uri} failed: {error}", "run the same command again") from error
    return Synced(sender.position.run_id, dict(sender.sent))
