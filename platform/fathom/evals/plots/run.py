"""The plots of a run: loss, depths, and the decider's calibration during training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fathom.evals.plots.figure import INK, depth_colour, new_figure, save


def plot_loss(
    history: Mapping[str, Sequence[tuple[int, float]]],
    folder: Path,
    heldout: Mapping[str, float] | None = None,
) -> list[Path]:
    """Training NLL by step: the mixture's and each depth's.

    Args:
        history: series by metric name, points are (step, value); ``nll`` and ``nll/depth_m`` are drawn.
        folder: receives ``loss.svg`` and ``loss.png``.
        heldout: label to held-out NLL, drawn as dashed lines (for example before and after).
    """
    figure, axes = new_figure("optimizer step", "negative log-likelihood (nats per token)")
    depths = sorted(int(name.rsplit("_", 1)[1]) for name in history if name.startswith("nll/depth_"))
    for depth in depths:
        steps, values = zip(*history[f"nll/depth_{depth}"], strict=True)
        axes.plot(steps, values, color=depth_colour(depth), linewidth=1.2, label=f"depth {depth}")
    if history.get("nll"):
        steps, values = zip(*history["nll"], strict=True)
        axes.plot(steps, values, color=INK, linewidth=2.0, label="mixture", marker="." if len(steps) < 30 else "")
    for number, (label, nll) in enumerate((heldout or {}).items()):
        axes.axhline(
            nll,
            color=INK,
            linewidth=1.0,
            linestyle=("--", ":", "-.")[number % 3],
            label=f"held out, {label}",
        )
    if axes.lines:
        axes.legend(frameon=False)
    return save(figure, folder, "loss")


def plot_depths(counts: Mapping[int, int], folder: Path, max_depth: int | None = None) -> list[Path]:
    """Histogram of executed depths.

    Args:
        counts: number of tokens by executed depth (1-based).
        folder: receives ``depths.svg`` and ``depths.png``.
        max_depth: M, so that unused depths show as empty bars; default the deepest used.
    """
    total = sum(counts.values())
    figure, axes = new_figure("executed depth", "share of tokens")
    depths = range(1, max(max_depth or 1, *counts, 1) + 1)
    for depth in depths:
        share = counts.get(depth, 0) / total if total else 0.0
        axes.bar(depth, share, color=depth_colour(depth), width=0.7)
        axes.annotate(f"{share:.1%}", (depth, share), ha="center", va="bottom", color=INK)
    mean = sum(depth * count for depth, count in counts.items()) / total if total else 0.0
    axes.set_title(f"mean depth {mean:.3f} over {total:,} tokens", fontsize=10, color=INK)
    axes.set_xticks(list(depths))
    axes.set_ylim(0, 1.08)
    return save(figure, folder, "depths")


def plot_calibration(bins: Sequence[tuple[float, float, int, float]], threshold: float, folder: Path) -> list[Path]:
    """Continue probability against the gain that one more depth measured to bring.

    A useful decider rises from left to right and crosses zero near its threshold.

    Args:
        bins: (g low, g high, number of tokens, mean gain in nats); bins without tokens are left out.
        threshold: tau, drawn as a line.
        folder: receives ``calibration.svg`` and ``calibration.png``.
    """
    figure, axes = new_figure("continue probability g", "mean measured gain (nats)")
    filled = [entry for entry in bins if entry[2] > 0]
    largest = max((count for _, _, count, _ in filled), default=1)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.axvline(threshold, color=INK, linewidth=1.0, linestyle="--", label=f"threshold {threshold:g}")
    for low, high, count, gain in filled:
        colour = depth_colour(2 if low >= threshold else 1)
        axes.bar(
            (low + high) / 2,
            gain,
            width=(high - low) * 0.9,
            color=colour,
            alpha=0.35 + 0.65 * count / largest,
        )
        axes.annotate(
            f"{count:,}",
            ((low + high) / 2, gain),
            ha="center",
            va="bottom" if gain >= 0 else "top",
            fontsize=7,
        )
    axes.set_xlim(0.0, 1.0)
    axes.set_title("tokens per bin above or below each bar", fontsize=10, color=INK)
    axes.legend(frameon=False)
    return save(figure, folder, "calibration")
