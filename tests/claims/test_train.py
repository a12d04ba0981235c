"""The trainer: seeded, from the same base and the same documents; scores that agree with other measures."""

from dataclasses import replace

import pytest
import torch

from fathom.claims.budget import QUICK, Budget, Run
from fathom.claims.lab import train_run
from fathom.claims.measure import HeldoutDocuments, score
from fathom.claims.results import Models
from fathom.claims.train import ask_for_depth, training_rows
from fathom.evals.heldout import heldout_nll
from fathom.model.flops import decode_flops

TINY = replace(
    QUICK, seeds=2, width=32, layers=1, base_steps=6, steps=4, documents=2, heldout=4, longest=4, context_tokens=40
)
TAH2 = Run("TaH2", "tah2", 2)


@pytest.fixture
def models(tmp_path) -> Models:
    train_run(TINY, TINY.base_of(TAH2), 1, tmp_path)
    return Models(TINY, 1, tmp_path)


def test_the_same_seed_gives_the_same_weights_and_scores(models, tmp_path):
    first, scores = train_run(TINY, TAH2, 1, models.folder)
    weights = models.load(TAH2).state_dict()
    again = tmp_path / "again"
    again.mkdir()
    train_run(TINY, TINY.base_of(TAH2), 1, again)
    second, repeated = train_run(TINY, TAH2, 1, again)
    assert first.curve == second.curve and first.looked_ahead == 1.0
    assert scores == repeated
    assert all(
        torch.equal(value, weights[name]) for name, value in Models(TINY, 1, again).load(TAH2).state_dict().items()
    )


def test_another_seed_gives_other_weights_and_other_documents(models):
    train_run(TINY, TINY.base_of(TAH2), 2, models.folder)
    base = TINY.base_of(TAH2)
    one, two = (Models(TINY, seed, models.folder).load(base).table.embedding for seed in (1, 2))
    assert not torch.equal(one, two)
    task = TINY.tasks["chains"]
    assert training_rows(task, 1, 0, 2).ids.tolist() != training_rows(task, 2, 0, 2).ids.tolist()


def test_methods_start_from_the_weights_of_one_base(models):
    base = models.load(TINY.base_of(TAH2)).state_dict()
    for run in (TAH2, Run("Standard"), Run("fixed", "tah2-fixed", 2)):
        mine = models.new(run).state_dict()
        assert all(torch.equal(mine[name], value) for name, value in base.items())


def test_post_training_goes_on_with_the_documents_after_those_of_the_base():
    base = TINY.plan(TINY.base_of(TAH2))
    assert TINY.plan(TAH2).first_document == base.after == 6 * 2
    assert TINY.plan(Run("Standard")) == TINY.plan(TAH2)
    second = Run("second", "tah2", 2, start=TAH2)
    assert TINY.plan(second).first_document == TINY.plan(TAH2).after


def test_scores_agree_with_heldout_nll(models):
    train_run(TINY, TAH2, 1, models.folder)
    model, documents = models.load(TAH2), models.documents("chains")
    mine, theirs = score(model, TINY.tasks["chains"], documents), heldout_nll(model, documents)
    assert mine.nll == pytest.approx(theirs.nll)
    assert mine.mean_depth == pytest.approx(theirs.mean_depth)
    assert mine.prompt_depth == pytest.approx(theirs.prompt_mean_depth)
    assert mine.tokens == theirs.supervised_tokens


def test_decode_flops_are_those_of_every_answer_after_all_that_stands_before_it(models):
    model = models.new(Run("Standard"))
    documents = HeldoutDocuments(TINY.tasks["chains"], 1)
    mask = documents.documents[0].mask
    starts = [place for place in range(1, len(mask)) if mask[place] and not mask[place - 1]]
    total = sum(decode_flops(model.config, model.method, [1] * start, [1] * 5) for start in starts)
    scores = score(model, TINY.tasks["chains"], documents)
    assert scores.flops_per_token == pytest.approx(total / (5 * len(starts)))


def test_accuracy_counts_the_most_probable_answers(models):
    """A model whose embedding table makes one answer certain is right exactly where that is the answer."""
    model = models.new(Run("Standard"))
    task = TINY.tasks["chains"]
    documents = HeldoutDocuments(task, 4)
    with torch.no_grad():
        model.backbone.norm.weight.zero_()  # every logit is 0: the first answer is as probable as any, and named first
    hard = [
        token
        for document in documents.documents
        for token, kind in zip(document.ids, document.kinds, strict=True)
        if task.is_hard(kind)
    ]
    assert score(model, task, documents).accuracy == pytest.approx(hard.count(0) / len(hard))


def test_labels_of_a_reference_ask_for_depth_where_it_is_wrong(models):
    reference = models.load(TINY.base_of(TAH2))
    rows = training_rows(TINY.tasks["chains"], 1, 0, 2)
    asked = ask_for_depth(rows, reference, 2).oracle
    top = reference.logits(reference(rows).depths[-1].hidden).argmax(-1)
    assert asked.tolist() == [1 if right else 2 for right in (top == rows.targets).tolist()]
    assert set(asked[rows.supervised].tolist()) == {1, 2}


def test_random_routing_has_the_share_of_the_run_it_is_compared_with(models):
    _, scores = train_run(TINY, TAH2, 1, models.folder)
    model = models.new(Run("random", "tah2-random", 2, share_of=TAH2))
    assert model.method.threshold == pytest.approx(scores.mean_depth - 1.0)


def test_a_scaled_budget_is_wider():
    assert isinstance(TINY, Budget)
    wide = TINY.scaled(4)
    assert wide.backbone(TAH2).hidden_size == 4 * TINY.backbone(TAH2).hidden_size
    assert wide.plan(TAH2).documents_per_step == 4 * TINY.plan(TAH2).documents_per_step
