"""Plots, as SVG for reading and PNG for previews: those of a run, and one for each measure."""

from fathom.evals.plots.attention import plot_attention
from fathom.evals.plots.figure import depth_colour
from fathom.evals.plots.measures import (
    plot_accuracy,
    plot_changes,
    plot_convergence,
    plot_curves,
    plot_gains,
    plot_kinds,
)
from fathom.evals.plots.run import plot_calibration, plot_depths, plot_loss

__all__ = [
    "depth_colour",
    "plot_accuracy",
    "plot_attention",
    "plot_calibration",
    "plot_changes",
    "plot_convergence",
    "plot_curves",
    "plot_depths",
    "plot_gains",
    "plot_kinds",
    "plot_loss",
]
