"""Attention mass by depth, against decoding row by row with a dense mask."""

from pathlib import Path

import pytest
import torch

from fathom.evals.attention_mass import AttentionMass, RecordingView, attention_mass, attention_weights
from fathom.evals.forward import forced_trace, routed_trace
from fathom.evals.plots import plot_attention
from fathom.model.attention import TrainingView
from fathom.model.visibility import visible
from support import reference
from support.documents import Listed, random_documents
from support.models import tiny_model

DOCUMENTS = random_documents([9, 13, 6])


class Book:
    """Weights of every (query, key) pair, as they come."""

    def __init__(self, depths: int) -> None:
        self.mass = torch.zeros(depths, depths, 2, 4, dtype=torch.float64)
        self.seen = torch.zeros(depths, depths, dtype=torch.float64)
        self.queries = torch.zeros(depths, dtype=torch.float64)


def recorded(model, monkeypatch: pytest.MonkeyPatch) -> Book:
    """Every row alone, every key in a loop."""
    book = Book(model.method.max_depth)
    plain = reference.DenseView.attend

    def attend(view, layer, q, k, v):
        metas = [*view.earlier, view.rows]
        keys = torch.cat([*view.streams.keys.get(layer, []), k])
        key_depth = torch.cat([meta.depth for meta in metas])
        seen = torch.cat([visible(view.streams.rule, view.rows, meta) for meta in metas], dim=1)[0]
        m = int(view.rows.depth)
        book.queries[m - 1] += layer == 0
        for number in range(len(keys)):
            if seen[number] and layer == 0:
                book.seen[m - 1, int(key_depth[number]) - 1] += 1
        for head in range(4):
            scores = [float(q[0, head] @ keys[number, head // 2]) / 8**0.5 for number in range(len(keys))]
            total = sum(
                torch.exp(torch.tensor(s, dtype=torch.float64)) for s, ok in zip(scores, seen, strict=True) if ok
            )
            for number, score in enumerate(scores):
                if seen[number]:
                    weight = torch.exp(torch.tensor(score, dtype=torch.float64)) / total
                    book.mass[m - 1, int(key_depth[number]) - 1, layer, head] += weight
        return plain(view, layer, q, k, v)

    monkeypatch.setattr(reference.DenseView, "attend", attend)
    with torch.no_grad():
        for number in range(len(DOCUMENTS)):
            reference.decode(model, DOCUMENTS.rows(number))
    return book


@pytest.mark.parametrize("method", ["tah2", "tah2-fixed", "ouro"])
def test_mass_is_that_of_rows_decoded_one_by_one(method: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model(method, 3, threshold=0.4).eval()
    found = attention_mass(model, DOCUMENTS)
    book = recorded(model, monkeypatch)
    assert found.queries == book.queries.tolist() and found.queries[2] > 0
    wanted = book.mass / book.queries[:, None, None, None]
    assert torch.allclose(torch.tensor(found.mass, dtype=torch.float64), wanted, atol=1e-9)
    share = book.seen / book.seen.sum(1, keepdim=True)
    assert torch.allclose(torch.tensor(found.uniform, dtype=torch.float64), share)


def test_mass_sums_to_one_over_the_depths_of_the_keys():
    found = attention_mass(tiny_model("tah2", 3, threshold=0.4), DOCUMENTS)
    assert torch.allclose(torch.tensor(found.mass).sum(1), torch.ones(3, 2, 4), atol=1e-6)
    assert [sum(row) for row in found.uniform] == pytest.approx([1, 1, 1])


def test_layers_that_run_once_count_at_depth_one():
    found = attention_mass(tiny_model("abbie-d", 2, threshold=None, num_hidden_layers=3), DOCUMENTS)
    mass = torch.tensor(found.mass).sum(1)
    assert torch.allclose(mass[0], torch.ones(3, 4), atol=1e-6)
    assert torch.allclose(mass[1, 1], torch.ones(4), atol=1e-6), "the body's layer runs depth 2"
    assert (mass[1, [0, 2]] == 0).all(), "prelude and coda do not"


def test_recording_changes_nothing_and_leaves_no_hook():
    model, rows = tiny_model("tah2", 3).eval(), DOCUMENTS.rows(1)
    with torch.no_grad():
        before = routed_trace(model, rows, 64).log_prob
        attention_mass(model, DOCUMENTS)
        assert torch.equal(routed_trace(model, rows, 64).log_prob, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_documents_are_cut_and_counted():
    model = tiny_model("tah2", 2, threshold=0.0)
    found = attention_mass(model, DOCUMENTS, max_documents=2, max_tokens=5)
    assert (found.queries, found.documents, found.tokens_per_document) == ([10, 10], 2, 5)
    short = Listed([(ids[:5], mask[:5]) for ids, mask in DOCUMENTS.documents[:2]])
    assert found.mass == attention_mass(model, short).mass


def test_a_model_of_one_depth_has_one_column():
    found = attention_mass(tiny_model("standard"), DOCUMENTS)
    assert len(found.mass) == 1 and torch.allclose(torch.tensor(found.mass), torch.ones(1, 1, 2, 4))


def test_weights_that_do_not_give_the_layers_output_are_refused():
    model, rows = tiny_model("tah2", 2).eval(), DOCUMENTS.rows(0)
    with torch.no_grad():
        streams = forced_trace(model, rows, 64).streams
    own = streams.streams[0]
    view = TrainingView("duo_causal", own.meta, [], own)
    q = torch.randn(rows.count, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wrong = RecordingView(view, "root_and_own", record=None)  # pyright: ignore[reportArgumentType]
    view.attend = lambda layer, q, k, v: q * 0 + 5  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match="layer 0: recorded attention weights"):
        wrong.attend(0, q, own.keys[0], own.values[0])


def test_weights_of_grouped_heads_use_their_own_keys():
    keys = torch.eye(2, dtype=torch.float64)[:, None, :].repeat(1, 2, 1) * torch.tensor([1.0, -1.0])[None, :, None]
    q = torch.ones(1, 4, 2, dtype=torch.float64) * torch.tensor([1.0, 0.0])
    weights = attention_weights(q, keys, torch.ones(1, 2, dtype=torch.bool))
    assert (weights[:2, 0, 0] > 0.5).all() and (weights[2:, 0, 0] < 0.5).all()
    assert attention_weights(q, keys, torch.tensor([[True, False]]))[:, 0].tolist() == [[1.0, 0.0]] * 4


def test_the_plot_has_a_panel_for_each_pair(tmp_path: Path):
    mass = [[[[1.0]], [[0.0]]], [[[0.25]], [[0.75]]]]
    svg, png = plot_attention(AttentionMass(mass, [[1.0, 0.0], [0.6, 0.4]], [9, 4], 1, 9), tmp_path)
    assert "depth 2 on depth 1 (60% of keys)" in svg.read_text() and "depth 2 on depth 2 (40%" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    assert (
        "depth 1 on depth 1" in plot_attention(AttentionMass([[[[1.0]]]], [[1.0]], [9], 1, 9), tmp_path)[0].read_text()
    )
