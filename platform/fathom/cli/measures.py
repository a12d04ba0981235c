"""The measures of ``fathom eval``: by name, what runs, what is drawn, what is said; and where results go."""

import difflib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fathom.cli.bench import Bench
from fathom.errors import ConfigError

ACCURACY = "accuracy"
ACCURACY_CURVE = "accuracy-curve"
ACCURACY_THRESHOLDS = "accuracy-thresholds"
GENERATING = (ACCURACY, ACCURACY_CURVE, ACCURACY_THRESHOLDS)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Measure(NamedTuple):
    """A measure: what runs it, what draws it, and the lines that a terminal shows."""

    run: Callable[[Bench], Any]
    plot: Callable[[Any, Path], list[Path]]
    lines: Callable[[Any], list[tuple[str, str]]]


def chosen_names(measures: str | None, accuracy: bool) -> tuple[list[str], bool]:
    """Names of the measures asked for, and whether those that do not apply are skipped: they are for ``all``.

    ``all`` is every measure that generates nothing; ``accuracy`` brings its curve.

    Raises:
        ConfigError: no such measure; names the nearest.
    """
    known = [*MEASURES]
    names = [name.strip() for name in (measures or "").split(",") if name.strip()]
    skips = "all" in names
    if skips:
        names = [name for name in known if name not in GENERATING] + [n for n in names if n != "all"]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"--measures: unknown measure {name!r}", f"{hint}known: all, {', '.join(known)}")
    if accuracy:
        names += [ACCURACY, ACCURACY_CURVE]
    return list(dict.fromkeys(names)), skips


def run_measures(bench: Bench, out: Path | None) -> tuple[dict[str, Any], list[Path]]:
    """Run what was asked; with ``out``, leave NAME.json, and plots as SVG and PNG, there.

    Returns:
        results by measure, and the files that were written.

    Raises:
        NotForThisMethod: a measure that was named does not apply to the model's method.
    """
    from fathom.evals.forward import NotForThisMethod

    results: dict[str, Any] = {}
    written: list[Path] = []
    for name in bench.asked.names:
        begin = time.monotonic()
        try:
            result = MEASURES[name].run(bench)
        except NotForThisMethod as error:
            if not bench.asked.skips:
                raise
            note(f"{name}: left out: {error.message}")
            continue
        results[name] = result
        if out is not None:
            written += write_result(name, result, out)
        if len(bench.asked.names) > 1:
            note(f"{name}: {time.monotonic() - begin:.1f} s")
    return results, written


def write_result(name: str, result: Any, out: Path) -> list[Path]:
    """``NAME.json`` and the measure's plots."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.as_json(), indent=1, allow_nan=False)
    path = out / f"{name}.json"
    path.write_text(text + "\n", encoding="utf-8")
    return [path, *MEASURES[name].plot(result, out)]


def check_out(out: Path | None) -> None:
    """Refuse, before work starts, a place that cannot hold results.

    Raises:
        ConfigError: it is a file.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file", "name a folder for the results")


def note(line: str) -> None:
    """Tell the person at the terminal."""
    print(line, file=sys.stderr, flush=True)


def _heldout(bench: Bench) -> Any:
    from fathom.evals.heldout import heldout_nll

    return heldout_nll(
        bench.model, bench.prepared, bench.sizes.tokens_per_forward, head_chunk_rows=bench.sizes.head_chunk_rows
    )


def _changes(bench: Bench) -> Any:
    from fathom.evals.changes import depth_changes

    return depth_changes(bench.model, bench.prepared, bench.sizes)


def _calibration(bench: Bench) -> Any:
    from fathom.evals.calibration import calibration
    from fathom.model.collectives import LOCAL
    from fathom.objectives.lookahead import lookahead_log_prob

    def lookahead(model: Any, trace: Any, rows: Any, depth: int, chosen: Any) -> Any:
        return lookahead_log_prob(model, trace, rows, depth, chosen, LOCAL, bench.sizes.head_chunk_rows)

    # The look-ahead reads a depth as it is; where a coda comes first, all depths are forced and probed instead.
    measured = lookahead if bench.model.reads_each_depth else None
    return calibration(bench.model, bench.prepared, measured, bench.sizes)


def _kinds(bench: Bench) -> Any:
    from fathom.evals.depth_by_kind import depth_by_kind
    from fathom.evals.kinds import tokenizer_kinds

    kinds = tokenizer_kinds(bench.tokenizer)
    return depth_by_kind(bench.model, bench.prepared, lambda _, ids: kinds(ids), bench.sizes)


def _convergence(bench: Bench) -> Any:
    from fathom.evals.convergence import convergence

    return convergence(bench.model, bench.prepared, bench.sizes)


def _attention(bench: Bench) -> Any:
    from fathom.evals.attention_mass import attention_mass

    return attention_mass(bench.model, bench.prepared)


def _thresholds(bench: Bench) -> Any:
    from fathom.evals.threshold_curve import nll_settings, threshold_curve

    settings = nll_settings(bench.model, bench.prepared, bench.asked.thresholds, bench.sizes)
    return threshold_curve(bench.name, settings, bench.config.seed)


def _accuracy(bench: Bench) -> Any:
    from fathom.evals.accuracy import grade_responses

    return grade_responses(bench.responses, bench.flops, bench.asked.match)


def _accuracy_curve(bench: Bench) -> Any:
    from fathom.evals.accuracy import accuracy_curve, cutoff_settings

    asked = bench.asked
    settings = cutoff_settings(bench.responses, asked.cutoffs, bench.decode, bench.flops, asked.match)
    return accuracy_curve(bench.name, "cutoff (tokens)", settings, bench.config.seed)


def _accuracy_thresholds(bench: Bench) -> Any:
    from fathom.evals.accuracy import accuracy_curve, threshold_settings
    from fathom.evals.threshold_curve import require_dial

    require_dial(bench.model)
    asked = bench.asked
    settings = threshold_settings(
        bench.items, bench.generate, bench.sampling, asked.thresholds, bench.flops, asked.match, asked.samples
    )
    return accuracy_curve(bench.name, "threshold", settings, bench.config.seed)


def _plot(function: str) -> Callable[[Any, Path], list[Path]]:
    """A plot by name, imported when it is drawn."""

    def draw(result: Any, folder: Path) -> list[Path]:
        from fathom.evals import plots

        return getattr(plots, function)(result, folder)

    return draw


def _plot_curve(name: str) -> Callable[[Any, Path], list[Path]]:
    def draw(curve: Any, folder: Path) -> list[Path]:
        from fathom.evals.plots import plot_curves

        return plot_curves([curve], folder, name)

    return draw


def _plot_heldout(report: Any, folder: Path) -> list[Path]:
    from fathom.evals.plots import plot_depths

    return plot_depths(report.depth_counts, folder)


def _lines(function: str) -> Callable[[Any], list[tuple[str, str]]]:
    def say(result: Any) -> list[tuple[str, str]]:
        from fathom.cli import measure_lines

        return getattr(measure_lines, function)(result)

    return say


MEASURES: dict[str, Measure] = {
    "heldout": Measure(_heldout, _plot_heldout, _lines("heldout")),
    "changes": Measure(_changes, _plot("plot_changes"), _lines("changes")),
    "calibration": Measure(_calibration, _plot("plot_gains"), _lines("calibration")),
    "kinds": Measure(_kinds, _plot("plot_kinds"), _lines("kinds")),
    "convergence": Measure(_convergence, _plot("plot_convergence"), _lines("convergence")),
    "attention": Measure(_attention, _plot("plot_attention"), _lines("attention")),
    "thresholds": Measure(_thresholds, _plot_curve("thresholds"), _lines("curve")),
    ACCURACY: Measure(_accuracy, _plot("plot_accuracy"), _lines("accuracy")),
    ACCURACY_CURVE: Measure(_accuracy_curve, _plot_curve(ACCURACY_CURVE), _lines("curve")),
    ACCURACY_THRESHOLDS: Measure(_accuracy_thresholds, _plot_curve(ACCURACY_THRESHOLDS), _lines("curve")),
}
