"""Every method: level-synchronous training against token-by-token decoding, causality, gradients on every parameter."""

from typing import Any

import pytest
import torch

from fathom.model.levels import ALL_DEPTHS, LoopOptions, Trace
from fathom.model.looped import LoopedLM
from fathom.model.methods import METHODS
from fathom.model.routing import LikeliestToken
from fathom.model.rows import PackedRows
from support.models import document, random_rows, tiny_model
from support.reference import decode

LOOPED = [name for name in METHODS if name != "standard"]
# Depths at which decoding routes mix on random weights; where a rule needs another dial than the preset's.
DIALS: dict[str, dict[str, Any]] = {
    "ponder": {"threshold": 0.2},
    "act": {"threshold": 0.3},
    "ouro-adaptive": {"threshold": 0.2},
    "tah": {"threshold": 0.00455},
    "tah-decider": {"threshold": 0.00455},
    "huginn": {"axes": {"routing": "state_change"}, "threshold": 0.9},
}
# Rules that compare the distributions of consecutive passes, where these are the head's own and behind a coda.
COMPARING: dict[str, tuple[str, dict[str, Any]]] = {
    "divergence, coda": ("huginn", {"axes": {"routing": "divergence"}, "threshold": 0.7}),
    "entropy, coda": ("huginn", {"axes": {"routing": "entropy_change"}, "threshold": 0.2}),
    "token, coda": ("abbie-d", {"axes": {"routing": "likeliest_token", "visibility": "latest"}, "threshold": 0.6}),
    "divergence": ("tah2", {"axes": {"routing": "divergence"}, "threshold": 0.6}),
    "divergence, states": ("act", {"axes": {"routing": "divergence"}, "threshold": 0.6}),
    "entropy, logits": ("tah", {"axes": {"routing": "entropy_change", "training_routing": None}, "threshold": 0.5}),
}
CASES = [*LOOPED, *COMPARING]


def model_of(name: str, **changes: Any) -> LoopedLM:
    """Six layers, up to three depths, random weights; of a preset or a case of ``COMPARING``."""
    preset, dials = COMPARING.get(name, (name, DIALS.get(name, {})))
    return tiny_model(preset, 3, **({"threshold": None, "num_hidden_layers": 6} | dials | changes))


def rows_of(*lengths: int, seed: int = 0) -> PackedRows:
    rows = random_rows(list(lengths), seed=seed)
    oracle = torch.randint(1, 4, (rows.count,), generator=torch.Generator().manual_seed(seed + 1))
    return rows._replace(oracle=oracle)


def assert_close(got: torch.Tensor, want: torch.Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_level_synchronous_equals_token_by_token(name: str) -> None:
    """T2 with the decoding rule's own routes, noise and missing keys."""
    model = model_of(name).eval()
    rows = rows_of(11, 8)
    with torch.no_grad():
        trace, slow = model(rows), decode(model, rows)
    assert torch.equal(trace.executed, slow["executed"])
    assert_close(trace.log_prob, slow["log_prob"])
    for number, ran in enumerate(trace.depths):
        if ran.head is not None:
            assert_close(ran.log_prob, slow["single"][ran.index, number])
        if ran.continue_logit is not None:
            assert_close(ran.continue_logit.sigmoid(), slow["gates"][ran.index, number])
    fixed = model.method.routing == "every_row"
    assert len(trace.executed.unique()) == 1 if fixed else len(trace.executed.unique()) > 1, "the test must mix depths"


@pytest.mark.parametrize("name", CASES)
def test_equality_holds_for_scripted_routes(name: str) -> None:
    """T2 with gaps in every stream, whatever the method's own rule would do."""
    model = model_of(name)
    rows = rows_of(9, 12)
    routes = torch.randint(1, 4, (rows.count,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        trace, slow = model(rows, options=LoopOptions(routes=routes)), decode(model, rows, routes)
    assert torch.equal(trace.executed, routes)
    assert_close(trace.log_prob, slow["log_prob"])


@pytest.mark.parametrize("name", CASES)
def test_a_document_is_the_same_packed_or_alone(name: str) -> None:
    """Also its noise and its random decisions, which are keyed by example and position."""
    model = model_of(name)
    rows = rows_of(10, 7, 9)
    with torch.no_grad():
        together = model(rows)
        for number in range(3):
            mine = rows.sequence == number
            alone = model(document(rows, number))
            assert torch.equal(alone.executed, together.executed[mine])
            assert_close(alone.log_prob, together.log_prob[mine])


@pytest.mark.parametrize("name", CASES)
def test_later_tokens_change_nothing_earlier(name: str) -> None:
    """T3, with the decoding rule (a top-k over the sequence is not causal, which is why MoR decodes by threshold)."""
    model = model_of(name).eval()
    rows = rows_of(20)
    changed = rows.ids.clone()
    changed[12:] = (changed[12:] + 1) % 97
    with torch.no_grad():
        before, after = model(rows), model(rows._replace(ids=changed))
    assert torch.equal(before.executed[:12], after.executed[:12])
    assert_close(before.log_prob[:11], after.log_prob[:11], 1e-12)
    assert not torch.allclose(before.log_prob[12:], after.log_prob[12:])


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_a_gradient_also_where_nobody_has_rows(name: str) -> None:
    """What sharded collectives need: the same parameters take part on a rank that holds nothing."""
    model = model_of(name)
    for rows in (rows_of(9), random_rows([])):
        model.zero_grad()
        trace: Trace = model(rows, options=LoopOptions(read_depths=ALL_DEPTHS))
        (trace.log_prob.sum() + trace.keep_alive).backward()
        assert [key for key, value in model.named_parameters() if value.grad is None] == []
        assert all(bool(value.grad.isfinite().all()) for value in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_checkpointing_changes_no_gradient(name: str) -> None:
    """T13."""
    rows, found = rows_of(13), []
    for checkpointing in (False, True):
        model = model_of(name)
        trace = model(rows, options=LoopOptions(checkpointing=checkpointing))
        (trace.log_prob.sum() + trace.keep_alive).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        assert_close(plain, recomputed, 1e-12)


def test_probed_depths_are_what_stopping_there_would_give() -> None:
    """Methods that read once, after the coda: each depth's own loss equals a model of that many depths."""
    for name in ("abbie-d", "huginn-post", "loopus"):
        model = model_of(name)
        rows = rows_of(12)
        with torch.no_grad():
            probed = model(rows, options=LoopOptions(read_depths=ALL_DEPTHS))
            for depth in (1, 2, 3):
                assert_close(
                    probed.depths[depth - 1].log_prob, model(rows, options=LoopOptions(max_depth=depth)).log_prob
                )


@pytest.mark.parametrize("name", ["abbie-c", "abbie-d", "huginn-post"])
def test_one_pass_is_the_plain_stack(name: str) -> None:
    """T1 of methods whose first pass is the base model."""
    model, plain = model_of(name), tiny_model("standard", 1, num_hidden_layers=6)
    plain.load_state_dict(model.state_dict(), strict=False)
    rows = rows_of(14)
    with torch.no_grad():
        assert_close(model(rows, options=LoopOptions(max_depth=1)).log_prob, plain(rows).log_prob, 1e-12)


@pytest.mark.parametrize(
    ("name", "axes"), [("abbie-d", {"update": "residual_literal"}), ("0pt", {}), ("loopus", {}), ("mor-expert", {})]
)
def test_one_pass_of_the_others_is_not(name: str, axes: dict[str, str]) -> None:
    """Where the papers' one-pass form differs from the base model it must not be equal by accident."""
    model, plain = model_of(name, axes=axes), tiny_model("standard", 1, num_hidden_layers=6)
    plain.load_state_dict(model.state_dict(), strict=False)
    rows = rows_of(14)
    with torch.no_grad():
        once = model(rows, options=LoopOptions(max_depth=1)).log_prob
        assert not torch.allclose(once, plain(rows).log_prob, atol=1e-3)


@pytest.mark.parametrize("method", ["tah2", "ouro", "abbie-d"])
def test_a_trained_depth_is_no_limit(method: str) -> None:
    """Depths above and below the method's own M: the shallower passes are the same."""
    model = model_of(method)
    rows = rows_of(15)
    with torch.no_grad():
        deep = model(rows, options=LoopOptions(max_depth=12, routes=torch.full_like(rows.ids, 12)))
        assert len(deep.depths) == 12 and int(deep.executed.max()) == 12
        assert len(model(rows, options=LoopOptions(max_depth=2)).depths) <= 2
        shallow = model(rows, options=LoopOptions(routes=torch.full_like(rows.ids, 3)))
        for one, other in zip(shallow.depths, deep.depths, strict=False):
            assert_close(one.hidden, other.hidden, 1e-12)


def test_truncated_backprop_stops_where_it_says() -> None:
    """Gradients through the last passes equal those of a run whose earlier states are constants."""
    model, rows = model_of("huginn-post"), rows_of(10)
    trace = model(rows, options=LoopOptions(constant_depths=2))
    weight = dict(model.named_parameters())["backbone.layers.2.mlp.down_proj.weight"]
    trace.log_prob.sum().backward()
    assert weight.grad is not None
    got = weight.grad.clone()
    model.zero_grad()
    full = model(rows)
    assert_close(full.log_prob, trace.log_prob, 1e-12)
    full.log_prob.sum().backward()
    assert not torch.allclose(got, weight.grad)
    model.zero_grad()
    # By hand: the state after two passes is a constant; one pass more with a gradient.
    from fathom.model.attention import TrainingStreams
    from fathom.model.state import RowKeys
    from fathom.model.visibility import SAME_DEPTH, row_meta

    meta = row_meta(rows.sequence, rows.positions, 1)

    def view() -> Any:
        return TrainingStreams(SAME_DEPTH).view(meta)

    state, _ = model.start(rows.ids, rows.positions, view(), RowKeys(0, rows.example, rows.positions))
    with torch.no_grad():
        u = state.u
        for _ in range(2):
            x, _ = model.backbone.body(u, rows.positions, view())
            u = model.update.enter(full.depths[0].passed._replace(x=x, state=state))
    x, _ = model.backbone.body(u, rows.positions, view())
    hidden = model.finish(x, rows.positions, view())
    model.read_out(hidden, rows.targets, 0, 64).log_prob.sum().backward()
    assert_close(got, weight.grad, 1e-10)


def test_exploration_sends_a_share_of_the_stopped_on() -> None:
    model, rows = model_of("tah2", threshold=1.0), random_rows([2000])
    with torch.no_grad():
        assert int(model(rows).executed.max()) == 1
        explored = model(rows, options=LoopOptions(explore=0.1)).executed
    assert float((explored > 1).double().mean()) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("name", ["act", "mor-expert"])
def test_probed_depths_of_rows_that_stop_apart(name: str) -> None:
    """What stopping there would give also where states are weighted, and where others stopped before."""
    model, rows = model_of(name), rows_of(9, 6)
    routes = torch.arange(rows.count) % 3 + 1
    with torch.no_grad():
        probed = model(rows, options=LoopOptions(read_depths=ALL_DEPTHS, routes=routes))
        for depth in (1, 2, 3):
            ran = probed.depths[depth - 1]
            stopped = model(rows, options=LoopOptions(routes=routes.clamp_max(depth)))
            assert_close(ran.log_prob, stopped.log_prob[ran.index])


def test_a_plan_ends_where_the_forward_does() -> None:
    """MoR with token choice: the last pass of a row, planned or cut, brings the first input back."""
    model, rows = model_of("mor-token"), rows_of(16)
    with torch.no_grad():
        cut = model(rows, options=LoopOptions(max_depth=2))
        assert cut.plan is not None and int(cut.plan.depth.max()) == 3
        last = cut.depths[1]
        y, state = last.passed.y, last.passed.state
        assert_close(last.passed.x, state.gate[:, None] * y + state.z)
        forced = model(rows, options=LoopOptions(routes=torch.full_like(rows.ids, 3)))
        for ran, back in zip(forced.depths, (0.0, 0.0, 1.0), strict=True):
            assert_close(ran.passed.x, ran.passed.state.gate[:, None] * ran.passed.y + back * ran.passed.state.z)


def test_loopus_trains_every_pass_and_stops_where_it_is_confident() -> None:
    """Methods 9.3: stop at sigma(q) of 0.6, q a linear head on the change before the gate."""
    model, rows = model_of("loopus"), rows_of(40)
    with torch.no_grad():
        assert set(model(rows).executed.tolist()) == {3}
        trace = model.eval()(rows)
        gate = dict(model.named_parameters())
        for number, ran in enumerate(trace.depths):
            change = ran.passed.y - ran.passed.state.u
            q = change @ gate["decider.gate.weight"][0] + gate["decider.gate.bias"]
            sure = 1 / (1 + torch.exp(-q)) >= 0.6
            assert torch.equal(ran.goes_on, ~sure if number < 2 else torch.zeros_like(sure))
            assert number == 2 or bool(sure.any() and not sure.all())


@pytest.mark.parametrize("rule", ["divergence", "entropy_change", "likeliest_token"])
def test_a_coda_in_every_pass_reads_what_a_coda_at_the_end_does(rule: str) -> None:
    """Where all rows run one depth: trained at fixed depth without a comparison, decoded with one that never stops."""
    model, rows = model_of("huginn", axes={"routing": rule, "training_routing": "every_row"}, threshold=0.0), rows_of(9)
    with torch.no_grad():
        trained, decoded = model(rows), model.eval()(rows)
    assert trained.depths[0].head is None and decoded.depths[0].head is not None
    assert set(decoded.executed.tolist()) == {3}
    assert_close(decoded.log_prob, trained.log_prob, 1e-12)


def test_a_likeliest_token_counts_the_passes_that_left_it() -> None:
    """The first pass has nothing before it, not even token 0."""
    memory, found = torch.zeros(2, 2), []
    for tokens in ([0, 3], [0, 3], [0, 2], [0, 2], [0, 3], [0, 3]):
        log_probs = torch.zeros(2, 4).index_put((torch.arange(2), torch.tensor(tokens)), torch.ones(2))
        change, memory = LikeliestToken().compare(log_probs.log_softmax(-1), torch.empty(2, 1), memory, lambda x: x)
        found.append(change)
    want = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 1, 2, 1, 2]]).T
    assert_close(torch.stack(found), 1 / want, 1e-7)
    assert found[-1][0] < 0.17 < found[-2][0], "stops at five"
