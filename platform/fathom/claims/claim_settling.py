"""Claims 4a and 4b: AbbIE-D settles where AbbIE-C keeps moving, and gets better beyond the trained iterations."""

from typing import TYPE_CHECKING, Any

from fathom.claims.budget import Budget, Run
from fathom.claims.measure import HeldoutDocuments
from fathom.claims.plots import colour, draw
from fathom.claims.results import Claim, Findings, Models, Results
from fathom.claims.verdict import Claimed, compare
from fathom.evals.convergence import convergence
from fathom.evals.forward import dial
from fathom.evals.heldout import heldout_nll
from fathom.model.looped import LoopedLM

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fathom.claims.results import Plot

TRAINED, MOST = 2, 8
ITERATIONS = (1, 2, 3, 4, 6, 8)
D = Run("AbbIE-D", "abbie-d", TRAINED, task="text", scratch=True)
C = Run("AbbIE-C", "abbie-c", TRAINED, task="text", scratch=True)
ADAPTER = Run("0pt", "0pt", TRAINED, task="text", scratch=True)
PLAIN = Run("Standard, text", task="text", scratch=True)
LOOPED = (D, C, ADAPTER)
STATE_DOCUMENTS = 16


def runs(budget: Budget) -> list[Run]:
    """The three looped models at r = 2, and Standard of the same layers."""
    return [*LOOPED, PLAIN]


def measure(models: Models) -> dict[str, Any]:
    """NLL at each number of iterations, and how far the state turns from one to the next."""
    documents = models.documents("text")
    found: dict[str, Any] = {}
    for run in LOOPED:
        model = models.load(run)
        nll = {}
        for iterations in ITERATIONS:
            with dial(model, max_depth=iterations):
                nll[iterations] = heldout_nll(model, documents).nll
        found[run.name] = {"nll": nll, "turns": turns_of(model, documents)}
    return found


def turns_of(model: LoopedLM, documents: HeldoutDocuments) -> dict[int, float]:
    """1 - cosine of the state to that of the iteration before, by iteration, averaged over tokens."""
    with dial(model, max_depth=MOST):
        moved = convergence(model, documents.sample(STATE_DOCUMENTS)).iterations
    return {one.depth: one.direction_change.mean for one in moved if one.direction_change is not None}


def judge_settling(results: Results) -> Findings:
    """D turns less than C in the last iteration, and its loss rises less."""
    last = [{run.name: one[run.name]["turns"][MOST] for run in LOOPED} for one in results.measured]
    rise = [
        {run.name: one[run.name]["nll"][MOST] - one[run.name]["nll"][TRAINED] for run in LOOPED}
        for one in results.measured
    ]
    comparisons = [
        compare(
            f"turn of the state at iteration {MOST} (1 - cosine), AbbIE-D minus AbbIE-C",
            [one[D.name] - one[C.name] for one in last],
            Claimed(below=0.0),
        ),
        compare(
            f"rise of the NLL from r = {TRAINED} to {MOST}, AbbIE-D minus AbbIE-C",
            [one[D.name] - one[C.name] for one in rise],
            Claimed(below=0.0),
        ),
        compare(
            f"rise of AbbIE-C's NLL from r = {TRAINED} to {MOST}",
            [one[C.name] for one in rise],
            Claimed(above=0.0),
        ),
        compare(
            f"rise of the NLL from r = {TRAINED} to {MOST}, 0pt minus AbbIE-D",
            [one[ADAPTER.name] - one[D.name] for one in rise],
            Claimed(above=0.0),
            decisive=False,
        ),
    ]
    remarks = [
        "That D's state turns less and less is partly built in: between iterations the residual doubles what was "
        "there, while the body's output keeps its size. A settled state is weak evidence of a learned fixed point.",
        "The paper says that 0pt collapses off r = 2; the last question says whether it does here.",
    ]
    return Findings(
        comparisons, _table(results), [_nll_plot(results, "the looped models"), _turn_plot(results)], remarks
    )


def judge_beyond(results: Results) -> Findings:
    """D improves beyond the iterations it was trained with, and beats Standard."""
    best = [min(one[D.name]["nll"][r] for r in (3, 4)) - one[D.name]["nll"][TRAINED] for one in results.measured]
    comparisons = [
        compare("NLL of AbbIE-D at r = 3 or 4, the better, minus r = 2", best, Claimed(below=0.0)),
        compare("NLL of AbbIE-D at r = 2 minus Standard", results.differences("nll", D, PLAIN), Claimed(below=0.0)),
    ]
    remarks = [
        "Taking the better of r = 3 and 4 favours the claim. The paper's models have 200 and 350 million weights and "
        "twenty tokens per weight; the smaller of them already gains less beyond r = 2."
    ]
    return Findings(comparisons, _table(results), [_nll_plot(results, "against Standard")], remarks)


def _table(results: Results) -> list[dict[str, Any]]:
    rows = []
    for place, (seed, measured) in enumerate(zip(results.seeds, results.measured, strict=True)):
        for run in LOOPED:
            nll, turns = measured[run.name]["nll"], measured[run.name]["turns"]
            rows.append(
                {"seed": seed, "model": run.name}
                | {f"NLL at r = {r}": nll[r] for r in ITERATIONS}
                | {f"turn at {depth}": turn for depth, turn in turns.items()}
            )
        rows.append({"seed": seed, "model": PLAIN.name, "NLL at r = 1": results.scores[PLAIN.name][place].nll})
    return rows


def _nll_plot(results: Results, what: str) -> "Plot":
    def paint(axes: "Axes") -> None:
        for number, run in enumerate(LOOPED):
            for place, measured in enumerate(results.measured):
                nll = [measured[run.name]["nll"][r] for r in ITERATIONS]
                axes.plot(ITERATIONS, nll, marker=".", color=colour(number), label=run.name if place == 0 else None)
        for place, one in enumerate(results.scores[PLAIN.name]):
            axes.axhline(one.nll, color=colour(5), linewidth=0.8, label=PLAIN.name if place == 0 else None)

    words = f"NLL by iterations at inference, {what}, every seed; trained at r = {TRAINED}"
    return draw(words, "iterations r", "NLL", paint)


def _turn_plot(results: Results) -> "Plot":
    def paint(axes: "Axes") -> None:
        for number, run in enumerate(LOOPED):
            for place, measured in enumerate(results.measured):
                turns = measured[run.name]["turns"]
                label = run.name if place == 0 else None
                axes.plot(list(turns), list(turns.values()), marker=".", color=colour(number), label=label)
        axes.set_yscale("log")

    return draw("How far the state turns, every seed", "iteration", "1 - cosine to the iteration before", paint)


def _setting(budget: Budget) -> str:
    return (
        f"{budget.tasks['text'].name}; {budget.text_layers} layers of width {budget.width} in thirds, from scratch, "
        f"{budget.text_base_steps + budget.text_steps} steps at r = {TRAINED}; D's residual is between iterations."
    )


SETTLING = Claim(
    key="settling",
    title="Trained at two iterations, does AbbIE-D settle while AbbIE-C keeps moving and gets worse?",
    paper="AbbIE (arXiv 2507.08567): AbbIE-D converges to a fixed point and may be iterated further, AbbIE-C diverges, "
    "and 0pt converges but its perplexity collapses for r other than 2.",
    setting=_setting,
    runs=runs,
    judge=judge_settling,
    measure=measure,
)
BEYOND = Claim(
    key="more-iterations",
    title="Does AbbIE-D get better beyond the iterations it was trained with, and beat Standard?",
    paper="AbbIE: at 350M parameters the perplexity is best at r = 4 after training at r = 2, and about 5 % below "
    "Standard's; HellaSwag rises from 33.8 (r = 2) to 36.6 (r = 8), Standard 30.1.",
    setting=_setting,
    runs=runs,
    judge=judge_beyond,
    measure=measure,
)
