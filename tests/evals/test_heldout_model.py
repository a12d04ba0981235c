"""Held-out scores of the real model, on a tiny random one."""

import pytest
import torch

from fathom.evals.heldout import HeldoutReport, heldout_nll
from fathom.model.config import read_config
from fathom.model.looped import LoopedLM
from fathom.model.methods import make_method
from fathom.model.rows import pack_documents

SHAPE = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class RandomDocuments:
    """Five documents of random tokens; the second half of each is supervised."""

    def __len__(self) -> int:
        return 5

    def document(self, index: int) -> tuple[list[int], list[bool]]:
        length = 8 + 3 * index
        ids = torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(index)).tolist()
        return ids, [2 * number >= length for number in range(length)]


def tiny(preset: str, max_depth: int) -> LoopedLM:
    model = LoopedLM(read_config(SHAPE, "tiny"), make_method(preset, max_depth, 0.5)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith(("update.", "decider.")):
                parameter.normal_(0.0, 0.5, generator=generator)
    model.reset_added(seed=3)
    return model


def score(preset: str, max_depth: int, tokens_per_forward: int = 4096) -> HeldoutReport:
    return heldout_nll(tiny(preset, max_depth), RandomDocuments(), tokens_per_forward)


def test_a_packed_document_scores_as_it_does_alone() -> None:
    packed, alone = score("tah2", 3), score("tah2", 3, tokens_per_forward=1)
    assert packed.metrics() == pytest.approx(alone.metrics(), rel=1e-9)
    assert len(packed.depth_counts) > 1, "nobody looped: this test would show nothing"


def test_nll_is_the_mean_over_supervised_tokens() -> None:
    model, total, count = tiny("standard", 1), 0.0, 0
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
