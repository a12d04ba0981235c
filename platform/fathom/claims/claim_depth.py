"""Claim 2: depth follows difficulty, and the decider knows where another depth pays."""

from typing import TYPE_CHECKING, Any

from fathom.claims.budget import Budget, Run
from fathom.claims.claim_compute import tah2
from fathom.claims.plots import INK, colour, draw
from fathom.claims.results import Claim, Findings, Models, Results
from fathom.claims.verdict import Claimed, compare
from fathom.evals.batches import SIZES
from fathom.evals.calibration import Calibration, calibration
from fathom.model.collectives import LOCAL
from fathom.objectives.lookahead import lookahead_log_prob

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUN = tah2(2)
ELSEWHERE = {
    Run("TaH2 M=2, sums", "tah2", 2, task="sums"): ("digit with carry", "digit"),
    Run("TaH2 M=2, text", "tah2", 2, task="text"): ("first letter", "later letter"),
}
"""Runs on other tasks, with the kind of token that should go deeper and the one that should not."""
LOW, HIGH = 0.1, 0.9
FEW = 30
"""Bins of fewer tokens are shown, but say nothing about a sign."""


def runs(budget: Budget) -> list[Run]:
    """TaH2 with two depths: one decision per token."""
    return [RUN, *ELSEWHERE] if budget.thorough else [RUN]


def measure(models: Models) -> dict[str, Any]:
    """Gain of another depth against continue probability, stopped tokens measured by look-ahead."""

    def lookahead(model: Any, trace: Any, rows: Any, depth: int, chosen: Any) -> Any:
        return lookahead_log_prob(model, trace, rows, depth, chosen, LOCAL, SIZES.head_chunk_rows)

    found: Calibration = calibration(models.load(RUN), models.documents("chains"), lookahead)
    return {"bins": [one._asdict() for one in found.bins], "crossings": found.crossings}


def judge(results: Results) -> Findings:
    """Template tokens stay at depth 1, long chains go deeper than short ones, gains have their sign at both ends."""
    longest = f"result {results.budget.longest}"
    by_kind = [score.depth_by_kind for score in results.scores[RUN.name]]
    comparisons = [
        compare("depth of template tokens", [kinds["template"] for kinds in by_kind], Claimed(below=1.05)),
        compare(
            f"depth at chains of {results.budget.longest} minus depth at chains of 2",
            [kinds[longest] - kinds["result 2"] for kinds in by_kind],
            Claimed(above=0.0),
        ),
    ]
    remarks = [
        "The gain of a token that stopped is that of continuing alone, all other routes as they were.",
        "Deep is not the same as helped: see the gains of the tokens that go deep.",
    ]
    for high, words, claimed in (
        (False, f"g < {LOW:g}", Claimed(below=0.0)),
        (True, f"g > {HIGH:g}", Claimed(above=0.0)),
    ):
        gains = [end_gain(measured["bins"], high) for measured in results.measured]
        known = [gain for gain in gains if gain is not None]
        if len(known) == len(gains):
            comparisons.append(compare(f"gain of another depth where {words}, nats", known, claimed))
        else:
            remarks.append(
                f"{len(gains) - len(known)} of {len(gains)} seeds have fewer than {FEW} tokens with {words}."
            )
    for run, (hard, easy) in ELSEWHERE.items():
        depths = [score.depth_by_kind for score in results.scores.get(run.name, [])]
        if depths and all({hard, easy} <= kinds.keys() for kinds in depths):  # a text may lack a kind
            words = f"{run.name}: depth of a {hard} minus depth of a {easy}"
            comparisons.append(
                compare(words, [kinds[hard] - kinds[easy] for kinds in depths], Claimed(above=0.0), decisive=False)
            )
    return Findings(comparisons, _table(results), [_depth_plot(results), _gain_plot(results)], remarks)


def end_gain(bins: list[dict[str, Any]], high: bool) -> float | None:
    """Mean gain of the tokens beyond one end, None where they are too few."""
    mine = [one for one in bins if (one["low"] >= HIGH if high else one["high"] <= LOW)]
    rows = sum(one["rows"] for one in mine)
    return sum(one["gain"] * one["rows"] for one in mine) / rows if rows >= FEW else None


def _table(results: Results) -> list[dict[str, Any]]:
    rows = []
    for place, seed in enumerate(results.seeds):
        for name, scores in results.scores.items():
            row: dict[str, Any] = {"seed": seed, "model": name, "NLL": scores[place].nll}
            if name == RUN.name:
                measured = results.measured[place]
                row |= {
                    f"gain at g {one['low']:.1f}-{one['high']:.1f} (tokens)": f"{one['gain']:+.3f} ({one['rows']})"
                    for one in measured["bins"]
                }
                zeros = ", ".join(f"{value:.2f}" for value in measured["crossings"])
                row["gain crosses zero at g"] = zeros or "never"
            rows.append(row | {f"depth, {kind}": d for kind, d in sorted(scores[place].depth_by_kind.items())})
    return rows


def _depth_plot(results: Results) -> Any:
    lengths = range(2, results.budget.longest + 1)

    def paint(axes: "Axes") -> None:
        for place, seed in enumerate(results.seeds):
            kinds = results.scores[RUN.name][place].depth_by_kind
            axes.plot(
                lengths, [kinds[f"result {k}"] for k in lengths], marker="o", color=colour(place), label=f"seed {seed}"
            )
            axes.plot([1.5], [kinds["template"]], marker="x", color=colour(place))
        axes.set_xticks([1.5, *lengths], ["template", *map(str, lengths)])

    return draw("Depth by length of the chain (crosses: template tokens)", "elements in the chain", "mean depth", paint)


def _gain_plot(results: Results) -> Any:
    def paint(axes: "Axes") -> None:
        for place, seed in enumerate(results.seeds):
            bins = [one for one in results.measured[place]["bins"] if one["rows"] >= FEW]
            axes.plot(
                [one["probability"] for one in bins],
                [one["gain"] for one in bins],
                marker="o",
                color=colour(place),
                label=f"seed {seed}",
            )
        axes.axhline(0.0, color=INK, linewidth=0.8)
        axes.axvline(0.5, color=INK, linewidth=0.8, linestyle="--")

    words = f"Gain against continue probability, bins of at least {FEW} tokens (dashed: the threshold)"
    return draw(words, "continue probability g", "mean gain, nats", paint)


CLAIM = Claim(
    key="depth",
    title="Does depth follow difficulty, and is the gain negative where the decider says stop?",
    paper="TaH2, Figure 6: the gain of another depth rises with g, is about zero at g = 0.5 and negative near 0; mean "
    "depth 1.23 at M=2, deeper on tokens that carry a computation.",
    setting=lambda budget: (
        f"{budget.tasks['chains'].name}: in each answer one token is hard and four are template or copy."
    ),
    runs=runs,
    judge=judge,
    measure=measure,
)
