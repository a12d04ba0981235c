"""Plots, as SVG for reading and PNG for previews: those of a run, and one for each measure."""

from fathom.evals.plots.figure import depth_colour
from fathom.evals.plots.run import plot_calibration, plot_depths, plot_loss

__all__ = ["depth_colour", "plot_calibration", "plot_depths", "plot_loss"]
