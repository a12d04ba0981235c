"""Results of ``fathom eval`` as an MLflow run: numbers as metrics, files as artifacts."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathom.config.schema import RunConfig

FOLDER = "evals"


def track_results(config: "RunConfig", uri: str, model: str, results: dict[str, Any], files: list[Path]) -> str | None:
    """Log a run ``NAME-eval`` into the recipe's experiment.

    Args:
        uri: of the MLflow server.
        model: what was measured.
        results: by measure.
        files: become artifacts.

    Returns:
        the run's page, or None when the server did not take it; ``fathom tracking sync`` sends it later.
    """
    from fathom.config.load import config_dict, config_digest
    from fathom.orchestrate.stack import state_folder
    from fathom.tracking.tracker import Tracker

    spool = state_folder() / FOLDER / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}" / "spool"
    tags = {"method": config.method.preset, "model": model, "measures": ",".join(results)}
    tracker = Tracker(spool, uri, config.tracking.experiment, f"{config.name}-eval", tags)
    tracker.start(config_dict(config), {"config": config_digest(config)})
    tracker.metrics(0, numbers(results))
    for path in files:
        tracker.artifact(path, FOLDER)
    return tracker.url if tracker.finish() else None


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """The few numbers of each measure that one compares between runs, by name; what is not finite is left out."""
    flat: dict[str, float] = {}
    for name, result in results.items():
        if name == "heldout":
            flat |= result.metrics()
        elif name == "accuracy":
            flat |= {f"eval/avg_at_{result.samples}": result.average.value}
            flat |= {f"eval/cons_at_{result.samples}": result.consensus.value}
            flat |= {"eval/decode_flops_per_answer": result.flops_per_answer}
        elif name == "changes":
            flat |= {"eval/unchanged": result.whole.unchanged, "eval/worse": result.whole.worse_beyond}
        elif name in ("thresholds", "accuracy-curve", "accuracy-thresholds"):
            flat |= {f"eval/{name}/slope": result.slope.value, f"eval/{name}/r_squared": result.r_squared}
    return {name: value for name, value in flat.items() if math.isfinite(value)}
