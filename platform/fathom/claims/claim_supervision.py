"""Claims 5a and 5b: joint training with measured gains against other ways to choose depth, and TaH2's ablations."""

from collections.abc import Sequence
from typing import Any

from fathom.claims.budget import Budget, Run
from fathom.claims.claim_compute import HIGHER, LOWER, STANDARD, tah2
from fathom.claims.measure import score
from fathom.claims.plots import seeds_plot
from fathom.claims.results import Claim, Findings, Models, Results
from fathom.claims.verdict import compare

LEARNED = tah2(2)
RANDOM = Run("random routing", "tah2-random", 2, share_of=LEARNED)
TAH_FIRST = Run("TaH, first stage", "tah", 2, labels_of=STANDARD)
TAH = Run("TaH, both stages", "tah-decider", 2, start=TAH_FIRST, labels_of=STANDARD)
OURO_FIRST = Run("Ouro, first stage", "ouro", 2)
OURO = Run("Ouro, both stages", "ouro-adaptive", 2, start=OURO_FIRST)

ABLATIONS = {
    Run("uniform weights", "tah2", 2, objective=(("weighted", False),)): 11.9,
    Run("mistakes as labels", "tah2", 2, objective=(("label_rule", "mismatch"),)): 14.4,
    Run("last depth read", "tah2-last", 2): 14.5,
    Run("updater from likeliest tokens", "tah2", 2, axes=(("update", "top_mix"),)): 13.4,
    Run("every positive gain (rho = 1)", "tah2", 2, objective=(("coverage_rho", 1.0),)): 13.6,
    Run("sampled decisions", "tah2", 2, axes=(("routing", "sampled_decisions"),)): 14.2,
}
"""Each with the paper's mean AIME score in its Table 4; the default has 15.5."""
QUICK_ABLATIONS = 3


def others(budget: Budget) -> list[Run]:
    """The other ways to choose depth; TaH's decider of six blocks is dearer than all the rest of the quick report."""
    return [RANDOM, OURO, TAH] if budget.thorough else [RANDOM, OURO]


def routing_runs(budget: Budget) -> list[Run]:
    """TaH2 and the other ways to choose depth."""
    return [STANDARD, LEARNED, *others(budget)]


def measure_routing(models: Models) -> dict[str, Any]:
    """TaH2's own trained model with its decisions shuffled among rows, and with the last depth read."""
    model, documents = models.load(LEARNED), models.documents("chains")
    task = models.budget.tasks["chains"]
    shuffled, last = models.load(LEARNED), models.load(LEARNED._replace(preset="tah2-last"))
    share = models.scores(LEARNED).mean_depth - 1.0
    shuffled.routing = models.budget.model(RANDOM).routing
    shuffled.method = models.budget.model(RANDOM._replace(axes=(("threshold", share),))).method
    return {
        "learned": score(model, task, documents).nll,
        "random": score(shuffled, task, documents).nll,
        "last": score(last, task, documents).nll,
    }


def judge_routing(results: Results) -> Findings:
    """Learned against random, two-stage and frozen-gate routing, all from the same base."""
    comparisons = [
        compare(f"NLL of {LEARNED.name} minus {run.name}", results.differences("nll", LEARNED, run), LOWER)
        for run in others(results.budget)
    ]
    measured = results.measured
    comparisons += [
        compare(
            "NLL lost when the trained model's decisions are made by chance, at the same share",
            [one["random"] - one["learned"] for one in measured],
            HIGHER,
            decisive=False,
        ),
        compare(
            "NLL of the mixture minus that of the last depth, same trained model",
            [one["learned"] - one["last"] for one in measured],
            LOWER,
            decisive=False,
        ),
    ]
    wanted = routing_runs(results.budget)
    remarks = [
        "Random routing trains with the mean depth that TaH2 reached in the same seed. Making a trained model's "
        "decisions by chance also puts it where it was never trained, so that loss is not the worth of choosing alone.",
        "Ouro's gate learns on a frozen model that was trained at full depth, so it has twice TaH2's steps.",
    ]
    return Findings(
        comparisons, results.table(wanted, STANDARD), [_plot("Ways to choose depth", wanted, results)], remarks
    )


def ablation_runs(budget: Budget) -> list[Run]:
    """TaH2 and its ablations; the quick report has time for the first of them."""
    return [LEARNED, *list(ABLATIONS)[: None if budget.thorough else QUICK_ABLATIONS]]


def judge_ablations(results: Results) -> Findings:
    """Each ablation against the default."""
    wanted = ablation_runs(results.budget)
    comparisons = [
        compare(f"NLL of TaH2 as published minus {run.name}", results.differences("nll", LEARNED, run), LOWER)
        for run in wanted[1:]
    ]
    published = ", ".join(f"{run.name} {value}" for run, value in ABLATIONS.items())
    remarks = [f"In the paper: {published}, against 15.5 for the rule as published."]
    return Findings(comparisons, results.table(wanted, LEARNED), [_plot("One thing changed", wanted, results)], remarks)


def _plot(words: str, runs: Sequence[Run], results: Results) -> Any:
    names = [run.name for run in runs]
    values = [[one.nll for one in results.scores[name]] for name in names]
    return seeds_plot(f"{words}: held-out NLL of every seed", "NLL", names, values)


ROUTING = Claim(
    key="routing",
    title="Is depth better chosen by joint training with measured gains than by chance, mistakes or a late gate?",
    paper="TaH2, Table 1 and Section 5: jointly trained decisions beat Ouro's gate on a frozen model (38.2 on average "
    "for Ouro at M=2, 40.6 for TaH2) and TaH's two stages with mismatch labels (14.4 against 15.5 on AIME).",
    setting=lambda budget: f"{budget.tasks['chains'].name}; M=2, every method from the same base and documents.",
    runs=routing_runs,
    judge=judge_routing,
    measure=measure_routing,
)
ABLATION = Claim(
    key="ablations",
    title="Does each part of TaH2's rule help: measured gains, their weights, the coverage cut, the mixture?",
    paper="TaH2, Table 4 (M=2, mean AIME): every change lowers the score of 15.5, uniform weights most.",
    setting=lambda budget: f"{budget.tasks['chains'].name}; M=2, one value changed at a time.",
    runs=ablation_runs,
    judge=judge_ablations,
)
