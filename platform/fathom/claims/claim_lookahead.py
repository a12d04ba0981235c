"""Claim 7: look-ahead on a random quarter of the stopped tokens: what it saves, and whether it costs."""

from fathom.claims.budget import Budget, Run
from fathom.claims.claim_compute import STANDARD, tah2
from fathom.claims.plots import seeds_plot
from fathom.claims.results import Claim, Findings, Results
from fathom.claims.verdict import Claimed, compare

FULL = tah2(2)
QUARTER = Run("TaH2 M=2, a quarter looked ahead", "tah2", 2, objective=(("lookahead_fraction", 0.25),))
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
    wanted = runs(results.budget)
    names = [run.name for run in wanted]
    plot = seeds_plot(
        "Look-ahead on all or on a quarter of the stopped tokens: held-out NLL of every seed",
        "NLL",
        names,
        [[one.nll for one in results.scores[name]] for name in names],
    )
    remarks = [
        "Times are wall clock of one process with one thread, several at once: read the table before you believe a "
        "difference of a few per cent."
    ]
    return Findings(comparisons, results.table(wanted, STANDARD), [plot], remarks)


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
