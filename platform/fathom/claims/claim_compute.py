"""Claims 1a and 1b: TaH2 against Standard from the same base, data and steps; and at equal compute."""

from math import log2
from typing import TYPE_CHECKING

from fathom.claims.budget import Budget, Run
from fathom.claims.plots import INK, colour, draw, seeds_plot
from fathom.claims.results import Claim, Findings, Plot, Results
from fathom.claims.verdict import Claimed, compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STANDARD = Run("Standard")
LOWER = Claimed(below=0.0)
HIGHER = Claimed(above=0.0)


def tah2(depth: int) -> Run:
    """TaH2 of a depth, as published."""
    return Run(f"TaH2 M={depth}", "tah2", depth)


def fixed(depth: int) -> Run:
    """TaH2 without a decider: all depths for every token."""
    return Run(f"TaH2-fixed M={depth}", "tah2-fixed", depth)


def deeper(budget: Budget) -> Run:
    """Standard with twice the layers and a base of its own."""
    return Run(f"Standard, {2 * budget.layers} layers", layers=2 * budget.layers)


def longer(budget: Budget) -> Run:
    """Standard with more steps."""
    return Run(f"Standard, {budget.lengthen}x steps", lengthen=budget.lengthen)


def same_data_runs(budget: Budget) -> list[Run]:
    """TaH2 and its fixed-depth form at two depths."""
    return [STANDARD, *map(tah2, budget.depths[:2]), fixed(2)]


def equal_compute_runs(budget: Budget) -> list[Run]:
    """TaH2 at two depths, deeper Standard, longer Standard."""
    return [STANDARD, *map(tah2, budget.depths[:2]), deeper(budget), longer(budget)]


def judge_same_data(results: Results) -> Findings:
    """NLL and accuracy after the same steps."""
    wanted = same_data_runs(results.budget)
    comparisons = []
    for run in map(tah2, results.budget.depths[:2]):
        nll, accuracy = (results.differences(what, run, STANDARD) for what in ("nll", "accuracy"))
        comparisons += [
            compare(f"NLL of {run.name} minus Standard", nll, LOWER),
            compare(f"accuracy of {run.name} minus Standard", accuracy, HIGHER, decisive=False),
        ]
    comparisons.append(
        compare("NLL of TaH2-fixed M=2 minus Standard", results.differences("nll", fixed(2), STANDARD), LOWER, False)
    )
    names = [run.name for run in wanted]
    values = [[score.nll for score in results.scores[name]] for name in names]
    plot = seeds_plot("Held-out NLL after the same data and steps", "NLL", names, values)
    remarks = [
        "The task is learned in jumps (one chain length after another), so which model is ahead after a given number "
        "of steps depends on when a jump happens: the spread between seeds is larger than the effect in the paper."
    ]
    return Findings(comparisons, results.table(wanted, STANDARD), [plot], remarks)


def at_flops(flops: float, first: tuple[float, float], second: tuple[float, float]) -> float:
    """y on the line through two (decode FLOPs, y) points, over log2 FLOPs; outside them, the nearer point's."""
    (x0, y0), (x1, y1) = ((log2(x), y) for x, y in (first, second))
    part = min(max((log2(flops) - x0) / (x1 - x0), 0.0), 1.0)
    return y0 + part * (y1 - y0)


def judge_equal_compute(results: Results) -> Findings:
    """NLL at the same decode FLOPs, and after a longer training of Standard."""
    budget, scores = results.budget, results.scores
    wide, long = deeper(budget), longer(budget)
    comparisons = []
    for run in map(tah2, budget.depths[:2]):
        matched = []
        for mine, shallow, deep in zip(scores[run.name], scores[STANDARD.name], scores[wide.name], strict=True):
            ends = [(score.flops_per_token, score.nll) for score in (shallow, deep)]
            matched.append(mine.nll - at_flops(mine.flops_per_token, *ends))
        slower = [
            mine.seconds / theirs.seconds
            for mine, theirs in zip(results.fits[run.name], results.fits[STANDARD.name], strict=True)
        ]
        by_time = results.differences("nll", run, long)
        comparisons += [
            compare(f"NLL of {run.name} minus Standard at the same decode FLOPs", matched, LOWER),
            compare(f"NLL of {run.name} minus {long.name}", by_time, LOWER, decisive=False),
            compare(f"training time of {run.name} over Standard's", slower, Claimed(above=1.0), decisive=False),
        ]
    remarks = [
        "At the same decode FLOPs, Standard's NLL is read off the line through its two depths over log2 FLOPs; a TaH2 "
        "model outside that range is compared with the nearer of the two.",
        f"Decider and updater are as wide as the model: with {budget.layers} layers they cost a good part of a layer "
        "each, in the paper 3 % of the model. A mean depth of 1.2 is therefore far more than 1.2 times the FLOPs here.",
        f"{long.name} stands for equal training time: compare the seconds in the table.",
    ]
    return Findings(comparisons, results.table(equal_compute_runs(budget), STANDARD), [_plot(results)], remarks)


def _plot(results: Results) -> Plot:
    runs = equal_compute_runs(results.budget)[:-1]

    def paint(axes: "Axes") -> None:
        for number, run in enumerate(runs):
            points = [(score.flops_per_token, score.nll) for score in results.scores[run.name]]
            axes.scatter(*zip(*points, strict=True), color=colour(number), label=run.name)
        for shallow, deep in zip(*(results.scores[run.name] for run in (STANDARD, runs[-1])), strict=True):
            flops, nlls = zip(*((score.flops_per_token, score.nll) for score in (shallow, deep)), strict=True)
            axes.plot(flops, nlls, color=INK, linewidth=0.7)
        axes.set_xscale("log", base=2)

    words = "NLL against decode FLOPs, every seed (lines: each seed's Standard at its two depths)"
    return draw(words, "decode FLOPs per token", "NLL", paint)


def _setting(budget: Budget) -> str:
    return (
        f"{budget.tasks['chains'].name}; {budget.layers} layers of width {budget.width}; base of {budget.base_steps} "
        f"steps, then {budget.steps} steps of each method from that base, on the same documents in the same order."
    )


SAME_DATA = Claim(
    key="same-data",
    title="Does TaH2 reach a lower loss than Standard from the same base, data and steps?",
    paper="TaH2 (arXiv 2609.35748), Table 1: average of ten benchmarks 37.7 for Standard, 40.6 for M=2, 40.9 for M=4; "
    "the validation loss of M=8 is 0.0106 below Standard's.",
    setting=_setting,
    runs=same_data_runs,
    judge=judge_same_data,
)
EQUAL_COMPUTE = Claim(
    key="equal-compute",
    title="Is TaH2 better than a Standard model of the same decode FLOPs, or of the same training time?",
    paper="TaH2, Figure 1: above Standard at equal decode FLOPs per response, at 1.21 (M=2) and 1.47 (M=4) times the "
    "FLOPs of a token; training costs 1.87 and 2.73 times Standard's (Table 10), and equal training is not compared.",
    setting=lambda budget: (
        f"{_setting(budget)} Controls: twice the layers with a base of its own, and {budget.lengthen} times the steps."
    ),
    runs=equal_compute_runs,
    judge=judge_equal_compute,
)
