"""Plots for the page: text in the page's own colour, so that light and dark both read."""

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fathom.claims.results import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#123456"
"""Becomes ``currentColor``; nothing else may use it."""
COLOURS = ("#3b82f6", "#f59e0b", "#ef4444", "#10b981", "#a855f7", "#94a3b8", "#ec4899", "#14b8a6")


def colour(number: int) -> str:
    """The colour of a series, readable on white and on black."""
    return COLOURS[number % len(COLOURS)]


def draw(caption: str, x_label: str, y_label: str, paint: Callable[["Axes"], None]) -> Plot:
    """One figure.

    Args:
        paint: draws on the axes.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The caption salts the ids: two plots of one page may not share any. No date: equal numbers give equal bytes.
    style: dict[Any, Any] = {
        "svg.hashsalt": caption,
        "svg.fonttype": "none",
        "font.size": 10,
        "font.family": "sans-serif",
    }
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with rc_context({**style, **ink}):
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.subplots()
        axes.patch.set_alpha(0.0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=INK, alpha=0.12, linewidth=0.8)
        axes.set_axisbelow(True)
        paint(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    return Plot(caption, _without_idle_names(svg[svg.index("<svg") :]).replace(INK, "currentColor"))


def _without_idle_names(svg: str) -> str:
    """Leave out the ids that nothing refers to: every figure has a ``patch_1``, and a page may have one."""
    used = set(re.findall(r"#([\w-]+)", svg))
    return re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", svg)


def seeds_plot(caption: str, y_label: str, names: list[str], values: list[list[float]], zero: bool = False) -> Plot:
    """Every seed of every model as a point, seeds joined by a line because they are pairs.

    Args:
        names: of the models, along x.
        values: ``[models][seeds]``.
        zero: draw a line at 0.
    """

    def paint(axes: "Axes") -> None:
        for seed, series in enumerate(zip(*values, strict=True)):
            axes.plot(names, series, marker="o", linewidth=1.0, color=colour(seed), label=f"seed {seed + 1}")
        if zero:
            axes.axhline(0.0, color=INK, linewidth=0.8)
        axes.tick_params(axis="x", labelsize=8, rotation=20 if len(names) > 3 else 0)

    return draw(caption, "", y_label, paint)
