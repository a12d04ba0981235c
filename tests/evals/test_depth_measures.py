"""What depths do, against token-by-token decoding and loops over its numbers: unchanged and worsened tokens,
calibration, convergence, thresholds."""

import math
from pathlib import Path

import pytest
import torch

from fathom.errors import ConfigError, DataError
from fathom.evals.batches import Sizes
from fathom.evals.calibration import BINS, calibration, crossings, fill_bins
from fathom.evals.changes import compare, depth_changes
from fathom.evals.convergence import convergence
from fathom.evals.forward import NotForThisMethod, dial, forced_trace
from fathom.evals.heldout import heldout_nll
from fathom.evals.plots import plot_changes, plot_convergence, plot_curves, plot_gains
from fathom.evals.threshold_curve import answer_flops, nll_settings, threshold_curve
from fathom.model.collectives import LOCAL
from fathom.model.flops import decode_flops
from fathom.model.looped import LoopedLM
from fathom.objectives.lookahead import lookahead_log_prob
from support.documents import random_documents
from support.models import tiny_model
from support.reference import decode

DOCUMENTS = random_documents([9, 13, 6])
NOTHING = [([1, 2, 3], [False] * 3)]


def lookahead(model, trace, rows, depth, chosen):
    return lookahead_log_prob(model, trace, rows, depth, chosen, LOCAL, 64)


def decoded(model: LoopedLM, depth: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Every document token by token; all tokens to ``depth`` where it is given."""
    found = []
    with torch.no_grad():
        for number in range(len(DOCUMENTS)):
            rows = DOCUMENTS.rows(number)
            routes = None if depth is None else torch.full_like(rows.ids, depth)
            found.append(decode(model, rows, routes) | {"supervised": rows.supervised})
    return found


@pytest.mark.parametrize("method", ["tah2", "tah2-fixed", "ouro"])
def test_changes_are_counted_over_tokens_one_by_one(method: str):
    model = tiny_model(method, 3).eval()
    found = depth_changes(model, DOCUMENTS, Sizes(16))
    pairs = [(step.from_depth, step.to_depth) for step in found.steps]
    assert pairs == [(1, 2), (2, 3)] and (found.whole.from_depth, found.whole.to_depth) == (1, 3)
    tokens = decoded(model, 3)
    for change in [*found.steps, found.whole]:
        rows = unchanged = worse = beyond = better = 0
        total = 0.0
        for document in tokens:
            for t in range(len(document["supervised"])):
                if document["supervised"][t]:
                    before = -float(document["single"][t, change.from_depth - 1])
                    after = -float(document["single"][t, change.to_depth - 1])
                    rows += 1
                    total += after - before
                    unchanged += abs(after - before) <= 1e-3
                    worse += after > before
                    beyond += after > before + 1e-3
                    better += after < before - 1e-3
        assert (change.rows, change.mean_change) == (rows, pytest.approx(total / rows))
        assert (change.unchanged, change.worse) == pytest.approx((unchanged / rows, worse / rows))
        assert (change.worse_beyond, change.better_beyond) == pytest.approx((beyond / rows, better / rows))
        assert 0 < change.worse < 1


def test_the_tolerance_is_inclusive_and_rows_not_read_twice_do_not_count():
    losses = torch.tensor([[1.0, 1.5], [1.0, 0.5], [2.0, 2.0], [1.0, 1.75], [1.0, math.nan], [math.nan, 1.0]])
    found = compare(losses.double(), 1, 2, tolerance=0.5)
    assert (found.rows, found.unchanged, found.worse) == (4, 0.75, 0.5)
    assert (found.worse_beyond, found.better_beyond, found.mean_change) == (0.25, 0.0, pytest.approx(0.1875))


def test_calibration_measures_each_stopped_token_as_if_it_alone_had_gone_on():
    model = tiny_model("tah2", 3, threshold=0.4).eval()
    found = calibration(model, DOCUMENTS, lookahead, Sizes(16))
    pairs: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    stopped = 0
    for number, free in enumerate(decoded(model)):
        rows = DOCUMENTS.rows(number)
        for t in range(rows.count):
            for depth in range(1, min(int(free["executed"][t]), 2) + 1):
                if not rows.supervised[t]:
                    continue
                single = free["single"]
                if free["executed"][t] == depth:
                    stopped += 1
                    routes = free["executed"].clone()
                    routes[t] = depth + 1
                    with torch.no_grad():
                        single = decode(model, rows, routes)["single"]
                gain = float(single[t, depth] - single[t, depth - 1])
                pairs[depth].append((float(free["gates"][t, depth - 1]), gain))
    assert stopped > 3 and len(pairs[2]) > 3, "too few ways: this test would show nothing"
    assert (found.gains, found.rows, set(found.by_depth)) == ("lookahead", len(pairs[1] + pairs[2]), {1, 2})
    for bins, wanted in ((found.bins, pairs[1] + pairs[2]), *((found.by_depth[m], pairs[m]) for m in (1, 2))):
        check_bins(bins, wanted)


def check_bins(bins, pairs: list[tuple[float, float]]) -> None:
    """Against a loop over (g, gain) pairs."""
    assert sum(entry.rows for entry in bins) == len(pairs)
    for entry in bins:
        mine = [(g, gain) for g, gain in pairs if entry.low <= g < entry.high or (g == entry.high == 1)]
        mean = sum(gain for _, gain in mine) / len(mine)
        assert (entry.rows, entry.gain) == (len(mine), pytest.approx(mean))
        assert entry.probability == pytest.approx(sum(g for g, _ in mine) / len(mine))
        if len(mine) == 1:
            assert math.isnan(entry.standard_error)
        else:
            variance = sum((gain - mean) ** 2 for _, gain in mine) / (len(mine) - 1)
            assert entry.standard_error == pytest.approx(math.sqrt(variance / len(mine)))


def test_forced_calibration_is_of_a_model_that_always_goes_on():
    model = tiny_model("tah2", 2).eval()
    found = calibration(model, DOCUMENTS, None)
    pairs = []
    for document in decoded(model, 2):
        for t in range(len(document["supervised"])):
            if document["supervised"][t]:
                single = document["single"][t]
                pairs.append((float(document["gates"][t, 0]), float(single[1] - single[0])))
    assert found.gains == "forced"
    check_bins(found.bins, pairs)
    assert [entry.gain for entry in found.bins] != pytest.approx(
        [entry.gain for entry in calibration(model, DOCUMENTS, lookahead).bins]
    ), "deeper keys of others were visible: the two must differ"


def test_the_crossing_lies_between_the_bins_whose_gains_change_sign():
    rising = torch.tensor([[0.05, -0.4], [0.45, -0.1], [0.55, 0.3], [0.95, 0.5]]).double()
    assert crossings(fill_bins(rising)) == [pytest.approx(0.475)]
    assert crossings(fill_bins(rising.abs())) == []
    assert [entry.low for entry in fill_bins(torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double())] == [0.0, 1 - 1 / BINS]


def test_convergence_is_measured_on_each_tokens_states():
    model = tiny_model("tah2-fixed", 4).eval()
    found = convergence(model, DOCUMENTS, Sizes(16))
    norms, moved, turned, losses = ({depth: [] for depth in range(1, 5)} for _ in range(4))
    with torch.no_grad():
        for number in range(len(DOCUMENTS)):
            rows = DOCUMENTS.rows(number)
            trace = forced_trace(model, rows, 64)
            for t in range(rows.count):
                if not rows.supervised[t]:
                    continue
                before: list[float] | None = None
                for depth, level in enumerate(trace.depths, start=1):
                    state = state_at(level, t)
                    size = math.sqrt(sum(x * x for x in state))
                    norms[depth].append(size)
                    losses[depth].append(-float(level.log_prob[level.index == t]))
                    if before is not None:
                        other = math.sqrt(sum(x * x for x in before))
                        apart = math.sqrt(sum((x - y) ** 2 for x, y in zip(state, before, strict=True)))
                        dot = sum(x * y for x, y in zip(state, before, strict=True))
                        moved[depth].append(apart / size)
                        turned[depth].append(1 - dot / size / other)
                    before = state
    assert [step.depth for step in found.iterations] == [1, 2, 3, 4] and found.rows == len(norms[1])
    assert found.iterations[0].relative_change is None and found.iterations[0].direction_change is None
    for step in found.iterations:
        assert step.nll == pytest.approx(sum(losses[step.depth]) / found.rows)
        for spread, values in ((step.norm, norms), (step.relative_change, moved), (step.direction_change, turned)):
            if spread is not None:
                ordered = sorted(values[step.depth])
                assert spread.mean == pytest.approx(sum(ordered) / len(ordered))
                assert ordered[(len(ordered) - 1) // 2] <= spread.median <= ordered[len(ordered) // 2]
                assert spread.median <= spread.p90 <= ordered[-1]


def test_a_depth_before_the_last_reads_what_a_shallower_model_would():
    model = tiny_model("abbie-d", 3, threshold=None, num_hidden_layers=3).eval()
    found = convergence(model, DOCUMENTS)
    for step in found.iterations:
        with dial(model, max_depth=step.depth):
            assert step.nll == pytest.approx(heldout_nll(model, DOCUMENTS).nll)
    changes = depth_changes(model, DOCUMENTS)
    assert changes.whole.mean_change == pytest.approx(found.iterations[2].nll - found.iterations[0].nll)


def state_at(level, row: int) -> list[float]:
    return level.passed.x[level.index == row][0].tolist()


def test_an_answers_flops_are_those_of_generating_it_after_all_before():
    model = tiny_model("tah2", 3)
    executed, scored = [1, 3, 2, 1, 2, 3, 1], [False, True, True, False, True, False, False]
    cost = lambda prompt, depths: decode_flops(model.config, model.method, prompt, depths)  # noqa: E731
    wanted = cost([1], [3, 2]) + cost([1, 3, 2, 1], [2])
    assert answer_flops(model.config, model.method, executed, scored) == pytest.approx(wanted)
    assert answer_flops(model.config, model.method, [2, 2], [False, False]) == 0
    assert answer_flops(model.config, model.method, [2, 2], [True, True]) == pytest.approx(cost([], [2, 2]))


def test_each_threshold_is_a_decoding_of_its_own():
    model = tiny_model("tah2", 3).eval()
    thresholds = [0.2, 0.5, 0.8]
    settings = nll_settings(model, DOCUMENTS, thresholds, Sizes(16))
    for threshold, setting in zip(thresholds, settings, strict=True):
        fresh = tiny_model("tah2", 3, threshold=threshold).eval()
        for number, document in enumerate(decoded(fresh)):
            scored = document["supervised"]
            assert setting.totals[number] == pytest.approx(-float(document["log_prob"][scored].sum()))
            assert setting.units[number] == int(scored.sum())
            flops = answer_flops(model.config, model.method, document["executed"].tolist(), scored.tolist())
            assert setting.flops[number] == pytest.approx(flops)
    assert model.method.threshold == 0.5, "the dial is put back"
    curve = threshold_curve("tah2", settings)
    assert curve.points[0].flops < curve.points[-1].flops and curve.items == 3
    assert [point.setting for point in curve.points] == [0.8, 0.5, 0.2]


@pytest.mark.parametrize("rule", ["state_change", "divergence"])
def test_rules_without_a_decider_have_a_threshold_too(rule: str) -> None:
    model = tiny_model("huginn", 3, num_hidden_layers=4, axes={"routing": rule}).eval()
    deep, shallow = nll_settings(model, DOCUMENTS, [0.0, 1.0], Sizes(16))
    assert sum(deep.flops) > sum(shallow.flops)


def test_the_dial_comes_back_after_an_error():
    model = tiny_model("tah2", 3)
    with pytest.raises(RuntimeError, match="stop"), dial(model, 0.1, 2):
        assert (model.method.threshold, model.method.max_depth) == (0.1, 2)
        raise RuntimeError("stop")
    assert (model.method.threshold, model.method.max_depth) == (0.5, 3)


def test_what_does_not_apply_or_has_nothing_to_measure_is_refused():
    standard, fixed, tah2 = tiny_model("standard"), tiny_model("tah2-fixed", 2), tiny_model("tah2", 2)
    for measure in (depth_changes, convergence):
        with pytest.raises(NotForThisMethod, match="'standard' has one"):
            measure(standard, DOCUMENTS)
    with pytest.raises(NotForThisMethod, match="no continue probability"):
        calibration(fixed, DOCUMENTS, None)
    # With a decider or without: what counts is whether the rule of decoding looks at the threshold.
    for unmoved in (fixed, tiny_model("ouro", 2), tiny_model("mor-token", 2, num_hidden_layers=4)):
        with pytest.raises(NotForThisMethod, match="no threshold to move"):
            nll_settings(unmoved, DOCUMENTS, [0.1, 0.2])
    with pytest.raises(NotForThisMethod, match="a curve over thresholds compares depths"):
        nll_settings(tiny_model("tah2", 1), DOCUMENTS, [0.1, 0.2])
    with pytest.raises(ConfigError, match=r"threshold 1\.5 is not a probability"):
        nll_settings(tah2, DOCUMENTS, [0.1, 1.5])
    nothing = type(DOCUMENTS)(NOTHING)
    for run in (
        depth_changes,
        convergence,
        lambda m, d: calibration(m, d, None),
        lambda m, d: nll_settings(m, d, [0.5]),
    ):
        with pytest.raises(DataError, match="no supervised token"):
            run(tah2, nothing)


def test_plots_show_the_numbers(tmp_path: Path):
    model = tiny_model("tah2", 3).eval()
    changes = depth_changes(model, DOCUMENTS)
    text = plot_changes(changes, tmp_path)[0].read_text()
    assert "1 to 3" in text and f"{changes.whole.worse_beyond:.1%}" in text
    gains = plot_gains(calibration(model, DOCUMENTS, lookahead), tmp_path)[0].read_text()
    assert "gains by lookahead" in gains and "depth 2 to 3" in gains
    assert "tokens; dotted" in plot_convergence(convergence(model, DOCUMENTS), tmp_path)[0].read_text()
    curve = threshold_curve("tah2", nll_settings(model, DOCUMENTS, [0.2, 0.8]))
    assert ">0.8<" in plot_curves([curve], tmp_path, "thresholds")[0].read_text()
    assert len(list(tmp_path.glob("*.png"))) == len(list(tmp_path.glob("*.svg"))) == 4
