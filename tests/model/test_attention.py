"""Tiled attention to streams against the dense mask made from the predicate."""

import pytest
import torch

from fathom.model import tiled
from fathom.model.attention import TrainingStreams
from fathom.model.flex import FlexKernel
from fathom.model.visibility import GOES_ON, RULES, row_meta, visible, visible_count
from support.reference import DenseStreams


def ragged(lengths, share, seed):
    """Rows of three depths: each depth keeps a random part of the one before."""
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    position = torch.cat([torch.arange(n) for n in lengths])
    metas = []
    for depth in (1, 2, 3):
        metas.append(row_meta(sequence, position, depth))
        keep = torch.rand(sequence.shape, generator=generator) < share
        keep[0] = True
        metas[-1] = metas[-1]._replace(last=torch.where(keep, GOES_ON, depth))
        sequence, position = sequence[keep], position[keep]
    return metas


def qkv(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tile", [3, 256])
def test_tiles_equal_the_dense_mask(rule, tile, monkeypatch):
    monkeypatch.setattr(tiled, "QUERY_TILE", tile)
    fast, slow = TrainingStreams(rule), DenseStreams(rule)
    for depth, meta in enumerate(ragged([9, 1, 14], 0.6, seed=4)):
        q, k, v = qkv(len(meta.sequence), depth)
        ours, oracle = fast.view(meta), slow.view(meta)
        torch.testing.assert_close(ours.attend(0, q, k, v), oracle.attend(0, q, k, v), atol=1e-12, rtol=0)
        ours.commit(0, k, v)
        oracle.commit(0, k, v)


def test_lookahead_rows_see_the_main_pass_and_themselves():
    metas = ragged([12, 7], 0.5, seed=2)
    streams = TrainingStreams("duo_causal")
    stored = []
    for depth, meta in enumerate(metas[:2]):
        q, k, v = qkv(len(meta.sequence), depth)
        view = streams.view(meta)
        view.commit(0, k, v)
        stored.append((meta, k, v))
    went = {(int(s), int(p)) for s, p in zip(metas[1].sequence, metas[1].position, strict=True)}
    stopped = [
        i
        for i, (s, p) in enumerate(zip(metas[0].sequence, metas[0].position, strict=True))
        if (int(s), int(p)) not in went
    ]
    index = torch.tensor(stopped)
    rows = row_meta(metas[0].sequence[index], metas[0].position[index], 2)
    q, k, v = qkv(len(stopped), 9)
    got = streams.lookahead_view(rows, 2).attend(0, q, k, v)
    for i in range(len(stopped)):
        alone = DenseStreams("duo_causal")
        for meta, keys, values in stored:
            alone.view(meta).commit(0, keys, values)
        one = rows.at(slice(i, i + 1))
        expected = alone.view(one).attend(0, q[i : i + 1], k[i : i + 1], v[i : i + 1])
        torch.testing.assert_close(got[i : i + 1], expected, atol=1e-12, rtol=0)
    assert len(streams.streams) == 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [[9, 1, 14], [140, 60, 90]])
def test_the_gpu_kernels_mask_equals_the_tiles(rule, lengths):
    """Flex attention uncompiled, on CPU: same masks, padding and look-ahead isolation as on a GPU."""
    metas = ragged(lengths, 0.6, seed=5)
    stored = [qkv(len(meta.sequence), depth) for depth, meta in enumerate(metas)]
    for depth, meta in enumerate(metas):
        for isolated in (False, True)[: depth + 1]:
            arguments = (rule, meta, metas[:depth], isolated)
            q, keys, values = stored[depth][0], [s[1] for s in stored[: depth + 1]], [s[2] for s in stored[: depth + 1]]
            flex = FlexKernel(*arguments)(q, keys, values)
            torch.testing.assert_close(flex, tiled.TiledKernel(*arguments)(q, keys, values), atol=1e-12, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_visible_count_is_the_masks_sum(rule):
    metas = ragged([9, 1, 14], 0.6, seed=7)
    for number, query in enumerate(metas):
        expected = sum(int(visible(rule, query, key).sum()) for key in metas[: number + 1])
        assert visible_count(rule, query, metas[: number + 1]) == expected


def test_the_rules_differ_where_they_should():
    query = row_meta(torch.tensor([0]), torch.tensor([5]), 2)
    sequence, position = torch.tensor([0, 0, 0, 0, 1, 0]), torch.tensor([4, 4, 5, 5, 4, 6])
    keys = row_meta(sequence, position, torch.tensor([1, 2, 2, 3, 1, 1]))
    assert visible("duo_causal", query, keys)[0].tolist() == [True, True, True, False, False, False]
    assert visible("root_and_own", query, keys)[0].tolist() == [True, False, True, False, False, False]
