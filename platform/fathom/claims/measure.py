"""What one trained model scores on held-out documents: loss, accuracy, depth by kind of token, decode FLOPs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fathom.claims.tasks import HELDOUT, Document, Task
from fathom.evals.batches import SIZES, batches, evaluating
from fathom.evals.depth_by_kind import group_by_kind
from fathom.model.flops import decode_flops
from fathom.model.levels import LoopOptions
from fathom.model.looped import LoopedLM
from fathom.model.rows import PackedRows

HELDOUT_SEED = 0
"""Held-out documents are the same for every seed of training."""


class HeldoutDocuments:
    """The first held-out documents of a task, as the measures of ``fathom.evals`` read them."""

    def __init__(self, task: Task, count: int) -> None:
        self.documents: list[Document] = [task.document(HELDOUT, HELDOUT_SEED, number) for number in range(count)]

    def __len__(self) -> int:
        return len(self.documents)

    def document(self, number: int, /) -> tuple[list[int], list[bool]]:
        """Ids and mask of a document."""
        return self.documents[number].ids, self.documents[number].mask

    def kinds(self, number: int, _ids: Sequence[int]) -> list[str]:
        """The kind of each of its tokens."""
        return self.documents[number].kinds

    def sample(self, count: int) -> "HeldoutDocuments":
        """The first ``count`` of them."""
        part = HeldoutDocuments.__new__(HeldoutDocuments)
        part.documents = self.documents[:count]
        return part


@dataclass(frozen=True)
class Scores:
    """A model on held-out documents; losses in nats per token.

    Attributes:
        nll: mean over supervised tokens, at the readout.
        hard_nll: over the hard tokens alone; NaN where a text has none.
        accuracy: share of hard tokens whose most probable answer is right; NaN for text.
        mean_depth: executed by rows that predict supervised tokens.
        hard_depth: by those that predict hard ones; likewise.
        prompt_depth: by the other rows, which nobody supervises; 0 where there are none.
        flops_per_token: mean decode FLOPs of a generated token by the depths that were executed, prefill excluded.
        depth_by_kind, nll_by_kind: means by kind of the predicted token.
        tokens: supervised tokens.
    """

    nll: float
    hard_nll: float
    accuracy: float
    mean_depth: float
    hard_depth: float
    prompt_depth: float
    flops_per_token: float
    depth_by_kind: dict[str, float]
    nll_by_kind: dict[str, float]
    tokens: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def score(model: LoopedLM, task: Task, documents: HeldoutDocuments, routes: Sequence[Tensor] | None = None) -> Scores:
    """Score a model the way it decodes.

    Args:
        routes: executed depths ``[rows]`` of each forward in turn, instead of the exit rule's.
    """
    kinds: list[str] = []
    depths: list[int] = []
    losses: list[float] = []
    prompt: list[int] = []
    right = asked = generated = 0
    flops = 0.0
    with evaluating(model) as device:
        for number, batch in enumerate(batches(documents, SIZES.tokens_per_forward)):
            rows = batch.rows.to(device)
            scripted = None if routes is None else routes[number].to(device)
            trace = model(rows, options=LoopOptions(routes=scripted))
            kind = [k for at in batch.documents for k in [*documents.documents[at].kinds[1:], "end"]]
            mine = [k for k, keep in zip(kind, rows.supervised.tolist(), strict=True) if keep]
            kinds += mine
            depths += trace.executed[rows.supervised].tolist()
            losses += (-trace.log_prob[rows.supervised].double()).tolist()
            prompt += trace.executed[~rows.supervised].tolist()
            hard = rows.supervised & torch.tensor([task.is_hard(k) for k in kind], device=device)
            if task.answers:
                right += int((_best_answer(model, rows, hard, task.answers, scripted) == rows.targets[hard]).sum())
                asked += int(hard.sum())
            cost, tokens = _decoding(model, [documents.documents[at] for at in batch.documents], trace.executed)
            flops += cost
            generated += tokens
    grouped = group_by_kind(kinds, depths, losses)
    hard_kinds = [row for row in grouped.kinds if task.is_hard(row.kind)]
    hard_tokens = sum(row.tokens for row in hard_kinds) or float("nan")
    return Scores(
        nll=sum(losses) / len(losses),
        hard_nll=sum(row.nll * row.tokens for row in hard_kinds) / hard_tokens,
        accuracy=right / asked if asked else float("nan"),
        mean_depth=grouped.mean_depth,
        hard_depth=sum(row.mean_depth * row.tokens for row in hard_kinds) / hard_tokens,
        prompt_depth=sum(prompt) / len(prompt) if prompt else 0.0,
        flops_per_token=flops / generated,
        depth_by_kind={row.kind: row.mean_depth for row in grouped.kinds},
        nll_by_kind={row.kind: row.nll for row in grouped.kinds},
        tokens=len(losses),
    )


def _best_answer(
    model: LoopedLM, rows: PackedRows, hard: Tensor, answers: Sequence[int], routes: Tensor | None
) -> Tensor:
    """The answer that the model finds most probable, for each hard row.

    It asks the model for each answer in turn, because only the readout knows how a method's depths become one
    distribution; routes do not depend on the target.
    """
    found = []
    for answer in answers:
        targets = torch.where(hard, torch.full_like(rows.targets, answer), rows.targets)
        found.append(model(rows._replace(targets=targets), options=LoopOptions(routes=routes)).log_prob[hard])
    return torch.tensor(answers, device=hard.device)[torch.stack(found).argmax(0)]


def _decoding(model: LoopedLM, documents: Sequence[Document], executed: Tensor) -> tuple[float, int]:
    """Decode FLOPs of every answer given all that stands before it, and how many tokens were generated."""
    depths, start = executed.tolist(), 0
    flops, generated = 0.0, 0
    for document in documents:
        mine = depths[start : start + len(document.ids)]
        start += len(document.ids)
        for first, last in _answers(document.mask):
            flops += decode_flops(model.config, model.method, mine[:first], mine[first:last])
            generated += last - first
    return flops, generated


def _answers(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Where each unbroken stretch of targets begins and ends; the first token of a document is nobody's target."""
    edges = [place for place in range(1, len(mask)) if mask[place] != (mask[place - 1] and place > 1)]
    if mask[-1]:
        edges.append(len(mask))
    return list(zip(edges[::2], edges[1::2], strict=True))
