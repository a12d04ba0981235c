"""T16 and T17: the paper's 1.7B constants and parameter counts, and torch's own counter on every method."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fathom.model import attention, levels
from fathom.model.config import read_config
from fathom.model.decider import Decider
from fathom.model.flops import decode_flops, forward_flops, row_flops
from fathom.model.levels import Trace
from fathom.model.methods import make_method
from fathom.model.rows import PackedRows
from fathom.model.updater import Updater
from fathom.model.visibility import RowMeta, row_meta, visible, visible_count
from model.test_methods import CASES, model_of
from support.models import random_rows, tiny_model, tiny_source

QWEN_1_7B = tiny_source(
    "qwen3",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)


def test_constants_of_the_papers_model():
    cost = row_flops(read_config(QWEN_1_7B, "1.7B"), make_method("tah2"))
    figures = [cost.backbone, cost.head, cost.update, cost.decider, cost.pair]
    published = [2.819, 0.622, 0.042, 0.050, 2.29e-4]
    last_digit = [1e-3, 1e-3, 1e-3, 1e-3, 1e-6]
    for figure, value, unit in zip(figures, published, last_digit, strict=True):
        assert figure / 1e9 == pytest.approx(value, abs=unit / 2)


@pytest.mark.parametrize(("part", "millions"), [(Updater, 20.98), (partial(Decider, max_depth=2), 25.18)])
def test_parameter_counts(part, millions):
    with torch.device("meta"):
        made = part(2048)
    assert sum(p.numel() for p in made.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)


def test_decode_closed_form_of_tah2():
    config = read_config(tiny_source(), "tiny")
    method = make_method("tah2", 3, 0.5)
    prompt, depths = [1, 2, 3], [2, 1, 3]
    cost = row_flops(config, make_method("tah2", 3))
    total = 0.0
    for t, depth in enumerate(depths):
        for m in range(1, depth + 1):
            keys = sum(min(r, m) for r in prompt) + sum(min(r, m) for r in depths[:t]) + m
            total += cost.backbone + cost.head + keys * cost.pair
        total += (depth - 1) * cost.update + min(depth, 2) * cost.decider
    assert decode_flops(config, method, prompt, depths) == pytest.approx(total)


def test_decode_closed_forms_of_standard_and_fixed():
    config = read_config(tiny_source(), "tiny")
    cost = row_flops(config, make_method("tah2"))
    standard = sum(cost.backbone + cost.head + cost.pair * (4 + t) for t in (1, 2, 3))
    assert decode_flops(config, make_method("standard", 1, 0.5), [1] * 4, [1] * 3) == pytest.approx(standard)
    fixed = sum(
        2 * (cost.backbone + cost.head) + cost.update + cost.pair * sum(4 + t - 1 + m for m in (1, 2))
        for t in (1, 2, 3)
    )
    assert decode_flops(config, make_method("tah2-fixed", 2, 0.5), [1] * 4, [2] * 3) == pytest.approx(fixed)


def test_forward_counts_every_pass():
    model = tiny_model("tah2", max_depth=3)
    rows = random_rows([12, 9])
    trace = model(rows)
    counts = [float(len(depth.index)) for depth in trace.depths]
    assert len(counts) == 3
    assert forward_flops(model.config, model.method, counts, [10.0, 5.0, 2.0]) == pytest.approx(
        sum(counts) * (row_flops(model.config, model.method).backbone + row_flops(model.config, model.method).head)
        + 17 * row_flops(model.config, model.method).pair
        + sum(counts[1:]) * row_flops(model.config, model.method).update
        + sum(counts[:2]) * row_flops(model.config, model.method).decider
    )


class VisiblePairs:
    """Attention that computes what a row sees and nothing else, in products that the counter knows."""

    def __init__(self, rule: str, rows: RowMeta, earlier: list[RowMeta], isolated: bool) -> None:
        self.seen = torch.cat([visible(rule, rows, meta) for meta in (*earlier, rows)], dim=1)

    def __call__(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        groups = q.shape[1] // keys[0].shape[1]
        key, value = (torch.cat(parts).repeat_interleave(groups, 1).transpose(0, 1) for parts in (keys, values))
        out = []
        for query, seen in zip(q, self.seen, strict=True):
            scores = torch.bmm(query[:, None, :], key[:, seen].transpose(1, 2)) / q.shape[-1] ** 0.5
            out.append(torch.bmm(scores.softmax(-1), value[:, seen])[:, 0])
        return torch.stack(out)


def counts_of(trace: Trace, rows: PackedRows, rule: str) -> tuple[list[float], list[float]]:
    """How many rows ran each depth, and the pairs that attention computed there."""
    metas, pairs = [], []
    for m, ran in enumerate(trace.depths, start=1):
        meta = row_meta(rows.sequence[ran.index], rows.positions[ran.index], m)
        metas.append(meta._replace(last=torch.where(ran.goes_on, meta.last, meta.depth)))
        pairs.append(float(visible_count(rule, metas[-1], metas)))
    return [float(len(ran.index)) for ran in trace.depths], pairs


@pytest.mark.parametrize("training", [True, False], ids=["training", "decoding"])
@pytest.mark.parametrize("name", ["standard", *CASES])
def test_the_formula_is_torchs_count(name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, for a forward over mixed depths.

    Two things are kept apart. The one row that runs through the added parts so that each has a gradient is no work of
    the method. Torch does not count `embedding_bag`, the mean of TaH's 100 likeliest embeddings; the formula does.
    """
    monkeypatch.setattr(attention, "TiledKernel", VisiblePairs)
    monkeypatch.setattr(levels._Levels, "_touch_added", lambda self, first: first.survival.new_zeros(()))
    model = model_of(name).train(training)
    rows = random_rows([9, 6])
    oracle = torch.randint(1, 4, (rows.count,), generator=torch.Generator().manual_seed(1))
    rows = rows._replace(oracle=oracle)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        trace = model(rows)
    counts, pairs = counts_of(trace, rows, model.method.visibility)
    assert name == "standard" or (len(counts) > 1 and sum(counts[1:]) > 0)
    want = forward_flops(model.config, model.method, counts, pairs, training)
    if model.update.top_k:
        want -= sum(counts[1:]) * model.update.flops
    assert counter.get_total_flops() == want
