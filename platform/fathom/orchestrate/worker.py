"""What every worker of a run does; rank 0 also measures, tracks, plots, publishes and registers."""

import json
import shutil
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from fathom.checkpoint.store import CheckpointStore
from fathom.config.load import config_dict, config_digest
from fathom.config.schema import RunConfig
from fathom.data.chat_formats import save_format
from fathom.data.prepared import Prepared
from fathom.evals.heldout import HeldoutReport
from fathom.evals.plots import plot_calibration, plot_depths, plot_loss
from fathom.model.folder import save_model
from fathom.model.looped import LoopedLM
from fathom.model.methods import method_of
from fathom.objectives.stats import CALIBRATION_BINS, calibration
from fathom.orchestrate.measure import measure, measure_before, report_from_json, with_weights
from fathom.orchestrate.run import RESULT, RunResult
from fathom.storage import files
from fathom.storage.manifest import Manifest, publish_folder
from fathom.tracking.tracker import SERIES, Tracker
from fathom.train.group import Group
from fathom.train.inputs import Inputs, describe_inputs, fetch_inputs
from fathom.train.place import CHECKPOINTS, Place
from fathom.train.session import Outcome, train_worker
from fathom.train.state import best_of

BASELINE = "baseline.json"


def run_worker(cfg: RunConfig, place: Place, tracking_uri: str | None, group: Group) -> None:
    """Run a recipe on this worker together with the others; rank 0 leaves ``result.json`` in the run's storage."""
    place.work.mkdir(parents=True, exist_ok=True)
    inputs = fetch_inputs(cfg, group, place.work)
    first = First(cfg, place, inputs, group.device, tracking_uri) if group.rank == 0 else None
    try:
        if first is not None:
            first.begin()
        group.barrier()
        outcome = train_worker(
            cfg,
            inputs,
            place,
            group,
            record=first.record if first else lambda step, metrics: None,
            evaluate=first.evaluate if first else lambda step, weights: {},
        )
        if first is not None:
            first.end(outcome)
        group.barrier()
    except BaseException:
        if first is not None:
            first.tracker.finish("FAILED")
        raise


class First:
    """The duties of rank 0."""

    def __init__(
        self, cfg: RunConfig, place: Place, inputs: Inputs, device: torch.device, tracking_uri: str | None
    ) -> None:
        self.cfg = cfg
        self.place = place
        self.inputs = inputs
        self.device = device
        self.tracker = Tracker(
            place.work / "spool", tracking_uri, cfg.tracking.experiment, cfg.name, {"method": cfg.method.preset}
        )
        self.heldout: dict[str, HeldoutReport] = {}
        self.measured: dict[int, HeldoutReport] = {}

    def begin(self) -> None:
        """Start tracking and measure what training begins from; an earlier attempt's measurement is reused."""
        data = describe_inputs(self.cfg, self.inputs)
        digests = {"config": config_digest(self.cfg), "data": self.inputs.train.digest}
        digests[SERIES] = CheckpointStore(files.join(self.place.uri, CHECKPOINTS)).identity()
        if self.inputs.heldout is not None:
            digests["heldout"] = self.inputs.heldout.digest
        self.tracker.start(config_dict(self.cfg), digests)
        counts = data["train"]["counts"]
        say(f"data: {counts['documents']:,} conversations, {counts['supervised_tokens']:,} supervised tokens")
        if self.inputs.heldout is None:
            return
        where, key = files.join(self.place.uri, BASELINE), digests["config"] + digests["heldout"]
        known = json.loads(files.read_bytes(where)) if files.exists(where) else {}
        if known.get("key") != key:
            say("measuring held-out data before training")
            reports = measure_before(self.cfg, self.inputs.base, self.inputs.heldout, self.device)
            known = {"key": key, "reports": {name: report.as_json() for name, report in reports.items()}}
            files.write_bytes(where, json.dumps(known).encode())
        self.heldout = {name: report_from_json(report) for name, report in known["reports"].items()}
        for name, report in self.heldout.items():
            say(f"held out, {name}: nll {report.nll:.4f}, mean depth {report.mean_depth:.2f}")
            self.tracker.metrics(0, report.metrics(f"heldout_{name}"))

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a step."""
        self.tracker.metrics(step, metrics)

    def evaluate(self, step: int, weights: dict[str, Tensor]) -> dict[str, float]:
        """Held-out measurement in the middle of training."""
        if self.inputs.heldout is None:
            return {}
        model = with_weights(self.cfg, self.inputs.base, weights)
        self.measured[step] = self._measure(step, model, self.inputs.heldout)
        return self.measured[step].metrics()

    def _measure(self, step: int, model: LoopedLM, heldout: Prepared) -> HeldoutReport:
        report = measure(self.cfg, model, heldout, self.device)
        say(f"held out, step {step}: nll {report.nll:.4f}, mean depth {report.mean_depth:.2f}")
        self.tracker.metrics(step, report.metrics())
        return report

    def end(self, outcome: Outcome) -> None:
        """Measure, plot, publish, register, and leave the summary."""
        published: tuple[str, Manifest] | None = None
        version: str | None = None
        if outcome.finished and outcome.weights is not None:
            model = with_weights(self.cfg, self.inputs.base, outcome.weights)
            step = outcome.weights_step
            if self.inputs.heldout is not None:
                known = self.measured.get(step)  # not of an earlier attempt
                self.heldout["trained"] = known or self._measure(step, model, self.inputs.heldout)
            published = self._publish(outcome, model)
        plots = self._plot(outcome)
        name = self.cfg.tracking.register_as
        if published is not None and name is not None:
            version = self.tracker.register(name, published[0], published[1].digest)
        result = self._result(outcome, published, version, plots)
        files.write_bytes(files.join(self.place.uri, RESULT), json.dumps(result.as_json(), indent=1).encode())
        self.tracker.finish("FINISHED" if outcome.finished else "KILLED")

    def _publish(self, outcome: Outcome, model: LoopedLM) -> tuple[str, Manifest]:
        """Write the model folder and commit it to storage under a name of its own."""
        folder = self.place.work / "export"
        shutil.rmtree(folder, ignore_errors=True)
        save_model(model, folder, self.inputs.base)
        if self.cfg.data.chat_format is not None:
            save_format(self.cfg.data.chat_format, folder)
        uri = files.absolute(
            files.join(self.cfg.storage, "models", self.cfg.name, time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
        )
        meta = {
            "name": self.cfg.name,
            "step": outcome.weights_step,
            "best": best_of(self.cfg, outcome.state),
            "config_digest": config_digest(self.cfg),
            "data_digest": self.inputs.train.digest,
            "run_id": self.tracker.run_id,
            "heldout_nll": {name: report.nll for name, report in self.heldout.items()},
        }
        say(f"publishing the model to {uri}")
        manifest = publish_folder(folder, uri, meta)
        shutil.rmtree(folder, ignore_errors=True)
        return uri, manifest

    def _plot(self, outcome: Outcome) -> list[str]:
        """Draw the run's plots; to the tracker and to the run's storage."""
        folder = self.place.work / "plots"
        shutil.rmtree(folder, ignore_errors=True)
        drawn: list[Path] = plot_loss(
            outcome.state.history, folder, {name: report.nll for name, report in self.heldout.items()}
        )
        if "trained" in self.heldout:
            depths = self.heldout["trained"].depth_counts
            drawn += plot_depths(depths, folder, method_of(self.cfg.method).max_depth)
        bins = calibration_bins(outcome)
        if bins:
            drawn += plot_calibration(bins, method_of(self.cfg.method).threshold, folder)
        for path in drawn:
            self.tracker.artifact(path, "plots")
        where = files.join(self.place.uri, "plots")
        files.upload_tree(folder, where)
        return [files.join(where, path.name) for path in drawn]

    def _result(
        self,
        outcome: Outcome,
        published: tuple[str, Manifest] | None,
        version: str | None,
        plots: list[str],
    ) -> RunResult:
        state = outcome.state
        return RunResult(
            name=self.cfg.name,
            finished=outcome.finished,
            config_digest=config_digest(self.cfg),
            steps=state.step,
            updates=state.updates,
            refused_steps=state.refused_steps,
            empty_steps=state.empty_steps,
            tokens=state.tokens,
            supervised_tokens=state.supervised_tokens,
            train_seconds=state.seconds,
            tokens_per_second=state.tokens / state.seconds if state.seconds else 0.0,
            resumed_from=outcome.started_at,
            best=best_of(self.cfg, state),
            heldout={name: report.as_json() for name, report in self.heldout.items()},
            data=describe_inputs(self.cfg, self.inputs),
            model_uri=published and published[0],
            model_digest=published and published[1].digest,
            registered_as=self.cfg.tracking.register_as if version else None,
            version=version,
            run_id=self.tracker.run_id,
            run_url=self.tracker.url,
            plots=plots,
        )


def calibration_bins(outcome: Outcome) -> list[tuple[float, float, int, float]]:
    """(g low, g high, tokens, mean gain) of the last steps' decisions."""
    if not outcome.state.calibration:
        return []
    points = calibration(outcome.stat_names, torch.tensor(outcome.state.calibration, dtype=torch.float64))
    width = 1.0 / CALIBRATION_BINS
    lows = [min(int(probability / width), CALIBRATION_BINS - 1) * width for probability, _, _ in points]
    return [(low, low + width, round(count), gain) for low, (_, gain, count) in zip(lows, points, strict=True)]


def say(line: str) -> None:
    """A line for whoever follows the run."""
    print(line, file=sys.stderr, flush=True)
