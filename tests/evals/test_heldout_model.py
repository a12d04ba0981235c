"""Held-out scores of the real model, on a tiny random one."""

import pytest
import torch

from fathom.evals.heldout import HeldoutReport, heldout_nll
from fathom.model.rows import pack_documents
from support.models import tiny_model


class RandomDocuments:
    """Five documents of random tokens; the second half of each is supervised."""

    def __len__(self) -> int:
        return 5

    def document(self, index: int) -> tuple[list[int], list[bool]]:
        length = 8 + 3 * index
        ids = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(index)).tolist()
        return ids, [2 * number >= length for number in range(length)]


def score(preset: str, max_depth: int, tokens_per_forward: int = 4096) -> HeldoutReport:
    return heldout_nll(tiny_model(preset, max_depth), RandomDocuments(), tokens_per_forward)


def test_a_packed_document_scores_as_it_does_alone() -> None:
    packed, alone = score("tah2", 3), score("tah2", 3, tokens_per_forward=1)
    assert packed.metrics() == pytest.approx(alone.metrics(), rel=1e-9)
    assert len(packed.depth_counts) > 1, "nobody looped: this test would show nothing"


def test_nll_is_the_mean_over_supervised_tokens() -> None:
    model, total, count = tiny_model("standard"), 0.0, 0
    for index in range(5):
        rows = pack_documents([RandomDocuments().document(index)])
        total -= float(model(rows).log_prob[rows.supervised].sum().detach())
        count += int(rows.supervised.sum())
    report = score("standard", 1)
    assert report.supervised_tokens == count
    assert report.nll == pytest.approx(total / count)
    assert (report.mean_depth, report.share_continuing) == (1.0, {})


def test_depth_one_of_a_converted_model_scores_as_its_base() -> None:
    assert score("tah2", 2).nll_per_depth[1] == pytest.approx(score("standard", 1).nll, rel=1e-9)


def test_fixed_runs_every_supervised_token_to_the_last_depth() -> None:
    report = score("tah2-fixed", 3)
    assert report.depth_counts == {3: report.supervised_tokens}
    assert report.share_continuing == {1: 1.0, 2: 1.0} and report.prompt_mean_depth == 1.0
