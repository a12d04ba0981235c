"""What each claim concludes from numbers made for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fathom.claims import (
    claim_compute,
    claim_depth,
    claim_lookahead,
    claim_options,
    claim_scaling,
    claim_settling,
    claim_wasted,
)
from fathom.claims import claim_supervision as supervision
from fathom.claims.budget import FULL, QUICK, Budget, Run
from fathom.claims.catalogue import CLAIMS
from fathom.claims.lab import needed_runs
from fathom.claims.measure import Scores
from fathom.claims.results import Claim, ClaimResult, Results, judge
from fathom.claims.train import Fit
from fathom.claims.verdict import DOES_NOT_HOLD, HOLDS, UNCLEAR

NOISE = (0.001, -0.002, 0.0)
"""Per seed, added to every score."""
KINDS = {"template": 1.0, "copy": 1.0} | {f"result {length}": 0.9 + 0.2 * length for length in range(2, 7)}
KINDS |= {"digit with carry": 1.4, "digit": 1.1, "first letter": 1.2, "later letter": 1.1}


def scores(nll: float = 0.3, accuracy: float = 0.5, flops: float = 1e6, depth: float = 1.2) -> Scores:
    return Scores(nll, 5 * nll, accuracy, depth, 1.8, 1.1, flops, KINDS, dict.fromkeys(KINDS, nll), 1000)


def made_up(
    claim: Claim,
    of: Callable[[Run], Scores] = lambda run: scores(),
    measured: dict[str, Any] | None = None,
    budget: Budget = QUICK,
) -> ClaimResult:
    """The claim's judgement of three seeds whose scores differ by a little noise."""
    runs = claim.runs(budget)
    all_scores = {run.name: [replace(of(run), nll=of(run).nll + noise) for noise in NOISE] for run in runs}
    fits = {run.name: [Fit(10.0 * run.max_depth, [(1, 1.0, 1.0)])] * 3 for run in runs}
    return judge(claim, Results(replace(budget, seeds=3), [1, 2, 3], all_scores, fits, [measured or {}] * 3))


@pytest.mark.parametrize(("nll", "verdict"), [(0.2, HOLDS), (0.4, DOES_NOT_HOLD)])
def test_same_data_asks_for_the_lower_loss(nll, verdict):
    result = made_up(claim_compute.SAME_DATA, lambda run: scores(nll if run.preset == "tah2" else 0.3))
    assert result.verdict == verdict


def test_equal_compute_reads_standard_at_the_same_flops():
    """Standard: 0.4 at 1, 0.2 at 2 (units of FLOPs); half a doubling up it is 0.3 between them."""

    def of(run: Run) -> Scores:
        if run.preset == "tah2":
            return scores(0.25, flops=2**0.5 * 1e6)
        return scores(0.2, flops=2e6) if run.layers else scores(0.4, flops=1e6)

    result = made_up(claim_compute.EQUAL_COMPUTE, of)
    first = result.findings.comparisons[0]
    assert first.mean == pytest.approx(-0.05)
    assert result.verdict == HOLDS
    assert claim_compute.at_flops(8e6, (1e6, 0.4), (2e6, 0.2)) == 0.2


BINS = [
    {"low": 0.0, "high": 0.1, "rows": 400, "probability": 0.02, "gain": -2.0},
    {"low": 0.4, "high": 0.5, "rows": 40, "probability": 0.45, "gain": 0.01},
    {"low": 0.9, "high": 1.0, "rows": 90, "probability": 0.99, "gain": 0.5},
]


def test_depth_needs_both_ends_of_the_gain():
    assert made_up(claim_depth.CLAIM, measured={"bins": BINS, "crossings": [0.44]}).verdict == HOLDS
    harmful = [*BINS[:2], BINS[2] | {"gain": -0.1}]
    assert made_up(claim_depth.CLAIM, measured={"bins": harmful, "crossings": []}).verdict != HOLDS


def test_an_end_with_few_tokens_is_said_and_not_judged():
    few = [*BINS[:2], BINS[2] | {"rows": 3, "gain": -9.0}]
    result = made_up(claim_depth.CLAIM, measured={"bins": few, "crossings": []})
    assert any("fewer than 30 tokens with g > 0.9" in remark for remark in result.findings.remarks)
    assert not any("g > 0.9" in one.question for one in result.findings.comparisons)


def test_depth_on_other_tasks_informs():
    result = made_up(claim_depth.CLAIM, measured={"bins": BINS, "crossings": []}, budget=FULL)
    elsewhere = [one for one in result.findings.comparisons if not one.decisive]
    assert [one.mean for one in elsewhere] == pytest.approx([0.3, 0.1])


def change(unchanged: float, worse: float) -> dict[str, Any]:
    return {"from_depth": 1, "to_depth": 4, "unchanged": unchanged, "worse_beyond": worse, "better_beyond": 0.1} | {
        "mean_change": -0.01
    }


@pytest.mark.parametrize(
    ("unchanged", "worse", "verdict"), [(0.5, 0.2, HOLDS), (0.02, 0.49, DOES_NOT_HOLD), (0.5, 0.1, DOES_NOT_HOLD)]
)
def test_wasted_loops_need_both_shares(unchanged, worse, verdict):
    whole = change(unchanged, worse)
    steps = [whole | {"from_depth": depth, "to_depth": depth + 1} for depth in (1, 2, 3)]
    assert made_up(claim_wasted.CLAIM, measured={"whole": whole, "steps": steps}).verdict == verdict


def moved(rise: float, turn: float) -> dict[str, Any]:
    nll = {r: 1.8 + rise * max(r - 2, 0) for r in claim_settling.ITERATIONS}
    return {"nll": nll, "turns": {depth: turn ** (depth - 1) for depth in range(2, 9)}}


def looped(d: float, c: float) -> dict[str, Any]:
    return {"AbbIE-D": moved(d, 0.5), "AbbIE-C": moved(c, 0.8), "0pt": moved(0.02, 0.5)}


def test_settling_compares_the_two_residuals():
    assert made_up(claim_settling.SETTLING, measured=looped(0.01, 0.1)).verdict == HOLDS
    assert made_up(claim_settling.SETTLING, measured=looped(0.1, 0.01)).verdict == DOES_NOT_HOLD


def test_more_iterations_must_help_beyond_the_trained_ones():
    assert made_up(claim_settling.BEYOND, measured=looped(0.01, 0.1)).verdict == DOES_NOT_HOLD
    better = made_up(
        claim_settling.BEYOND,
        lambda run: scores(1.7 if run.preset == "abbie-d" else 1.8),
        measured=looped(-0.01, 0.1),
    )
    assert better.verdict == HOLDS


def test_routing_asks_learned_decisions_to_beat_every_other_way():
    measured = {"learned": 0.2, "random": 0.5, "last": 0.21}
    good = made_up(supervision.ROUTING, lambda run: scores(0.2 if run == supervision.LEARNED else 0.3), measured)
    assert good.verdict == HOLDS
    assert supervision.TAH not in supervision.ROUTING.runs(QUICK)
    assert supervision.TAH in supervision.ROUTING.runs(FULL)


def test_ablations_ask_the_published_rule_to_beat_every_change():
    def of(run: Run) -> Scores:
        return scores(0.2 if run == supervision.LEARNED else 0.1 if run.name == "sampled decisions" else 0.3)

    result = made_up(supervision.ABLATION, of, budget=FULL)
    assert [one.verdict for one in result.findings.comparisons].count(HOLDS) == 5
    assert result.verdict == DOES_NOT_HOLD
    assert made_up(supervision.ABLATION, of).verdict == HOLDS


def test_scaling_compares_slopes_of_one_model_and_of_two():
    def of(run: Run) -> Scores:
        if run.preset == "tah2":
            return scores(accuracy=0.6 if run.max_depth == 2 else 0.8)
        return scores(accuracy=0.6, flops=2e6) if run.layers else scores(accuracy=0.5, flops=1e6)

    points = [{"ceiling": m, "flops": 2**m * 1e6, "accuracy": 0.2 * m} for m in range(1, 5)]
    measured = {"points": [*points, {"ceiling": 6, "flops": 2**4 * 1e6, "accuracy": 0.8}]}
    # A constant difference of accuracy in all seeds is as sure as can be; slopes 0.2 against 0.1.
    result = made_up(claim_scaling.CLAIM, of, measured)
    assert [one.mean for one in result.findings.comparisons] == pytest.approx([0.2, 0.1, 0.0])
    assert result.verdict == HOLDS


def test_a_quarter_of_the_look_ahead_must_save_time_and_cost_nothing():
    runs = claim_lookahead.runs(QUICK)

    def judged(loss: float, seconds: float) -> str:
        all_scores = {run.name: [scores(0.3 + loss * (run == runs[-1]))] * 3 for run in runs}
        fits = {run.name: [Fit(seconds if run == runs[-1] else 10.0, [])] * 3 for run in runs}
        return judge(claim_lookahead.CLAIM, Results(QUICK, [1, 2, 3], all_scores, fits, [])).verdict

    assert judged(0.001, 8.0) == HOLDS
    assert judged(0.02, 8.0) == DOES_NOT_HOLD
    assert judged(0.001, 11.0) == DOES_NOT_HOLD


def test_predicted_gains_must_cost_nothing_and_leave_most_look_ahead_out():
    runs = claim_lookahead.predicted_runs(QUICK)

    def judged(loss: float, share: float) -> str:
        all_scores = {run.name: [scores(0.3 + loss * (run == runs[-1]))] * 3 for run in runs}
        fits = {run.name: [Fit(10.0, [], share if run == runs[-1] else 1.0)] * 3 for run in runs}
        return judge(claim_lookahead.VALUE_HEAD, Results(QUICK, [1, 2, 3], all_scores, fits, [])).verdict

    assert judged(0.001, 0.3) == HOLDS
    assert judged(0.02, 0.3) == DOES_NOT_HOLD
    assert judged(0.001, 0.8) == DOES_NOT_HOLD


def test_an_option_is_judged_by_its_aim():
    def of(run: Run) -> Scores:
        changed = run.objective or run.embedding_scale
        return scores(nll=0.35 if changed else 0.3, flops=0.8e6 if changed else 1e6)

    verdicts = {claim.key: made_up(claim, of).verdict for claim in claim_options.CLAIMS}
    assert verdicts["pass-price"] == verdicts["stop-floor"] == HOLDS
    assert verdicts["exploration"] == verdicts["embedding-scale"] == verdicts["threshold-warm-up"] == DOES_NOT_HOLD


def test_every_claim_says_what_the_paper_says_and_what_was_done():
    for claim in CLAIMS:
        assert claim.title.endswith("?")
        assert len(claim.paper) > 30 and len(claim.setting(QUICK)) > 30
        assert needed_runs(QUICK, [claim])


def test_equal_models_leave_every_comparison_of_losses_unclear():
    assert made_up(claim_compute.SAME_DATA).verdict == UNCLEAR
    assert made_up(supervision.ABLATION).verdict == UNCLEAR
