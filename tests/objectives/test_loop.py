"""The level-synchronous loop against token-by-token decoding, causality, mixtures and their gradients."""

import pytest
import torch

from fathom.model.levels import LoopOptions
from fathom.model.readout import READOUTS, mix
from fathom.model.rows import pack_documents
from support.models import random_rows, tiny_model
from support.reference import decode

STEP = 1e-7  # small: the sorted top-k has a kink wherever two probabilities change places
METHODS = [("standard", 1), ("tah2", 2), ("tah2", 4), ("tah2-fixed", 3)]


@pytest.mark.parametrize(("method", "max_depth"), METHODS)
def test_training_forward_equals_token_by_token_decoding(method, max_depth):
    """T2, with the exit rule's own routes."""
    model = tiny_model(method, max_depth, "qwen3")
    rows = random_rows([23])
    trace, slow = model(rows), decode(model, rows)
    assert torch.equal(trace.executed, slow["executed"])
    torch.testing.assert_close(trace.log_prob, slow["log_prob"], atol=1e-10, rtol=0)
    if method == "tah2":
        assert len(trace.executed.unique()) == max_depth, "the test needs every depth"
        assert not torch.equal(trace.executed, torch.full_like(trace.executed, max_depth))
    for number, depth in enumerate(trace.depths):
        torch.testing.assert_close(depth.log_prob, slow["single"][depth.index, number], atol=1e-10, rtol=0)
        if depth.continue_logit is not None:
            torch.testing.assert_close(
                depth.continue_logit.sigmoid(), slow["gates"][depth.index, number], atol=1e-10, rtol=0
            )


@pytest.mark.parametrize("method", ["tah2", "tah2-fixed"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equality_holds_for_scripted_random_routes(method, seed):
    """T2, routes forced, gaps in every stream."""
    model = tiny_model(method, 4)
    rows = random_rows([15, 9], seed=seed)
    routes = torch.randint(1, 5, (rows.count,), generator=torch.Generator().manual_seed(seed))
    trace, slow = model(rows, options=LoopOptions(routes=routes)), decode(model, rows, routes)
    assert torch.equal(trace.executed, routes)
    torch.testing.assert_close(trace.log_prob, slow["log_prob"], atol=1e-10, rtol=0)


def test_fixed_runs_all_depths_for_supervised_rows_and_one_for_the_rest():
    model = tiny_model("tah2-fixed", 3)
    rows = random_rows([20])
    assert torch.equal(model(rows).executed, torch.where(rows.supervised, 3, 1))


@pytest.mark.parametrize(("method", "max_depth"), METHODS)
def test_later_tokens_change_nothing_earlier(method, max_depth):
    """T3."""
    model = tiny_model(method, max_depth)
    rows = random_rows([30])
    changed = rows.ids.clone()
    changed[20:] = (changed[20:] + 1) % 97
    before, after = model(rows), model(rows._replace(ids=changed))
    assert torch.equal(before.executed[:20], after.executed[:20])
    for old, new in zip(before.depths, after.depths, strict=False):
        keep_old, keep_new = old.index < 20, new.index < 20
        torch.testing.assert_close(old.hidden[keep_old], new.hidden[keep_new], atol=1e-12, rtol=0)
        torch.testing.assert_close(old.log_prob[keep_old], new.log_prob[keep_new], atol=1e-12, rtol=0)
    assert not torch.allclose(before.depths[0].hidden[20:], after.depths[0].hidden[20:])


@pytest.mark.parametrize("readout", ["stop_mass", "uniform", "last_depth"])
@pytest.mark.parametrize("depths", [1, 2, 5])
def test_mixture_weights_are_a_distribution(readout, depths):
    """T7: the mixture is a probability distribution, and equals the brute-force sum of probabilities."""
    torch.manual_seed(depths)
    log_probs = [torch.randn(11).double().log_softmax(-1) for _ in range(depths)]
    gates = [torch.rand(()).double() for _ in range(depths - 1)]
    mixed = mix(READOUTS[readout], log_probs, gates)
    assert mixed.exp().sum().item() == pytest.approx(1.0, abs=1e-9)
    if readout == "stop_mass":
        weights, left = [], 1.0
        for gate in gates:
            weights.append(left * (1 - gate))
            left = left * gate
        weights.append(left)
    elif readout == "uniform":
        weights = [1 / depths] * depths
    else:
        weights = [0.0] * (depths - 1) + [1.0]
    brute = sum(w * lp.exp() for w, lp in zip(weights, log_probs, strict=True))
    torch.testing.assert_close(mixed.exp(), brute, atol=1e-8, rtol=0)


def test_a_token_that_stops_at_depth_one_is_the_base_model_whatever_its_gate():
    model = tiny_model("tah2", 2)
    rows = random_rows([30])
    trace = model(rows)
    stopped = trace.executed == 1
    assert stopped.any()
    assert torch.equal(trace.log_prob[stopped], trace.depths[0].log_prob[stopped])


def test_gate_gradient_of_the_language_model_loss():
    """T8: d(-log q)/dg = -(q2 - q1)/q for two-depth tokens, by autograd and numerically; zero for depth-1 tokens."""
    model = tiny_model("tah2", 2)
    rows = random_rows([24])
    trace = model(rows)
    logit = trace.depths[0].continue_logit
    gradient = torch.autograd.grad(-trace.log_prob.sum(), logit, retain_graph=True)[0]
    g = logit.sigmoid()
    per_gate = gradient / (g * (1 - g))
    two = trace.executed == 2
    assert two.any() and (~two).any()
    assert torch.equal(gradient[~two], torch.zeros_like(gradient[~two]))
    q1, q2 = trace.depths[0].log_prob[two].exp(), trace.depths[1].log_prob.exp()
    q = trace.log_prob[two].exp()
    # Only the direct path: depth 2 does not read the gate, so the whole derivative is the mixture's.
    torch.testing.assert_close(per_gate[two], -(q2 - q1) / q, atol=1e-9, rtol=1e-9)
    step = 1e-6
    numeric = (-torch.log((1 - g[two] - step) * q1 + (g[two] + step) * q2) + torch.log(q)) / step
    torch.testing.assert_close(per_gate[two], numeric, atol=1e-4, rtol=1e-4)


def test_every_parameter_gradient_is_right_numerically():
    """Finite differences through both depths, the updater, the decider and the tied table, routes fixed."""
    model = tiny_model("tah2", 3)
    rows = random_rows([10, 6])
    routes = torch.tensor([1, 2, 3] * 5 + [3])

    def loss() -> torch.Tensor:
        return -model(rows, options=LoopOptions(routes=routes)).log_prob[rows.supervised].sum()

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            assert parameter.grad is not None, name
            expected = (parameter.grad * direction).sum()
            parameter.add_(STEP * direction)
            up = loss()
            parameter.sub_(2 * STEP * direction)
            down = loss()
            parameter.add_(STEP * direction)
        assert ((up - down) / (2 * STEP)).item() == pytest.approx(expected.item(), rel=2e-4, abs=2e-5), name


@pytest.mark.parametrize(("method", "max_depth"), METHODS)
def test_activation_checkpointing_changes_no_gradient(method, max_depth):
    """T13: catches cut graphs and keys stored twice."""
    model = tiny_model(method, max_depth)
    rows = random_rows([14, 11])
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        trace = model(rows, options=LoopOptions(checkpointing=checkpointing))
        (-trace.log_prob[rows.supervised].sum() + trace.keep_alive).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert all(len(stream.keys) == 2 for stream in trace.streams.streams)
    for name, plain in gradients[0].items():
        torch.testing.assert_close(plain, gradients[1][name], atol=1e-12, rtol=1e-9)


def test_no_rows_at_all():
    model = tiny_model("tah2", 3)
    trace = model(pack_documents([]))
    assert trace.log_prob.shape == (0,) and len(trace.depths) == 1
    trace.keep_alive.backward()
    assert all(p.grad is not None for p in model.parameters())
