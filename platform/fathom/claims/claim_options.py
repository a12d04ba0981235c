"""Beyond the papers: small changes of TaH2's rule, off by default, each against the rule as published."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fathom.claims.budget import Budget, Run
from fathom.claims.claim_compute import LOWER, STANDARD, tah2
from fathom.claims.plots import seeds_plot
from fathom.claims.results import Claim, Findings, Results
from fathom.claims.verdict import compare


class Option(NamedTuple):
    """One change.

    Attributes:
        key: of the claim.
        question: its title.
        reason: which weakness of the published rule it is for.
        objective: the changed constants.
        embedding_scale: whether the updater starts at the embedding's RMS.
        aim: the score that it must lower, ``nll`` or ``flops_per_token``.
    """

    key: str
    question: str
    reason: str
    objective: dict[str, Any]
    embedding_scale: bool = False
    aim: str = "nll"

    def run(self, budget: Budget) -> Run:
        """TaH2 with this change, at the M of :func:`published`."""
        default = published(budget)
        return default._replace(
            name=f"{default.name}, {self.key}",
            objective=tuple(self.objective.items()),
            embedding_scale=self.embedding_scale,
        )


OPTIONS = (
    Option(
        "exploration",
        "Does TaH2 gain when a few stopped tokens go on in training?",
        "Where nearly all tokens stop, the updater hardly learns.",
        {"explore_share": 0.05},
    ),
    Option(
        "pass-price",
        "Does a price on every pass save decode FLOPs?",
        "The threshold is no dial: decisions saturate. A price moves the label itself.",
        {"pass_price_nats": 0.02},
        aim="flops_per_token",
    ),
    Option(
        "stop-floor",
        "Does a least weight of decisions to stop save decode FLOPs?",
        "Beyond depth 2 gains are near zero, and so are the weights of those decisions: nothing teaches to stop.",
        {"stop_cost_floor": 0.05},
        aim="flops_per_token",
    ),
    Option(
        "embedding-scale",
        "Does an updater that starts at the embedding's scale help?",
        "Depth 2 enters with RMS 1, several times what the layers were trained with.",
        {},
        embedding_scale=True,
    ),
    Option(
        "threshold-warm-up",
        "Does a threshold that grows from 0 during the first tenth of training help?",
        "The random decider closes before the updater has learned anything.",
        {"threshold_warmup_ratio": 0.1},
    ),
)
AIMS = {"nll": "NLL", "flops_per_token": "decode FLOPs per token"}


def published(budget: Budget) -> Run:
    """TaH2 at the second of the budget's depths: deep enough for decisions beyond depth 2."""
    return tah2(budget.depths[1])


def option_claim(option: Option) -> Claim:
    """The claim that an option reaches its aim."""

    def runs(budget: Budget) -> list[Run]:
        return [STANDARD, published(budget), option.run(budget)]

    return Claim(
        key=option.key,
        title=option.question,
        paper=f"None: this is ours. {option.reason}",
        setting=lambda budget: (
            f"{budget.tasks['chains'].name}; M={published(budget).max_depth}, from the same base and documents as the "
            "rule as published."
        ),
        runs=runs,
        judge=option_judge(option, runs),
    )


def option_judge(option: Option, runs: Callable[[Budget], list[Run]]) -> Callable[[Results], Findings]:
    """Judge an option by its aim; the other of loss and FLOPs informs."""

    def judge(results: Results) -> Findings:
        mine, default = option.run(results.budget), published(results.budget)
        comparisons = [
            compare(
                f"{words} of {mine.name} minus that of the rule as published",
                results.differences(what, mine, default),
                LOWER,
                decisive=what == option.aim,
            )
            for what, words in AIMS.items()
        ]
        wanted = runs(results.budget)
        names = [run.name for run in wanted]
        plots = [
            seeds_plot(
                f"{option.key}: {words} of every seed",
                words,
                names,
                [[getattr(one, what) for one in results.scores[name]] for name in names],
            )
            for what, words in AIMS.items()
        ]
        return Findings(comparisons, results.table(wanted, STANDARD), plots, [])

    return judge


CLAIMS = [option_claim(option) for option in OPTIONS]
