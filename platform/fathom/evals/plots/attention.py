"""The plot of attention mass: a heat map of layers and heads for each pair of depths."""

from pathlib import Path
from typing import TYPE_CHECKING

from fathom.evals.plots.figure import INK, save

if TYPE_CHECKING:
    from fathom.evals.attention_mass import AttentionMass

ROWS = 4
"""Query depths that are drawn at most."""


def plot_attention(attention: "AttentionMass", folder: Path) -> list[Path]:
    """Queries of depth m in rows, keys of depth j <= m in columns; in each panel a layer is a line, a head a cell.

    Depth-1 queries see depth-1 keys only, so their row is left out where there are deeper ones; of many depths, four
    are drawn.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    depths = len(attention.mass)
    deeper = list(range(2, depths + 1)) or [1]
    shown = (
        deeper if len(deeper) <= ROWS else [deeper[number * (len(deeper) - 1) // (ROWS - 1)] for number in range(ROWS)]
    )
    most = max(mass for m in shown for j in attention.mass[m - 1] for layer in j for mass in layer)
    figure = Figure(figsize=(1.2 + 2.6 * depths, 0.8 + 2.4 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), depths, squeeze=False)
    image = None
    for line, m in enumerate(shown):
        for j in range(1, depths + 1):
            axes = panels[line][j - 1]
            if j > m:
                axes.set_axis_off()
                continue
            image = axes.imshow(attention.mass[m - 1][j - 1], vmin=0.0, vmax=most, cmap="magma", aspect="auto")
            share = attention.uniform[m - 1][j - 1]
            axes.set_title(f"depth {m} on depth {j} ({share:.0%} of keys)", fontsize=8, color=INK)
            axes.set_xlabel("head", fontsize=7)
            axes.set_ylabel("layer", fontsize=7)
            axes.tick_params(labelsize=6)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if image is not None:
        figure.colorbar(image, ax=panels.ravel().tolist(), shrink=0.7, label="attention mass")
    return save(figure, folder, "attention")
