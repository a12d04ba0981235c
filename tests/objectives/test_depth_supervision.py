"""Look-ahead, labels, costs, class balance and the loss of TaH2."""

import pytest
import torch
import torch.nn.functional as F

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import LOCAL
from fathom.model.levels import LoopOptions
from fathom.model.rows import PackedRows
from fathom.objectives.labels import Ran, coverage_cut, depth_labels
from fathom.objectives.lookahead import lookahead_log_prob
from fathom.objectives.root import TrainingRoot
from fathom.objectives.stats import calibration, summarise
from support.models import random_rows, tiny_model
from support.reference import decode

OBJECTIVE = ObjectiveConfig()


def look(model, trace, rows, depth, chosen):
    return lookahead_log_prob(model, trace, rows, depth, chosen, LOCAL, 1024)


@pytest.mark.parametrize(("max_depth", "rule"), [(2, "duo_causal"), (3, "duo_causal"), (3, "latest")])
def test_lookahead_of_a_stopped_token_equals_running_it_alone(max_depth, rule):
    """T4: a run in which only that token continues, everyone else's route fixed; also where keys of tokens that stopped
    stand in for missing ones, which those of a token that goes on do not."""
    model = tiny_model("tah2", max_depth, axes={"visibility": rule})
    rows = random_rows([18, 9])
    trace = model(rows)
    for depth in range(1, max_depth):
        ran = trace.depths[depth - 1]
        stopped = ~ran.goes_on
        assert stopped.sum() > 3
        measured = look(model, trace, rows, depth, stopped)
        for place, row in enumerate(ran.index[stopped].tolist()):
            routes = trace.executed.clone()
            routes[row] = depth + 1
            alone = decode(model, rows, routes)["single"][row, depth]
            assert measured[place].item() == pytest.approx(alone.item(), abs=1e-10)


def test_lookahead_of_a_continuing_token_equals_the_main_pass():
    """T5: forward everyone who executed the depth, as the published code does; its main-pass keys are replaced."""
    model = tiny_model("tah2", 2)
    rows = random_rows([25])
    trace = model(rows)
    ran = trace.depths[0]
    for place, row in enumerate(ran.index[ran.goes_on].tolist()):
        routes = trace.executed.clone()
        routes[row] = 1
        without = model(rows, options=LoopOptions(routes=routes))
        only = torch.zeros_like(ran.goes_on)
        only[row] = True
        measured = look(model, without, rows, 1, only)
        assert measured.item() == pytest.approx(trace.depths[1].log_prob[place].item(), abs=1e-10)


def test_lookahead_leaves_no_graph_and_no_keys():
    """T6: gradients with the look-ahead equal those of a loss made from frozen labels without it."""
    model = tiny_model("tah2", 3)
    rows = random_rows([20, 12])
    trace = model(rows)
    sizes = [len(stream.keys) for stream in trace.streams.streams]
    labels = depth_labels(Ran(model, trace, rows, OBJECTIVE, LOCAL, 1024))
    assert [len(stream.keys) for stream in trace.streams.streams] == sizes
    assert not any(tensor.requires_grad for at in labels for tensor in (at.gain, at.cost))

    root = TrainingRoot(model, OBJECTIVE)
    loss, _ = root(*rows)
    loss.backward()
    with_lookahead = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    fresh = model(rows)
    total = -fresh.log_prob[rows.supervised].sum()
    for ran, at in zip(fresh.depths, labels, strict=False):
        for i in at.supervised.nonzero()[:, 0].tolist():
            g, c = ran.continue_logit[i].sigmoid(), float(at.label[i])
            bce = -at.balance * c * g.log() - (1 - c) * (1 - g).log()
            total = total + OBJECTIVE.decider_weight * at.cost[i] * bce
    torch.testing.assert_close(loss, total, atol=1e-8, rtol=1e-8)
    total.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, with_lookahead[name], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("gains", "rho", "cut"),
    [
        ([5, 3, 1, 0.9, 0.1], 0.9, 1.0),
        ([5, 3, 1, 0.9, 0.1], 0.99, 0.9),
        ([5, 3, 1, 0.9, 0.1], 1.0, 0.1),
        ([0.1, 5, -7, 0.9, 3, 1, 0.0], 0.9, 1.0),
        ([float("nan"), float("inf"), 2.0], 0.99, 2.0),
        ([-1, 0.0], 0.99, None),
        ([], 0.99, None),
    ],
)
def test_coverage_cut(gains, rho, cut):
    """T9."""
    assert coverage_cut(torch.tensor(gains, dtype=torch.float64), rho) == cut


def slow_labels(model, rows, rho):
    """Labels from a loop that runs each hypothetical token separately."""
    executed = model(rows).executed
    base = decode(model, rows, executed)
    wanted, out = rows.supervised.tolist(), []
    for m in range(1, model.method.max_depth):
        gains = {}
        for t in range(rows.count):
            if executed[t] < m or not wanted[t]:
                continue
            routes = executed.clone()
            routes[t] = max(int(executed[t]), m + 1)
            deeper = decode(model, rows, routes)["single"]
            gains[t] = (deeper[t, m] - base["single"][t, m - 1]).item()
        cut = coverage_cut(torch.tensor(list(gains.values()), dtype=torch.float64), rho)
        labels = {t: cut is not None and gain >= cut for t, gain in gains.items()}
        out.append((gains, cut or 0.0, labels))
        wanted = [labels.get(t, False) for t in range(rows.count)]
    return out


def test_labels_equal_a_slow_loop_and_are_monotone():
    """T10, and specs D.3: labels of the parallel pass equal those of one token at a time."""
    model = tiny_model("tah2", 3)
    rows = random_rows([14, 8], seed=5)
    trace = model(rows)
    fast = depth_labels(Ran(model, trace, rows, OBJECTIVE, LOCAL, 1024))
    seen_continue = seen_ignored = False
    for m, (at, (gains, cut, labels)) in enumerate(zip(fast, slow_labels(model, rows, 0.99), strict=True), start=1):
        index = trace.depths[m - 1].index.tolist()
        assert at.cut == pytest.approx(cut, abs=1e-9)
        supervised = continuing = 0
        for place, t in enumerate(index):
            assert bool(at.eligible[place]) == (t in gains)
            assert bool(at.label[place]) == labels.get(t, False)
            cost = min(max(abs(gains[t] - cut), 1e-6), 1.0) if t in gains else 1e-6
            assert at.cost[place].item() == pytest.approx(cost, rel=1e-5)
            supervised += bool(rows.supervised[t])
            continuing += labels.get(t, False)
            if m > 1 and at.label[place]:
                before = trace.depths[m - 2].index.tolist().index(t)
                assert fast[m - 2].label[before]
            seen_ignored |= m > 1 and bool(rows.supervised[t]) and t not in gains
        seen_continue |= continuing > 0
        stopping = supervised - continuing
        expected = min(max(stopping / continuing, 0.02), 50.0) if stopping and continuing else 1.0
        assert at.balance == pytest.approx(expected)
    assert seen_continue and seen_ignored, "the test needs both kinds of token"


def test_no_positive_gain_means_no_continue_labels():
    """T9, last example: depth 2 always worse, cut 0 for the weights."""
    model = tiny_model("tah2", 2)
    rows = random_rows([12])
    trace = model(rows, options=LoopOptions(routes=torch.ones(12, dtype=torch.int64)))
    first = trace.depths[0]
    assert first.head is not None
    perfect = first.head._replace(log_prob=torch.zeros(12).double())
    hopeless = trace._replace(depths=[first._replace(head=perfect)])
    at = depth_labels(Ran(model, hopeless, rows, OBJECTIVE, LOCAL, 1024))[0]
    assert at.cut == 0.0 and not at.label.any() and at.balance == 1.0
    assert (at.gain[at.eligible] < 0).all()
    torch.testing.assert_close(at.cost[at.eligible], at.gain[at.eligible].abs().clamp(1e-6, 1).float())


def halves(rows: PackedRows) -> list[PackedRows]:
    parts = []
    for number in (0, 1):
        keep = rows.sequence == number
        parts.append(PackedRows(*(field[keep] for field in rows)))
    return parts


def test_loss_is_a_sum_over_micro_batches():
    """T11: with cut and balance held fixed (no decider loss), loss and gradients do not depend on the split."""
    model = tiny_model("tah2", 3)
    root = TrainingRoot(model, ObjectiveConfig(decider_weight=0.0))
    rows = random_rows([16, 9])
    whole, stats = root(*rows)
    whole.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total, split = 0.0, torch.zeros_like(stats)
    for part in halves(rows):
        loss, numbers = root(*part)
        loss.backward()
        total += loss.item()
        split += numbers
    assert total == pytest.approx(whole.item(), abs=1e-9)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, together[name], atol=1e-10, rtol=1e-8)
    for name in (
        "rows",
        "supervised",
        "loss",
        "readout_loss",
        "executed/2",
        "depth_loss/2",
        "pairs/1",
        "pairs/2",
        "continued/1",
    ):
        at = root.stat_names.index(name)
        assert split[at].item() == pytest.approx(stats[at].item(), abs=1e-8), name


def test_statistics_are_what_they_say():
    model = tiny_model("tah2", 3)
    rows = random_rows([30, 14])
    root = TrainingRoot(model, OBJECTIVE)
    loss, stats = root(*rows)
    trace = model(rows)
    metrics = summarise(root.stat_names, stats)
    supervised = rows.supervised
    assert metrics["nll"] == pytest.approx(-trace.log_prob[supervised].mean().item())
    assert metrics["mean_depth"] == pytest.approx(trace.executed[supervised].double().mean().item())
    assert metrics["mean_depth_all_rows"] == pytest.approx(trace.executed.double().mean().item())
    first = trace.depths[0]
    assert metrics["share_continuing/depth_1"] == pytest.approx(first.goes_on[supervised].double().mean().item())
    assert metrics["nll/depth_1"] == pytest.approx(-first.log_prob[supervised].mean().item())
    assert sum(metrics[f"share_stopping/depth_{m}"] for m in (1, 2, 3)) == pytest.approx(1.0)
    expected = metrics["nll"] + OBJECTIVE.decider_weight * metrics["decider_loss"]
    assert loss.item() / supervised.sum().item() == pytest.approx(expected)
    points = calibration(root.stat_names, stats)
    assert sum(count for _, _, count in points) == supervised.sum()
    total_gain = sum(gain * count for _, gain, count in points)
    assert total_gain == pytest.approx(stats[root.stat_names.index("gain/1")].item())


@pytest.mark.parametrize("method", ["standard", "tah2-fixed"])
def test_methods_without_decider_learn_the_mixture_alone(method):
    model = tiny_model(method, 3)
    rows = random_rows([20])
    loss, stats = TrainingRoot(model, OBJECTIVE)(*rows)
    assert loss.item() == pytest.approx(
        F.nll_loss(
            model(rows).log_prob[rows.supervised][:, None],
            torch.zeros_like(rows.ids[rows.supervised]),
            reduction="sum",
        ).item()
    )
    assert "decider_loss" in summarise(TrainingRoot(model, OBJECTIVE).stat_names, stats)


def test_bf16_autocast_trains_every_parameter_in_fp32():
    model = tiny_model("tah2", 2, dtype=torch.float32)
    rows = random_rows([40])
    exact, _ = TrainingRoot(model, OBJECTIVE)(*rows)
    loss, _ = TrainingRoot(model, OBJECTIVE, precision="bf16", checkpointing=True)(*rows)
    assert 0 < abs(loss.item() - exact.item()) < 0.1 * abs(exact.item())
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_share_of_the_lookahead_stands_for_the_rest():
    """lookahead_fraction: rows that went on are always measured, of the stopped a drawn share, weighted by its inverse;
    over many draws the weighted counts and costs at fixed labels are those of measuring everyone."""
    model, rows = tiny_model("tah2", 2), random_rows([200])
    trace = model(rows)
    whole = depth_labels(Ran(model, trace, rows, ObjectiveConfig(), LOCAL, 1024))[0]
    some = ObjectiveConfig(lookahead_fraction=0.3)
    stopped = rows.supervised & ~trace.depths[0].goes_on
    shares, costs = [], []
    for key in range(60):
        at = depth_labels(Ran(model, trace, rows, some, LOCAL, 1024, key))[0]
        measured = at.supervised & stopped
        shares.append(float(measured.sum() / stopped.sum()))
        assert bool((at.supervised | ~trace.depths[0].goes_on | ~rows.supervised).all()), "who went on is measured"
        torch.testing.assert_close(at.gain[at.eligible], whole.gain[at.eligible])
        # With the whole's cut, what each measured row counts for.
        margin = (whole.gain - whole.cut).abs().clamp(1e-6, 1.0)
        costs.append(float((margin / 0.3)[measured].sum()))
    margin = (whole.gain - whole.cut).abs().clamp(1e-6, 1.0)
    assert sum(shares) / 60 == pytest.approx(0.3, abs=0.02)
    assert sum(costs) / 60 == pytest.approx(float(margin[stopped].sum()), rel=0.05)
    again = depth_labels(Ran(model, trace, rows, some, LOCAL, 1024, 7))[0]
    same = depth_labels(Ran(model, trace, rows, some, LOCAL, 1024, 7))[0]
    assert torch.equal(again.cost, same.cost) and len(set(shares)) > 1


def test_labels_by_mismatch_and_unweighted():
    """Ablations of Table 4."""
    model, rows = tiny_model("tah2", 2), random_rows([120])
    trace = model(rows)
    first = trace.depths[0]
    top = model.logits(first.hidden).argmax(-1)
    at = depth_labels(Ran(model, trace, rows, ObjectiveConfig(label_rule="mismatch"), LOCAL, 1024))[0]
    assert torch.equal(at.label, rows.supervised & (top != rows.targets))
    assert set(at.cost[rows.supervised].tolist()) == {1.0}
    plain = depth_labels(Ran(model, trace, rows, ObjectiveConfig(weighted=False), LOCAL, 1024))[0]
    assert set(plain.cost[rows.supervised].tolist()) == {1.0}


def test_a_price_and_a_floor():
    """Options beyond the paper: a pass must bring its price, and a decision to stop counts at least the floor."""
    model, rows = tiny_model("tah2", 2), random_rows([120])
    trace = model(rows)
    free = depth_labels(Ran(model, trace, rows, ObjectiveConfig(), LOCAL, 1024))[0]
    priced = depth_labels(Ran(model, trace, rows, ObjectiveConfig(pass_price_nats=1.0), LOCAL, 1024))[0]
    assert torch.equal(priced.label, free.label & (free.gain >= 1.0)) and priced.label.any()
    floored = depth_labels(Ran(model, trace, rows, ObjectiveConfig(stop_cost_floor=0.4), LOCAL, 1024))[0]
    stops = floored.eligible & ~floored.label
    assert float(floored.cost[stops].min()) >= 0.4 - 1e-6 and float(free.cost[stops].min()) < 0.4
