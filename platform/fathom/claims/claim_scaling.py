"""Claim 6: accuracy rises with log2 of decode FLOPs, faster than a deeper Standard's, and with M."""

from math import log2
from typing import TYPE_CHECKING, Any

import numpy as np

from fathom.claims.budget import Budget, Run
from fathom.claims.claim_compute import HIGHER, STANDARD, deeper, tah2
from fathom.claims.measure import score
from fathom.claims.plots import INK, colour, draw
from fathom.claims.results import Claim, Findings, Models, Results
from fathom.claims.verdict import Claimed, compare
from fathom.evals.curve import fit
from fathom.evals.forward import dial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fathom.claims.results import Plot

SAME = 0.01
"""Accuracy; what counts as no gain from depths beyond the trained ones."""


def runs(budget: Budget) -> list[Run]:
    """Standard at two depths, TaH2 at all."""
    return [STANDARD, deeper(budget), *map(tah2, budget.depths)]


def measure(models: Models) -> dict[str, Any]:
    """The deepest TaH2 with lower and higher ceilings at inference."""
    budget = models.budget
    deepest = budget.depths[-1]
    model, documents = models.load(tah2(deepest)), models.documents("chains")
    points = []
    for ceiling in [*range(1, deepest + 1), deepest + deepest // 2]:
        with dial(model, max_depth=ceiling):
            scores = score(model, budget.tasks["chains"], documents)
        points.append({"ceiling": ceiling, "flops": scores.flops_per_token, "accuracy": scores.accuracy})
    return {"points": points}


def judge(results: Results) -> Findings:
    """More M, more accuracy; a steeper slope than Standard's; nothing beyond the trained M."""
    budget = results.budget
    first, last = tah2(budget.depths[0]), tah2(budget.depths[-1])
    slopes, theirs, beyond = [], [], []
    for place, measured in enumerate(results.measured):
        points = measured["points"]
        slopes.append(_slope([(point["flops"], point["accuracy"]) for point in points[:-1]]))
        standard = [results.scores[run.name][place] for run in (STANDARD, deeper(budget))]
        theirs.append(_slope([(one.flops_per_token, one.accuracy) for one in standard]))
        beyond.append(points[-1]["accuracy"] - points[-2]["accuracy"])
    more = results.differences("accuracy", last, first)
    comparisons = [
        compare(f"accuracy of {last.name} minus {first.name}", more, HIGHER),
        compare(
            "accuracy gained per doubling of decode FLOPs, TaH2 minus Standard",
            [mine - other for mine, other in zip(slopes, theirs, strict=True)],
            HIGHER,
        ),
        compare(
            f"accuracy gained by a ceiling half as high again as the trained M={budget.depths[-1]}",
            beyond,
            Claimed(-SAME, SAME),
            decisive=False,
        ),
    ]
    table = results.table(runs(budget), STANDARD)
    for row in table:
        if row["model"] in (last.name, STANDARD.name):
            place = results.seeds.index(int(row["seed"]))
            row["accuracy per doubling of FLOPs"] = (slopes if row["model"] == last.name else theirs)[place]
    remarks = [
        "TaH2's slope is over the ceilings 1 to M of one trained model; Standard's is between two trained models of "
        "different depth. In the paper both are over cutoffs of the answer's length, which these tasks do not have.",
    ]
    return Findings(comparisons, table, [_plot(results)], remarks)


def _slope(points: list[tuple[float, float]]) -> float:
    """Accuracy per doubling of FLOPs; 0 where all points cost the same, because nothing then goes deeper."""
    x, y = (np.asarray(values) for values in zip(*((log2(flops), value) for flops, value in points), strict=True))
    return float(fit(x, y).slope) if np.ptp(x) > 0 else 0.0


def _plot(results: Results) -> "Plot":
    def paint(axes: "Axes") -> None:
        for place, seed in enumerate(results.seeds):
            points = results.measured[place]["points"]
            axes.plot(
                [point["flops"] for point in points],
                [point["accuracy"] for point in points],
                marker="o",
                color=colour(place),
                label=f"TaH2, seed {seed}",
            )
            standard = [results.scores[run.name][place] for run in (STANDARD, deeper(results.budget))]
            flops, accuracy = zip(*((one.flops_per_token, one.accuracy) for one in standard), strict=True)
            axes.plot(flops, accuracy, marker="s", linestyle=":", color=colour(place), label=f"Standard, seed {seed}")
        axes.set_xscale("log", base=2)
        axes.axhline(0.0, color=INK, linewidth=0.0)

    words = "Accuracy against decode FLOPs: ceilings of one TaH2 model (line), Standard of two depths (dotted)"
    return draw(words, "decode FLOPs per token", "accuracy on hard tokens", paint)


CLAIM = Claim(
    key="scaling",
    title="Does accuracy rise with log2 of decode FLOPs, faster than Standard's, and with M?",
    paper="TaH2, Figure 1a and Table 12: 2.74 points per doubling of decode FLOPs against Standard's 1.79; the average "
    "rises from 40.6 (M=2) over 40.9 (M=4) to 42.5 (M=8); a ceiling of 12 on the model trained with 8 adds nothing.",
    setting=lambda budget: (
        f"{budget.tasks['chains'].name}; M of {', '.join(map(str, budget.depths))}, each from the same base."
    ),
    runs=runs,
    judge=judge,
    measure=measure,
)
