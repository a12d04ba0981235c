"""Claim 7: look-ahead on a random quarter of the stopped tokens: what it saves, and whether it costs; and beyond the
papers, a head that predicts the gains of the rest."""

from fathom.claims.budget import Budget, Run
from fathom.claims.claim_compute import LOWER, STANDARD, tah2
from fathom.claims.plots import seeds_plot
from fathom.claims.results import Claim, Findings, Results
from fathom.claims.verdict import Claimed, Comparison, compare

FULL = tah2(2)
QUARTER = Run("TaH2 M=2, a quarter looked ahead", "tah2", 2, objective=(("lookahead_fraction", 0.25),))
PREDICTED = Run(
    "TaH2 M=2, a quarter looked ahead, the rest predicted",
    "tah2",
    2,
    objective=(("lookahead_fraction", 0.25), ("value_head", 0.5)),
)
HARMLESS_NATS = 0.01
"""About what two data orders of one configuration differ by at this size."""


def runs(budget: Budget) -> list[Run]:
    """TaH2 with all stopped tokens measured, and with a quarter of them."""
    return [STANDARD, FULL, QUARTER]


def judge(results: Results) -> Findings:
    """Time saved, loss not raised, depth unchanged."""
    pairs = zip(results.fits[QUARTER.name], results.fits[FULL.name], strict=True)
    comparisons = [
        compare(
            f"NLL with a quarter minus NLL with all, at most {HARMLESS_NATS:g} worse",
            results.differences("nll", QUARTER, FULL),
            Claimed(below=HARMLESS_NATS),
        ),
        compare(
            "training time with a quarter over that with all",
            [mine.seconds / theirs.seconds for mine, theirs in pairs],
            Claimed(below=1.0),
        ),
        compare(
            "mean depth with a quarter minus that with all",
            results.differences("mean_depth", QUARTER, FULL),
            Claimed(-0.02, 0.02),
            decisive=False,
        ),
    ]
    return _findings(results, runs(results.budget), comparisons, [])


def predicted_runs(budget: Budget) -> list[Run]:
    """Those, and a quarter with the value head."""
    return [*runs(budget), PREDICTED]


def judge_predicted(results: Results) -> Findings:
    """Loss not raised, most look-ahead left out; what the quarter alone gives informs."""
    fits = results.fits[PREDICTED.name]
    comparisons = [
        compare(
            f"NLL with predicted gains minus NLL with all measured, at most {HARMLESS_NATS:g} worse",
            results.differences("nll", PREDICTED, FULL),
            Claimed(below=HARMLESS_NATS),
        ),
        compare(
            "share of the stopped tokens that was looked ahead, over the whole run",
            [fitted.looked_ahead for fitted in fits],
            Claimed(below=0.5),
        ),
        compare(
            "NLL with predicted gains minus NLL with the quarter alone",
            results.differences("nll", PREDICTED, QUARTER),
            LOWER,
            decisive=False,
        ),
        compare(
            "mean depth with predicted gains minus that with all measured",
            results.differences("mean_depth", PREDICTED, FULL),
            Claimed(-0.02, 0.02),
            decisive=False,
        ),
    ]
    shares = ", ".join(f"{fitted.looked_ahead:.0%}" for fitted in fits)
    remark = f"Looked ahead, by seed: {shares} of the stopped tokens."
    return _findings(results, predicted_runs(results.budget), comparisons, [remark])


def _findings(results: Results, wanted: list[Run], comparisons: list[Comparison], remarks: list[str]) -> Findings:
    names = [run.name for run in wanted]
    plot = seeds_plot(
        "Look-ahead on all or on a quarter of the stopped tokens: held-out NLL of every seed",
        "NLL",
        names,
        [[one.nll for one in results.scores[name]] for name in names],
    )
    times = (
        "Times are wall clock of one process with one thread, several at once: read the table before you believe a "
        "difference of a few per cent."
    )
    return Findings(comparisons, results.table(wanted, STANDARD), [plot], [*remarks, times])


CLAIM = Claim(
    key="lookahead",
    title="Can three quarters of the stopped tokens go without look-ahead, saving time without harm?",
    paper="None: this is ours. TaH2 measures every stopped token: 20 to 24 % of its training FLOPs (Table 10).",
    setting=lambda budget: (
        f"{budget.tasks['chains'].name}; M=2, from the same base and documents; a measured token stands for four in "
        "the coverage cut, the balance of classes and the loss of the decider."
    ),
    runs=runs,
    judge=judge,
)

VALUE_HEAD = Claim(
    key="value-head",
    title="Can a head that predicts the gain replace most of the look-ahead?",
    paper="None: this is ours. With a quarter measured, three of four stopped tokens teach the decider nothing.",
    setting=lambda budget: (
        f"{budget.tasks['chains'].name}; M=2, from the same base and documents; in each step a quarter of the stopped "
        "tokens is measured. If the head explains half of the gains' variance, the others have its predictions, else "
        "they are measured too."
    ),
    runs=predicted_runs,
    judge=judge_predicted,
)
