"""Every objective's loss and gradients against its formula, written out slowly over scripted or traced depths."""

import math
import random

import pytest
import torch
from torch import Tensor

from fathom.config.schema import ObjectiveConfig
from fathom.model.attention import TrainingStreams
from fathom.model.levels import ALL_DEPTHS, LoopOptions, Trace
from fathom.model.looped import LoopedLM
from fathom.model.methods import METHODS
from fathom.model.rows import PackedRows
from fathom.model.state import RowKeys
from fathom.model.visibility import SAME_DEPTH, row_meta
from fathom.objectives.context import Draw
from fathom.objectives.depth_draws import draw_depth
from fathom.objectives.root import TrainingRoot
from fathom.objectives.stats import summarise
from fathom.objectives.table import OBJECTIVES
from model.test_methods import model_of
from support.models import random_rows, tiny_model

DEPTHS = 3


def rows_of(seed: int = 0) -> PackedRows:
    """Three documents, the second without a target, with depths asked."""
    rows = random_rows([9, 5, 7], seed=seed)
    oracle = torch.randint(1, DEPTHS + 1, (rows.count,), generator=torch.Generator().manual_seed(seed + 1))
    return rows._replace(oracle=oracle, supervised=rows.supervised & (rows.sequence != 1))


def config_of(**changes: object) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate(changes)


def agree(model: LoopedLM, got: Tensor, expected: Tensor) -> None:
    """Losses, and the gradient of every parameter that learns."""
    torch.testing.assert_close(got.detach(), expected.detach(), atol=1e-9, rtol=1e-9)
    names, learning = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    ours = torch.autograd.grad(got, learning, allow_unused=True)
    theirs = torch.autograd.grad(expected, learning, allow_unused=True)
    moved = 0
    for name, one, other in zip(names, ours, theirs, strict=True):
        assert one is not None, f"{name} has no gradient"
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-6, msg=lambda text, at=name: f"{at}: {text}")
        moved += int(bool(other.any()))
    assert moved, "the test must have a gradient"


def all_depths(model: LoopedLM, rows: PackedRows) -> Trace:
    return model(rows, options=LoopOptions(routes=torch.full_like(rows.ids, DEPTHS)))


def exit_prob(model: LoopedLM, hidden: Tensor) -> Tensor:
    """lambda = sigma(w h + b) of one row."""
    gate = model.get_submodule("decider.gate")
    weight, bias = gate.get_parameter("weight"), gate.get_parameter("bias")
    return torch.sigmoid(hidden @ weight[0] + bias[0])


def shares_of(model: LoopedLM, trace: Trace, t: int) -> list[Tensor]:
    """p_m = lambda_m prod_{j<m} (1 - lambda_j), the last the rest."""
    left, shares = torch.ones((), dtype=torch.float64), []
    for number, ran in enumerate(trace.depths):
        stop = exit_prob(model, ran.hidden[t]) if number + 1 < DEPTHS else torch.ones((), dtype=torch.float64)
        shares.append(left * stop)
        left = left * (1 - stop)
    return shares


def supervised(rows: PackedRows) -> list[int]:
    return rows.supervised.nonzero()[:, 0].tolist()


def depth_mean(model: LoopedLM, rows: PackedRows, config: ObjectiveConfig) -> Tensor:
    trace = all_depths(model, rows)
    return torch.stack([-ran.log_prob[t] / DEPTHS for t in supervised(rows) for ran in trace.depths]).sum()


def entropy_regularised(model: LoopedLM, rows: PackedRows, config: ObjectiveConfig) -> Tensor:
    trace, terms = all_depths(model, rows), []
    for t in supervised(rows):
        for p, ran in zip(shares_of(model, trace, t), trace.depths, strict=True):
            terms.append(-p * ran.log_prob[t] + config.entropy_weight * p * p.log())
    return torch.stack(terms).sum()


def ponder(model: LoopedLM, rows: PackedRows, config: ObjectiveConfig) -> Tensor:
    trace, terms = all_depths(model, rows), []
    prior = [config.ponder_rate * (1 - config.ponder_rate) ** number for number in range(DEPTHS)]
    for t in supervised(rows):
        for p, q, ran in zip(shares_of(model, trace, t), prior, trace.depths, strict=True):
            terms.append(-p * ran.log_prob[t] + config.ponder_weight * p * (p.log() - math.log(q / sum(prior))))
    return torch.stack(terms).sum()


def act(model: LoopedLM, rows: PackedRows, config: ObjectiveConfig) -> Tensor:
    """Halting by sums of h; what is left at the last step is R, and only R of N + R has a gradient."""
    with torch.no_grad():
        halted = model(rows).executed
    trace, terms = model(rows, options=LoopOptions(routes=halted)), []
    assert len(halted[rows.supervised].unique()) > 1, "the test must mix depths"
    for t in supervised(rows):
        left, state, steps = torch.ones((), dtype=torch.float64), torch.zeros(32, dtype=torch.float64), int(halted[t])
        for number in range(1, steps + 1):
            ran = trace.depths[number - 1]
            place = int((ran.index == t).nonzero())
            h = exit_prob(model, ran.hidden[place])
            if number == steps:
                assert steps == DEPTHS or float(left - h) <= model.method.threshold
                state = state + left * ran.passed.x[place]
            else:
                assert float(left - h) > model.method.threshold
                state, left = state + h * ran.passed.x[place], left - h
        log_q = model.logits(model.backbone.norm(state[None]))[0].log_softmax(-1)
        terms.append(-log_q[rows.targets[t]] + config.act_weight * (steps + left))
    return torch.stack(terms).sum()


def gate_gain(model: LoopedLM, rows: PackedRows, config: ObjectiveConfig) -> Tensor:
    trace, terms = all_depths(model, rows), []
    for t in supervised(rows):
        for number in range(DEPTHS - 1):
            with torch.no_grad():
                gain = max(0.0, float(trace.depths[number + 1].log_prob[t] - trace.depths[number].log_prob[t]))
            target = 1 / (1 + math.exp(-50 * (gain - 0.005)))
            stop = exit_prob(model, trace.depths[number].hidden[t].detach())
            terms.append(-(target * (1 - stop).log() + (1 - target) * stop.log()) / (DEPTHS - 1))
    return torch.stack(terms).sum()


def oracle_labels(model: LoopedLM, rows: PackedRows, config: ObjectiveConfig) -> Tensor:
    trace, terms, asked = model(rows), [], set()
    for depth, ran in enumerate(trace.depths[: DEPTHS - 1], start=1):
        for place, t in enumerate(ran.index.tolist()):
            if rows.supervised[t]:
                assert ran.continue_logit is not None
                g, on = ran.continue_logit[place].sigmoid(), bool(rows.oracle[t] > depth)
                terms.append(-config.oracle_positive_weight * g.log() if on else -(1 - g).log())
                asked.add((depth, on))
    assert len(asked) == 2 * (DEPTHS - 1), "every case must occur"
    return torch.stack(terms).sum()


def router_auxiliary(model: LoopedLM, rows: PackedRows, config: ObjectiveConfig) -> Tensor:
    with torch.no_grad():
        chosen = model(rows).executed
    trace = model(rows, options=LoopOptions(routes=chosen))
    terms = [-trace.log_prob[t] for t in supervised(rows)]
    router = model.get_parameter("decider.router.weight")
    for depth, ran in enumerate(trace.depths[: DEPTHS - 1], start=1):
        for place, t in enumerate(ran.index.tolist()):
            if rows.supervised[t]:
                logit = router[depth] @ ran.passed.x[place].detach()
                g = torch.sigmoid(logit)
                terms.append(-config.router_weight * (g if chosen[t] > depth else 1 - g).log())
                terms.append(config.router_z_weight * logit.exp().log() ** 2)
    for t in supervised(rows):  # the first recursion takes every row, and its router weighs it
        first = router[0] @ trace.depths[0].passed.state.u[t].detach()
        terms.append(config.router_z_weight * first.exp().log() ** 2)
    return torch.stack(terms).sum()


def router_balance(model: LoopedLM, rows: PackedRows, config: ObjectiveConfig) -> Tensor:
    trace = model(rows)
    assert trace.plan is not None
    here = supervised(rows)
    chosen = [int(trace.plan.logits[t].argmax()) for t in here]
    assert len(set(chosen)) > 1 and [c + 1 for c in chosen] == [int(trace.executed[t]) for t in here]
    terms = [-trace.log_prob[t] for t in here]
    for t in here:
        p = trace.plan.logits[t].exp() / trace.plan.logits[t].exp().sum()
        for m in range(DEPTHS):
            terms.append(config.balance_weight * DEPTHS * (chosen.count(m) / len(chosen)) * p[m])
        terms.append(config.z_weight * trace.plan.logits[t].exp().sum().log() ** 2)
    return torch.stack(terms).sum()


@pytest.mark.parametrize(
    ("name", "formula", "options"),
    [
        ("ouro", depth_mean, {}),
        ("ouro", entropy_regularised, {"entropy_weight": 0.7}),
        ("ponder", ponder, {"ponder_weight": 0.8}),
        ("act", act, {"act_weight": 0.6}),
        ("ouro-adaptive", gate_gain, {}),
        ("tah-decider", oracle_labels, {}),
        ("mor-expert", router_auxiliary, {"router_weight": 0.9}),
        ("mor-expert", router_auxiliary, {"router_weight": 0.9, "router_z_weight": 0.4}),
        ("mor-token", router_balance, {"balance_weight": 0.5, "z_weight": 0.3}),
    ],
)
def test_loss_and_gradients_equal_the_formula(name, formula, options):
    model, rows, config = model_of(name), rows_of(), config_of(kind=formula.__name__, **options)
    if name == "act":
        model.get_parameter("decider.gate.weight").data.mul_(4)  # loud: rows halt apart
    loss, _ = TrainingRoot(model, config)(*rows)
    agree(model, loss, formula(model, rows, config))
    if formula in (gate_gain, oracle_labels):
        learning = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
        assert learning == {key for key, _ in model.named_parameters() if key.startswith("decider.")}


def test_auxiliary_and_z_loss_teach_the_router_alone():
    model, rows, found = model_of("mor-expert"), rows_of(), []
    for weight in (0.0, 5.0):
        loss, _ = TrainingRoot(model, config_of(router_weight=weight, router_z_weight=weight))(*rows)
        model.zero_grad()
        loss.backward()
        found.append({key: value.grad for key, value in model.named_parameters()})
    for key in found[0]:
        assert torch.equal(found[0][key], found[1][key]) == (key != "decider.router.weight"), key


TAUGHT = [
    ("standard", None),
    ("ouro", "depth_mean"),
    ("ouro", "entropy_regularised"),
    *((name, None) for name in ("tah2", "tah2-fixed", "ouro-adaptive", "ponder", "act", "tah", "tah-decider")),
    *((name, None) for name in ("mor-expert", "mor-token", "loopus")),
]


@pytest.mark.parametrize(("name", "kind"), TAUGHT)
def test_nll_is_the_readouts_and_loss_is_what_is_minimised(name, kind):
    """Whatever the objective weighs: the losses of all depths, of drawn ones, or of none."""
    model, rows, config = model_of(name), rows_of(), config_of(kind=kind)
    root = TrainingRoot(model, config)
    loss, stats = root(*rows)
    metrics = summarise(root.stat_names, stats)
    with torch.no_grad():
        trace = model(rows, options=LoopOptions(read_depths=ALL_DEPTHS))
    here = supervised(rows)
    assert metrics["loss"] == pytest.approx(loss.item() / len(here), abs=1e-9)
    if name.startswith(("tah2", "mor")):
        last = trace.log_prob  # a mixture, or what the coda makes of rows that stopped apart: tested elsewhere
    else:
        last = torch.full_like(trace.log_prob, torch.nan)
        for ran in trace.depths:
            last[ran.index] = ran.log_prob
    assert metrics["nll"] == pytest.approx(-sum(float(last[t]) for t in here) / len(here), abs=1e-9)


def test_every_objective_is_among_them():
    assert {kind or METHODS[name].objective for name, kind in TAUGHT} == set(OBJECTIVES)


class Unrolled:
    """Passes of a method that sees its own depth only, one after the other, by the model's parts."""

    def __init__(self, model: LoopedLM, rows: PackedRows) -> None:
        self.model, self.rows = model, rows
        self.state, _ = model.start(rows.ids, rows.positions, self.view(), RowKeys(0, rows.example, rows.positions))

    def view(self):
        return TrainingStreams(SAME_DEPTH).view(row_meta(self.rows.sequence, self.rows.positions, 1))

    def run(self, depth: int, u: Tensor) -> tuple[Tensor, Tensor]:
        """The body's output and the state after it."""
        here = torch.full_like(self.rows.ids, depth)
        y, x, _, _ = self.model.run(self.state._replace(u=u), here, self.rows.positions, self.view())
        return y, x

    def log_q(self, x: Tensor) -> Tensor:
        """``[rows, V]``."""
        return self.model.logits(self.model.finish(x, self.rows.positions, self.view())).log_softmax(-1)


def test_loopus_learns_each_drawn_depth_alone():
    """Losses per sequence; every pass starts from a constant, the first one too, so that the prelude never learns."""
    model, rows, draw = model_of("loopus"), rows_of(), Draw(1)
    config = config_of(supervised_depths=2, improvement_weight=0.6)
    loss, _ = TrainingRoot(model, config)(*rows, draw=draw)
    read = sorted(random.Random(1).sample(range(1, DEPTHS + 1), 2))
    assert read == [1, 3], "a drawn depth must follow one that is not"
    by_hand = Unrolled(model, rows)
    terms, before, u = [], {}, by_hand.state.u.detach()
    for depth in range(1, DEPTHS + 1):
        y, x = by_hand.run(depth, u)
        log_q = by_hand.log_q(x)
        for document in (0, 2) if depth in read else ():
            here = [t for t in supervised(rows) if rows.sequence[t] == document]
            mean = torch.stack([-log_q[t, rows.targets[t]] for t in here]).mean()
            cost = mean
            if document in before:
                change = mean - before[document]
                cost = cost + config.improvement_weight * change * torch.sigmoid(change)
            if depth < DEPTHS:
                right = sum(int(log_q[t].argmax()) == int(rows.targets[t]) for t in here) / len(here)
                stop = exit_prob(model, (y - u)[here[-1]])
                cost = cost - right * stop.log() - (1 - right) * (1 - stop).log()
            terms.append(len(here) * cost / len(read))
            before[document] = mean.detach()
        u = x.detach()
    agree(model, loss, torch.stack(terms).sum())


@pytest.mark.parametrize("name", ["huginn", "retrofit", "huginn-post"])
def test_a_drawn_depth_learns_through_its_last_passes(name):
    """k of the passes, each with the update before it, and the prelude through all of these (methods 4.2)."""
    model, rows = model_of(name, axes={"routing": "every_row", "visibility": SAME_DEPTH}), rows_of()
    config = config_of(mean_depth=2.0, gradient_depths=2)
    key = next(key for key in range(100) if draw_depth(2.0, key) == DEPTHS)
    loss, _ = TrainingRoot(model, config)(*rows, draw=Draw(key))
    by_hand = Unrolled(model, rows)
    _, x = by_hand.run(1, by_hand.state.u)
    x = x.detach()
    passed = all_depths(model, rows).depths[0].passed
    for depth in (2, 3):
        _, x = by_hand.run(depth, model.update.enter(passed._replace(x=x, state=by_hand.state)))
    log_q = by_hand.log_q(x)
    agree(model, loss, torch.stack([-log_q[t, rows.targets[t]] for t in supervised(rows)]).sum())


@pytest.mark.parametrize("name", ["huginn-post", "retrofit"])
def test_a_draw_of_one_depth_leaves_no_parameter_without_a_gradient(name):
    model, rows = model_of(name), rows_of()
    key = next(key for key in range(100) if draw_depth(1.0, key) == 1)
    loss, _ = TrainingRoot(model, config_of(mean_depth=1.0))(*rows, draw=Draw(key))
    loss.backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("depths", [2, 3, 4, 5])
def test_capacities_are_shares_of_the_sequence(depths):
    """MoR: recursion m takes the best (N - m + 1)/N of the sequence, rounded down, among those of recursion m - 1; all
    rows compete, supervised or not; of equal ones the earlier wins."""
    lengths = [1, 2, 3, 6, 7, 11]
    rows = random_rows(lengths, supervised=0.3)
    model = tiny_model("mor-expert", depths, threshold=None, num_hidden_layers=6)
    with torch.no_grad():
        for tied in (False, True):
            if tied:
                model.get_parameter("decider.router.weight").zero_()
            trace = model(rows)
            for number, length in enumerate(lengths):
                mine = trace.executed[rows.sequence == number]
                for m in range(2, depths + 1):
                    assert int((mine >= m).sum()) == max(1, length * (depths - m + 1) // depths)
                if tied:
                    assert mine.tolist() == sorted(mine.tolist(), reverse=True)
            for m, ran in enumerate(trace.depths[:-1], start=1):
                for number in range(len(lengths)):
                    here = rows.sequence[ran.index] == number
                    on, off = ran.continue_logit[here & ran.goes_on], ran.continue_logit[here & ~ran.goes_on]
                    assert not len(on) or not len(off) or float(on.min()) >= float(off.max()), m


def test_agreement_of_training_and_decoding_routes_is_reported():
    model, rows = model_of("mor-expert"), rows_of()
    root = TrainingRoot(model, config_of())
    _, stats = root(*rows)
    metrics, trace, agreed = summarise(root.stat_names, stats), model(rows), []
    for depth, ran in enumerate(trace.depths[:-1], start=1):
        by_threshold = ran.continue_logit.sigmoid() > 0.5
        agreed += (by_threshold == ran.goes_on).tolist()
        assert metrics[f"router_agreement/depth_{depth}"] == pytest.approx(
            float((by_threshold == ran.goes_on).double().mean())
        )
    assert metrics["router_agreement"] == pytest.approx(sum(agreed) / len(agreed))
    assert 0.0 < metrics["router_agreement"] < 1.0
    plain = TrainingRoot(model_of("tah2"), config_of())
    assert "router_agreement" not in summarise(plain.stat_names, plain(*rows)[1])


def test_the_last_depth_is_read_alone_however_unlikely_the_target():
    """No floor of another depth's distribution shows through (Ouro, TaH: no mixing)."""
    for name in ("ouro", "tah"):
        model, rows = model_of(name), rows_of()
        with torch.no_grad():
            model.backbone.norm.weight.mul_(60)
            trace = all_depths(model, rows)
            assert float(trace.depths[-1].log_prob.min()) < -30
            assert torch.equal(trace.log_prob, trace.depths[-1].log_prob)
            shallow, deep = (torch.tensor([-1.0, -50.0]), torch.tensor([-60.0, -1e-9]))
            assert torch.equal(model.mix([shallow, deep], []), deep)
