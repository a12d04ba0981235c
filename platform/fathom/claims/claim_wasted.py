"""Claim 3: with a fixed number of loops, most loops change nothing or make things worse."""

from typing import TYPE_CHECKING, Any

from fathom.claims.budget import Budget, Run
from fathom.claims.plots import INK, colour, draw
from fathom.claims.results import Claim, Findings, Models, Results
from fathom.claims.verdict import Claimed, compare
from fathom.evals.changes import TOLERANCE, depth_changes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fathom.claims.results import Plot

DEPTH = 4
OURO = Run(f"Ouro M={DEPTH}, text", "ouro", DEPTH, task="text")
UNCHANGED, WORSE = 0.335, 0.159
"""The smaller of the two shares that the paper reports of each kind."""


def runs(budget: Budget) -> list[Run]:
    """Ouro's first stage: the mean of the losses of all depths, every token through all of them."""
    return [OURO]


def measure(models: Models) -> dict[str, Any]:
    """Loss at each depth against the next, and the first against the last."""
    found = depth_changes(models.load(OURO), models.documents("text"))
    return {"whole": found.whole._asdict(), "steps": [step._asdict() for step in found.steps]}


def judge(results: Results) -> Findings:
    """Shares of unchanged and of worse tokens from the first depth to the last."""
    whole = [measured["whole"] for measured in results.measured]
    comparisons = [
        compare(
            f"share of tokens whose loss changes by at most {TOLERANCE:g} from depth 1 to {DEPTH}",
            [one["unchanged"] for one in whole],
            Claimed(above=UNCHANGED),
        ),
        compare(
            f"share of tokens whose loss is worse by more than {TOLERANCE:g}",
            [one["worse_beyond"] for one in whole],
            Claimed(above=WORSE),
        ),
    ]
    table = [
        {"seed": seed, "model": OURO.name, "depths": f"{one['from_depth']} to {one['to_depth']}"}
        | {name: one[name] for name in ("unchanged", "worse_beyond", "better_beyond", "mean_change")}
        for seed, measured in zip(results.seeds, results.measured, strict=True)
        for one in [*measured["steps"], measured["whole"]]
    ]
    remarks = [
        "The share of unchanged tokens counts how many tokens the model is already certain of: data with templates "
        "makes it large, a small model on text makes it small. The share of worse tokens is near a half where another "
        "depth does nothing but noise.",
    ]
    return Findings(comparisons, table, [_plot(results)], remarks)


def _plot(results: Results) -> "Plot":
    def paint(axes: "Axes") -> None:
        for place, (seed, measured) in enumerate(zip(results.seeds, results.measured, strict=True)):
            depths = [step["to_depth"] for step in measured["steps"]]
            axes.plot(
                depths,
                [step["mean_change"] for step in measured["steps"]],
                marker="o",
                color=colour(place),
                label=f"seed {seed}",
            )
        axes.axhline(0.0, color=INK, linewidth=0.8)
        axes.set_xticks(range(2, DEPTH + 1))

    return draw("What each further depth changes in the loss", "depth", "change of NLL", paint)


CLAIM = Claim(
    key="wasted-loops",
    title="With every token looped equally often, do loops leave many tokens unchanged and many worse?",
    paper="TaH2, Section 3: from the first loop to the last, the loss of 52.3 % (Ouro) and 33.5 % (Huginn) of all "
    "tokens changes by at most 1e-3, and that of 21.7 % and 15.9 % gets worse.",
    setting=lambda budget: (
        f"{budget.tasks['text'].name}; {budget.text_layers} layers of width {budget.width}, base of "
        f"{budget.text_base_steps} steps, then {budget.text_steps} steps of Ouro with M={DEPTH}. The bounds are the "
        "smaller of the paper's two numbers."
    ),
    runs=runs,
    judge=judge,
    measure=measure,
)
