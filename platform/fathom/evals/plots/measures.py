"""A plot for each measure, drawn from its result alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.evals.plots.figure import INK, depth_colour, dress, new_figure, save

if TYPE_CHECKING:
    from fathom.evals.accuracy import Accuracy
    from fathom.evals.calibration import Calibration
    from fathom.evals.changes import DepthChanges
    from fathom.evals.convergence import Convergence
    from fathom.evals.curve import Curve
    from fathom.evals.depth_by_kind import DepthByKind
    from fathom.evals.intervals import Estimate

_CURVE_COLOURS = ("#ef4444", "#2563eb", "#059669", "#a21caf", "#f59e0b", "#64748b")


def plot_accuracy(accuracy: "Accuracy", folder: Path, name: str = "accuracy") -> list[Path]:
    """Items by how many of their samples were right, with avg@k and cons@k above."""
    k = accuracy.samples
    rights = [sum(item.right) for item in accuracy.answered]
    figure, axes = new_figure(f"right answers of {k}", "items")
    for number in range(k + 1):
        count = rights.count(number)
        axes.bar(number, count, width=0.7, color=_CURVE_COLOURS[1])
        axes.annotate(f"{count:,}", (number, count), ha="center", va="bottom", color=INK, fontsize=8)
    axes.set_xticks(list(range(k + 1)) if k <= 16 else [0, k])
    title = f"avg@{k} {_percent(accuracy.average)}"
    title += f"   cons@{k} {_percent(accuracy.consensus)}" if k > 1 else ""
    axes.set_title(title, fontsize=10, color=INK)
    return save(figure, folder, name)


def plot_curves(curves: Sequence["Curve"], folder: Path, name: str) -> list[Path]:
    """y against log2 of mean decode FLOPs, each curve with its least squares line and slope.

    Args:
        curves: with the same y and unit.
        folder: receives ``name.svg`` and ``name.png``.
    """
    figure, axes = new_figure(f"mean decode FLOPs per {curves[0].unit} (log scale)", curves[0].y_name)
    axes.set_xscale("log", base=2)
    for number, curve in enumerate(curves):
        colour = _CURVE_COLOURS[number % len(_CURVE_COLOURS)]
        flops = [point.flops for point in curve.points]
        ys = [point.y.value for point in curve.points]
        low, high = ([abs(point.y[end] - point.y.value) for point in curve.points] for end in (1, 2))
        spread = None if any(map(math.isnan, low + high)) else [low, high]
        label = f"{curve.name}: slope {curve.slope.value:.3g} per doubling"
        if not math.isnan(curve.slope.low):
            label += f" [{curve.slope.low:.3g}, {curve.slope.high:.3g}]"
        axes.errorbar(
            flops, ys, yerr=spread, color=colour, marker="o", linestyle="", capsize=2, linewidth=1, label=label
        )
        line = [curve.intercept + curve.slope.value * math.log2(x) for x in (flops[0], flops[-1])]
        axes.plot([flops[0], flops[-1]], line, color=colour, linewidth=1.2)
        for point in curve.points:
            axes.annotate(
                f"{point.setting:g}",
                (point.flops, point.y.value),
                fontsize=7,
                xytext=(4, 4),
                textcoords="offset points",
            )
    axes.set_title(f"numbers at the points: {curves[0].dial}", fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=8)
    return save(figure, folder, name)


def plot_changes(changes: "DepthChanges", folder: Path) -> list[Path]:
    """Shares of rows that got better, stayed, and got worse, from depth to depth and over all."""
    figure, axes = new_figure("from depth to depth", "share of supervised tokens")
    steps = [*changes.steps, changes.whole] if len(changes.steps) > 1 else changes.steps
    parts = (
        ("better", "#059669", "better_beyond"),
        ("unchanged", "#cbd5e1", "unchanged"),
        ("worse", "#ef4444", "worse_beyond"),
    )
    for number, step in enumerate(steps):
        bottom = 0.0
        for label, colour, field in parts:
            height = getattr(step, field)
            axes.bar(number, height, bottom=bottom, color=colour, width=0.7, label=label if number == 0 else None)
            if height > 0.03:
                axes.annotate(f"{height:.1%}", (number, bottom + height / 2), ha="center", va="center", fontsize=8)
            bottom += height
    axes.set_xticks(range(len(steps)), [f"{step.from_depth} to {step.to_depth}" for step in steps])
    axes.set_title(f"unchanged: loss moved by at most {changes.tolerance:g} nats", fontsize=10, color=INK)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save(figure, folder, "changes")


def plot_gains(calibration: "Calibration", folder: Path) -> list[Path]:
    """Mean gain by continue probability with two standard errors, per depth where there are several."""
    figure, axes = new_figure("continue probability g", "mean gain of one more depth (nats)")
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.axvline(
        calibration.threshold, color=INK, linewidth=1.0, linestyle="--", label=f"threshold {calibration.threshold:g}"
    )
    for depth, bins in calibration.by_depth.items():
        errors = [0.0 if math.isnan(entry.standard_error) else 2 * entry.standard_error for entry in bins]
        axes.errorbar(
            [entry.probability for entry in bins],
            [entry.gain for entry in bins],
            yerr=errors,
            color=depth_colour(depth + 1),
            marker="o",
            capsize=2,
            linewidth=1.2,
            label=f"depth {depth} to {depth + 1}",
        )
    for entry in calibration.bins:
        at = ((entry.low + entry.high) / 2, 0.01)
        axes.annotate(f"{entry.rows:,}", at, xycoords=("data", "axes fraction"), ha="center", fontsize=7, color=INK)
    axes.set_xlim(0.0, 1.0)
    axes.set_title(f"gains by {calibration.gains}; tokens per bin at the foot", fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=8)
    return save(figure, folder, "calibration")


def plot_kinds(kinds: "DepthByKind", folder: Path) -> list[Path]:
    """Mean depth by kind of token, deepest first; the line is the mean over all tokens."""
    rows = kinds.kinds
    figure, axes = new_figure("mean depth of the rows that predict it", "", height=1.4 + 0.4 * len(rows))
    axes.grid(visible=False)
    for place, row in enumerate(reversed(rows)):
        axes.barh(place, row.mean_depth, color=depth_colour(round(row.mean_depth)), height=0.7)
        axes.annotate(f" {row.mean_depth:.2f} of {row.tokens:,}", (row.mean_depth, place), va="center", fontsize=8)
    axes.axvline(kinds.mean_depth, color=INK, linewidth=1.0, linestyle="--", zorder=0)
    axes.set_yticks(range(len(rows)), [row.kind for row in reversed(rows)])
    axes.set_xlim(0.0, 1.25 * max(row.mean_depth for row in rows))
    axes.set_title(f"mean depth {kinds.mean_depth:.3f} over {kinds.tokens:,} tokens", fontsize=10, color=INK)
    return save(figure, folder, "kinds")


def plot_convergence(convergence: "Convergence", folder: Path) -> list[Path]:
    """Movement, turn, norm and NLL by depth; medians, with the 90% quantile dotted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    panels = figure.subplots(2, 2)
    names = (("relative_change", "relative change"), ("direction_change", "1 - cos"), ("norm", "norm"))
    for axes, (field, label) in zip(panels.flat, names, strict=False):
        dress(axes, "depth", label)
        points = [(step.depth, getattr(step, field)) for step in convergence.iterations]
        known = [(depth, value) for depth, value in points if value is not None]
        axes.plot(
            [depth for depth, _ in known], [value.median for _, value in known], color=INK, marker="o", markersize=3
        )
        axes.plot([depth for depth, _ in known], [value.p90 for _, value in known], color=INK, linestyle=":")
        medians = [value.median for _, value in known]
        if min(medians) > 0 and max(medians) > 10 * min(medians):
            axes.set_yscale("log")
    last = panels.flat[3]
    dress(last, "depth", "NLL (nats per token)")
    last.plot(
        [step.depth for step in convergence.iterations],
        [step.nll for step in convergence.iterations],
        color="#ef4444",
        marker="o",
        markersize=3,
    )
    for axes in panels.flat:
        axes.set_xticks([step.depth for step in convergence.iterations][:: max(1, len(convergence.iterations) // 8)])
    figure.suptitle(
        f"state {convergence.state}, {convergence.rows:,} tokens; dotted: 90% quantile", fontsize=10, color=INK
    )
    return save(figure, folder, "convergence")


def _percent(estimate: "Estimate") -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"
