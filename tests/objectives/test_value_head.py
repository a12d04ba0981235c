"""The value head: its loss by hand, when its predictions stand for look-ahead, and that it learns."""

import pytest
import torch
from torch import Tensor, nn

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import LOCAL, OneProcess
from fathom.model.looped import LoopedLM
from fathom.model.rows import PackedRows
from fathom.objectives import labels as labels_module
from fathom.objectives.context import Draw
from fathom.objectives.labels import DepthLabels, Ran, coverage_cut, depth_labels
from fathom.objectives.pool import decide_step
from fathom.objectives.root import TrainingRoot
from fathom.objectives.stats import summarise
from fathom.objectives.value_head import explained_variance, value_sums
from support.models import random_rows, tiny_model

QUARTER = ObjectiveConfig(lookahead_fraction=0.25)
HEAD = ObjectiveConfig(lookahead_fraction=0.25, value_head=0.5)
KEY = 5


@pytest.fixture
def looked_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each look-ahead was asked for."""
    counts: list[int] = []
    real = labels_module.lookahead_log_prob

    def counting(model, trace, rows, depth, chosen, collectives, head_chunk_rows):
        counts.append(int(chosen.sum()))
        return real(model, trace, rows, depth, chosen, collectives, head_chunk_rows)

    monkeypatch.setattr(labels_module, "lookahead_log_prob", counting)
    return counts


def loud_head(root: TrainingRoot) -> dict[str, Tensor]:
    """Random weights for the head, and these by name."""
    assert isinstance(root.helper, nn.Module)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in root.helper.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return {name: p.detach().clone().requires_grad_() for name, p in root.helper.named_parameters()}


def by_hand(weight: dict[str, Tensor], e: Tensor, h: Tensor, target_prob: Tensor) -> Tensor:
    """The predicted gain of one row."""

    def normed(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * weight[f"{name}.weight"]

    streams = torch.cat((normed("norm_embedding", e), normed("norm_hidden", h), target_prob[None]))
    inner = weight["join.weight"] @ streams + weight["join.bias"]
    return (weight["score.weight"] @ (inner * inner.sigmoid()) + weight["score.bias"])[0]


def test_loss_and_gradients_equal_those_written_out_and_the_model_learns_as_without_it():
    """A head that explains nothing is not believed: all rows are measured, the rule is the published one, and the head
    adds alpha_D times its squared error over them."""
    model, rows = tiny_model("tah2", 3), random_rows([26, 15])
    plain, _ = TrainingRoot(model, ObjectiveConfig())(*rows)
    plain.backward()
    without = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    root = TrainingRoot(model, HEAD)
    weight = loud_head(root)
    loss, _ = root(*rows, draw=Draw(KEY))
    loss.backward()

    trace = model(rows)
    error, clipped = torch.zeros((), dtype=torch.float64), 0
    for ran, at in zip(
        trace.depths, depth_labels(Ran(model, trace, rows, ObjectiveConfig(), LOCAL, 1024)), strict=False
    ):
        for place in at.eligible.nonzero()[:, 0].tolist():
            e, h = ran.passed.state.e[place].detach(), ran.hidden[place].detach()
            gain = float(at.gain[place])
            clipped += abs(gain) > 1.0
            error = error + (by_hand(weight, e, h, ran.log_prob[place].exp().detach()) - max(-1, min(1, gain))) ** 2
    assert clipped, "the test needs a gain beyond what decisions weigh"
    error.backward()
    torch.testing.assert_close(loss, plain + 0.05 * error, atol=1e-9, rtol=1e-9)
    for name, parameter in root.helper.named_parameters():
        expected = weight[name].grad
        assert expected is not None
        torch.testing.assert_close(parameter.grad, 0.05 * expected, atol=1e-9, rtol=1e-8)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, without[name], atol=1e-12, rtol=1e-9)


def test_without_it_nothing_is_added():
    model = tiny_model("tah2", 2)
    assert TrainingRoot(model, QUARTER).state_dict().keys() == {f"model.{name}" for name in model.state_dict()}


def whole_and_predicted(model: LoopedLM, rows: PackedRows) -> tuple[list[DepthLabels], list[Tensor]]:
    """Labels with all gains measured, and predictions that are right but for a small error."""
    trace = model(rows)
    whole = depth_labels(Ran(model, trace, rows, ObjectiveConfig(), LOCAL, 1024))
    generator = torch.Generator().manual_seed(1)
    noise = [0.05 * torch.randn(at.gain.shape, generator=generator, dtype=torch.float64) for at in whole]
    return whole, [at.gain.clamp(-1, 1) + each for at, each in zip(whole, noise, strict=True)]


def test_where_it_is_accurate_rows_not_drawn_have_its_gains(looked_ahead):
    """Labels, costs, cut and balance from a loop; only the drawn share of the stopped rows is looked ahead."""
    model, rows = tiny_model("tah2", 2), random_rows([150])
    trace = model(rows)
    whole, predicted = whole_and_predicted(model, rows)
    looked_ahead.clear()
    at = depth_labels(Ran(model, trace, rows, HEAD, LOCAL, 1024, KEY, predicted))[0]
    drawn = depth_labels(Ran(model, trace, rows, QUARTER, LOCAL, 1024, KEY))[0].eligible
    on = trace.depths[0].goes_on
    assert looked_ahead[0] == int((drawn & ~on).sum()) < 0.4 * int((rows.supervised & ~on).sum())
    assert torch.equal(at.measured, drawn) and torch.equal(at.eligible, rows.supervised)
    assert torch.equal(at.supervised, rows.supervised) and drawn[on & rows.supervised].all()

    gains = {
        t: float((whole[0].gain if drawn[t] else predicted[0])[t]) for t in rows.supervised.nonzero()[:, 0].tolist()
    }
    cut = coverage_cut(torch.tensor(list(gains.values()), dtype=torch.float64), 0.99)
    assert cut is not None
    assert at.cut == pytest.approx(cut, abs=1e-12)
    go = [t for t in gains if gains[t] >= cut]
    assert at.label.nonzero()[:, 0].tolist() == go and any(not drawn[t] for t in go)
    assert at.balance == pytest.approx((len(gains) - len(go)) / len(go))
    for t, gain in gains.items():
        assert at.gain[t].item() == pytest.approx(gain, abs=1e-12)
        assert at.cost[t].item() == pytest.approx(min(max(abs(gain - cut), 1e-6), 1.0), rel=1e-6)


def test_where_it_is_wrong_on_the_drawn_rows_the_rest_is_measured_too(looked_ahead):
    """Right on the rest alone does not count: nobody could know."""
    model, rows = tiny_model("tah2", 3), random_rows([60, 30])
    trace = model(rows)
    whole, predicted = whole_and_predicted(model, rows)
    drawn = depth_labels(Ran(model, trace, rows, QUARTER, LOCAL, 1024, KEY))[0].measured
    predicted[0][drawn] += 1.0
    looked_ahead.clear()
    labels = depth_labels(Ran(model, trace, rows, HEAD, LOCAL, 1024, KEY, predicted))
    stopped = rows.supervised & ~trace.depths[0].goes_on
    assert 0 < looked_ahead[0] < int(stopped.sum()) and sum(looked_ahead[:2]) == int(stopped.sum())
    assert torch.equal(labels[0].measured, labels[0].eligible)
    for name in ("supervised", "eligible", "gain", "label", "cost", "balance", "cut"):
        torch.testing.assert_close(getattr(labels[0], name), getattr(whole[0], name))


@pytest.mark.parametrize("bound", [-1e9, 0.5], ids=["believed", "not believed"])
def test_labels_of_a_whole_step_use_it_too(bound):
    """A step of one micro-batch: measured first and labelled then, or all at once."""
    root = TrainingRoot(tiny_model("tah2", 3), HEAD.model_copy(update={"value_head": bound}))
    loud_head(root)
    rows, draw = random_rows([26, 15]), Draw(KEY)
    found = []
    for given in ({}, decide_step(root, [(rows, draw)], root.config, LOCAL)[0]._asdict()):
        root.zero_grad()
        loss, stats = root(*rows, draw=draw, **given)
        loss.backward()
        found.append(torch.cat([loss[None].detach(), stats, *(p.grad.flatten() for p in root.parameters())]))
    torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=1e-9)


class WithAnotherRank(OneProcess):
    """Pools sums with those of a rank whose drawn rows are many, and all foreseen."""

    theirs = value_sums(torch.linspace(-1, 1, 10_000), torch.linspace(-1, 1, 10_000))

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor + self.theirs if tensor.shape == self.theirs.shape else tensor


def test_all_ranks_decide_together_whether_to_believe_it():
    model, rows = tiny_model("tah2", 2), random_rows([60])
    trace = model(rows)
    wrong = [torch.ones(rows.count, dtype=torch.float64)]
    alone = depth_labels(Ran(model, trace, rows, HEAD, LOCAL, 1024, KEY, wrong))[0]
    together = depth_labels(Ran(model, trace, rows, HEAD, WithAnotherRank(), 1024, KEY, wrong))[0]
    assert torch.equal(alone.measured, rows.supervised)
    assert int(together.measured.sum()) < int(rows.supervised.sum())


def test_explained_variance():
    gain = torch.tensor([-3.0, 0.5, 0.25, -0.25])
    clipped = gain.clamp(-1, 1).double()
    assert explained_variance(value_sums(clipped, gain)) == pytest.approx(1.0)
    assert explained_variance(value_sums(torch.full_like(clipped, clipped.mean().item()), gain)) == pytest.approx(0.0)
    halves = [value_sums(torch.zeros(2), part) for part in (gain[:2], gain[2:])]
    expected = 1 - float(clipped.square().sum() / ((clipped - clipped.mean()) ** 2).sum())
    assert explained_variance(halves[0] + halves[1]) == pytest.approx(expected)
    for nothing in (gain[:0], gain[:1], torch.full((5,), 0.3)):
        assert explained_variance(value_sums(nothing, nothing)) == 0.0


def test_it_learns_and_then_fewer_rows_are_looked_ahead():
    """All learn together; every token says what follows."""
    root = TrainingRoot(tiny_model("tah2", 2, dtype=torch.float32, vocab_size=12), HEAD)
    optimizer = torch.optim.AdamW(root.parameters(), lr=1e-2)
    total = torch.zeros(60, len(root.stat_names), dtype=torch.float64)
    for step in range(len(total)):
        rows = random_rows([80], vocab=12, seed=step)
        rows = rows._replace(targets=(5 * rows.ids + 1) % 12)
        loss, total[step] = root(*rows, draw=Draw(step))
        (loss / rows.supervised.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    first, *_, last = [summarise(root.stat_names, part.sum(0)) for part in total.split(10)]
    assert first["value_explained/depth_1"] < 0.2 and last["value_explained/depth_1"] > 0.5
    assert first["lookahead_share"] > 0.9 and last["lookahead_share"] < 0.6
