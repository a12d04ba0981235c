"""Held-out scores: against sums done by hand, on a stand-in whose depths and probabilities are known."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fathom.errors import DataError
from fathom.evals.heldout import heldout_nll
from fathom.model.levels import LoopOptions
from fathom.model.methods import make_method
from fathom.model.rows import PackedRows


@dataclass
class Level:
    index: Tensor
    log_prob: Tensor


class Trace(NamedTuple):
    log_prob: Tensor
    executed: Tensor
    depths: list[Level]


class OddGoDeeper(nn.Module):
    """Odd tokens run two depths; depth 1 gives log-prob -id/10, depth 2 gives -id/20, the mixture their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.method = make_method("tah2", max_depth=2, threshold=0.5)
        self.forwards: list[int] = []

    def forward(self, rows: PackedRows, options: LoopOptions) -> Trace:
        assert not self.training and not torch.is_grad_enabled()
        self.forwards.append(rows.count)
        shallow, deep = -rows.ids / 10.0, -rows.ids / 20.0
        odd = rows.ids % 2 == 1
        index = odd.nonzero().flatten()
        mixed = torch.where(odd, (shallow + deep) / 2, shallow)
        levels = [Level(torch.arange(rows.count), shallow)]
        if index.numel():
            levels.append(Level(index, deep[index]))
        return Trace(mixed, 1 + odd.long(), levels)


class Listed:
    """Documents from a list."""

    def __init__(self, *documents: tuple[list[int], list[int]]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, index: int) -> tuple[list[int], list[bool]]:
        ids, supervised = self.documents[index]
        return ids, [number in supervised for number in range(len(ids))]


DATA = Listed(([2, 3, 4, 5], [2, 3]), ([7, 8, 9], [1, 2]), ([1, 1, 6, 6, 1], [3, 4]))
# Rows that predict a supervised token: ids 3, 4 / 7, 8 / 6, 6; of them 3 and 7 are odd.


def test_scores_are_the_sums_done_by_hand() -> None:
    report = heldout_nll(OddGoDeeper(), DATA)  # pyright: ignore[reportArgumentType]
    assert report.supervised_tokens == 6 and report.documents == 3
    assert report.nll == pytest.approx((0.225 + 0.4 + 0.525 + 0.8 + 0.6 + 0.6) / 6)
    assert report.perplexity == pytest.approx(math.exp(report.nll))
    assert report.mean_depth == pytest.approx(8 / 6)
    assert report.prompt_mean_depth == pytest.approx(1 + 5 / 6)  # rows 2, 5 / 9 / 1, 1, 1: one even
    assert report.depth_counts == {1: 4, 2: 2}
    assert report.share_continuing == {1: pytest.approx(2 / 6)}
    assert report.nll_per_depth[1] == pytest.approx(3.4 / 6)
    assert report.nll_per_depth[2] == pytest.approx(0.25)
    assert report.nll_depth_pairs == {2: (pytest.approx(0.5), pytest.approx(0.25))}


def test_grouping_into_forwards_changes_nothing_but_their_number() -> None:
    whole, single = OddGoDeeper(), OddGoDeeper()
    first = heldout_nll(whole, DATA, tokens_per_forward=1000)  # pyright: ignore[reportArgumentType]
    second = heldout_nll(single, DATA, tokens_per_forward=4)  # pyright: ignore[reportArgumentType]
    assert whole.forwards == [12] and single.forwards == [4, 3, 5]
    assert first.metrics() == pytest.approx(second.metrics())
    assert first.depth_counts == second.depth_counts


def test_only_the_first_examples_and_the_mode_is_put_back() -> None:
    model = OddGoDeeper().train()
    assert heldout_nll(model, DATA, max_examples=1).supervised_tokens == 2  # pyright: ignore[reportArgumentType]
    assert model.training


def test_a_depth_that_nobody_reached_has_share_zero() -> None:
    report = heldout_nll(OddGoDeeper(), Listed(([2, 4, 6], [1, 2])))  # pyright: ignore[reportArgumentType]
    assert report.share_continuing == {1: 0.0} and report.nll_depth_pairs == {} and report.mean_depth == 1.0


def test_nothing_supervised_is_refused() -> None:
    with pytest.raises(DataError, match="no supervised token"):
        heldout_nll(OddGoDeeper(), Listed(([1, 2, 3], [])))  # pyright: ignore[reportArgumentType]


def test_metrics_are_flat_numbers_and_json_has_string_keys() -> None:
    report = heldout_nll(OddGoDeeper(), DATA)  # pyright: ignore[reportArgumentType]
    metrics = report.metrics("heldout/after")
    assert metrics["heldout/after/nll"] == report.nll
    assert metrics["heldout/after/share_continuing/depth_1"] == pytest.approx(1 / 3)
    assert metrics["heldout/after/nll/depth_2"] == pytest.approx(0.25)
    assert report.as_json()["depth_counts"] == {"1": 4, "2": 2}
