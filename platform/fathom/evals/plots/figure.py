"""What every plot shares: ink, a colour per depth, a bare figure, and files whose bytes depend on the numbers alone.

Figures are made with matplotlib's object interface, never ``pyplot``, so that nothing global is touched and
a training process without a display can draw them.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2937"
GRID = "#e5e7eb"
_DEPTH_COLOURS = ("#94a3b8", "#f59e0b", "#ef4444", "#a21caf")
"""One per depth, shallow to deep; deeper than four take the last."""


def depth_colour(depth: int) -> str:
    """Hex colour of a depth (1-based), the same in every plot."""
    return _DEPTH_COLOURS[min(depth, len(_DEPTH_COLOURS)) - 1]


def new_figure(x_label: str, y_label: str, width: float = 6.4, height: float = 4.0) -> tuple["Figure", "Axes"]:
    """A figure of that size in inches, with one pair of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    dress(axes, x_label, y_label)
    return figure, axes


def dress(axes: "Axes", x_label: str, y_label: str) -> None:
    """Labels and a quiet frame."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` into a folder, made when missing."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    # A fixed salt and no date: the same numbers give the same bytes.
    with rc_context({"svg.hashsalt": "fathom", "svg.fonttype": "none"}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=144)
    return paths
