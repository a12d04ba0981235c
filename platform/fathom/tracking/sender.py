"""Sends spooled events to a tracking server: in order, batched, acknowledged, and harmless to repeat.

Repeating is harmless because everything sent has a name of its own: the run is found by a tag with the spool's key, a
metric row by its fixed time and step, an artifact by its path, a model version by its run, source and digest.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fathom.tracking.registry import register_version
from fathom.tracking.spool import Position, Spool

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)
METRICS_PER_BATCH = 1000  # limits of MLflow's API
PAIRS_PER_BATCH = 100
PARAM_LENGTH = 6000
TAG_LENGTH = 5000
KEY_TAG = "fathom.run_key"
REFUSED_FOR_GOOD = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE"})


class Sender:
    """Sends the events of one spool to one server. The caller holds ``spool.writing()``.

    Args:
        spool: what to send.
        server: tracking URI, the name under which positions are kept.
        client: of that server.
    """

    def __init__(self, spool: Spool, server: str, client: "MlflowClient") -> None:
        self.spool = spool
        self.server = server
        self.client = client
        self.position = self._known_position()
        self._senders = {
            "start": self._send_start,
            "metrics": self._send_metrics,
            "artifact": self._send_artifact,
            "register": self._send_register,
            "finish": self._send_finish,
        }
        self.sent: Counter[str] = Counter()
        self.versions: dict[str, str] = {}

    def _known_position(self) -> Position:
        """What the server acknowledged; nothing if it has lost the run, so that it gets everything again."""
        from mlflow.exceptions import MlflowException

        position = self.spool.position(self.server)
        if position.run_id:
            try:
                self.client.get_run(position.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return Position()
        return position

    def send_all(self) -> None:
        """Send everything not acknowledged.

        Raises:
            Exception: whatever the client raises when the server is gone; what was acknowledged stays so.
        """
        batch: list[dict[str, Any]] = []
        rows = 0
        end = self.position.offset
        for event, behind in self.spool.read(self.position.offset):
            is_metrics = event["kind"] == "metrics"
            if batch and (not is_metrics or rows + len(event["values"]) > METRICS_PER_BATCH):
                self._send(batch, end)
                batch, rows = [], 0
            if is_metrics:
                batch.append(event)
                rows += len(event["values"])
            else:
                self._send([event], behind)
            end = behind
        if batch:
            self._send(batch, end)

    def _send(self, events: list[dict[str, Any]], end: int) -> None:
        """Send metrics events together, or one event of another kind; then acknowledge up to ``end``."""
        from mlflow.exceptions import MlflowException

        try:
            self._senders[events[0]["kind"]](*events)
            self.sent[events[0]["kind"]] += len(events)
        except (MlflowException, KeyError, OSError) as error:
            if not _refused_for_good(error):
                raise
            if len(events) > 1:  # one bad metric must not take the others with it
                for event in events:
                    self._send([event], self.position.offset)
            else:
                log.warning("the tracking server refused a %s event: %s", events[0]["kind"], error)
                self.spool.reject(events[0], str(error))
                self.sent["rejected"] += 1
        self.position = self.position._replace(offset=end)
        self.spool.acknowledge(self.server, self.position)

    def _send_start(self, event: dict[str, Any]) -> None:
        if not self.position.run_id:
            self.position = self._find_or_create_run(event)
            self.spool.acknowledge(self.server, self.position)
        run_id = self.position.run_id
        self.client.update_run(run_id, status="RUNNING")
        tags = {**event["tags"], "attempt": str(event["attempt"]), **event["digests"]}
        # a parameter is written once; a resumed run's may differ where that was allowed
        self._log_pairs(flatten(event["config"]) if event["attempt"] == 1 else {}, tags)
        name = "config.json" if event["attempt"] == 1 else f"config-attempt-{event['attempt']}.json"
        self.client.log_dict(run_id, event["config"], name)

    def _find_or_create_run(self, event: dict[str, Any]) -> Position:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(event["experiment"])
        if found is not None:
            experiment_id = found.experiment_id
        else:
            try:
                experiment_id = self.client.create_experiment(event["experiment"])
            except MlflowException as error:  # another run made it in between
                found = self.client.get_experiment_by_name(event["experiment"])
                if found is None:
                    raise error
                experiment_id = found.experiment_id
        runs = self.client.search_runs([experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{event['key']}'")
        run = (
            runs[0]
            if runs
            else self.client.create_run(
                experiment_id, start_time=event["time_ms"], tags={KEY_TAG: event["key"]}, run_name=event["run_name"]
            )
        )
        return self.position._replace(run_id=run.info.run_id, experiment_id=experiment_id)

    def _log_pairs(self, params: dict[str, str], tags: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        run_id = self.position.run_id
        for some in _portions(list(params.items()), PAIRS_PER_BATCH):
            self.client.log_batch(run_id, params=[Param(name, value[:PARAM_LENGTH]) for name, value in some])
        for some in _portions(list(tags.items()), PAIRS_PER_BATCH):
            self.client.log_batch(run_id, tags=[RunTag(name, value[:TAG_LENGTH]) for name, value in some])

    def _send_metrics(self, *events: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        rows = [
            Metric(name, float(value), event["time_ms"], event["step"])
            for event in events
            for name, value in event["values"].items()
        ]
        for some in _portions(rows, METRICS_PER_BATCH):
            self.client.log_batch(self.position.run_id, metrics=some)

    def _send_artifact(self, event: dict[str, Any]) -> None:
        self.client.log_artifact(self.position.run_id, str(self.spool.folder / event["file"]), event["folder"] or None)

    def _send_register(self, event: dict[str, Any]) -> None:
        version = register_version(
            self.client, event["name"], event["source"], event["digest"], event["alias"], self.position.run_id
        )
        self.versions[event["key"]] = version

    def _send_finish(self, event: dict[str, Any]) -> None:
        self.client.set_terminated(self.position.run_id, event["status"], end_time=event["time_ms"])


def _portions(items: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """``{"train": {"steps": 3}}`` as ``{"train.steps": "3"}``."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = str(value)
    return flat


def number_text(value: float) -> float | str:
    """A metric as JSON can hold it: strict JSON has no infinities and no NaN."""
    return float(value) if math.isfinite(value) else str(float(value))


def _refused_for_good(error: Exception) -> bool:
    """Whether sending this event again can never help."""
    code = getattr(error, "error_code", None)
    return code in REFUSED_FOR_GOOD or isinstance(error, (KeyError, FileNotFoundError))
