"""The oracle: dense, token by token, without a cache. Slow, obvious, and written without the engine's parts."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.model.looped import LoopedLM
from fathom.model.visibility import RowMeta, row_meta, visible
from fathom.model.vocabulary import read_logits


class DenseView:
    """All rows of one sequence at once under the dense mask of the visibility predicate."""

    def __init__(self, rule: str, meta: RowMeta) -> None:
        self.mask = visible(rule, meta, meta)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhw,khw->hqk", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~self.mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khw->qhw", weights, v)

    def commit(self, layer: int, k: Tensor, v: Tensor) -> None:
        """No cache."""


class Answer(NamedTuple):
    """What the oracle generates.

    Attributes:
        ids: answer tokens.
        depths: depth of the row that predicted each.
        logprobs: under the mixture.
        prompt_depths: of all prompt rows.
        margins: per answer token the smallest distance of any decision so far to the other outcome.
    """

    ids: list[int]
    depths: list[int]
    logprobs: list[float]
    prompt_depths: list[int]
    margins: list[float]


class Oracle:
    """Greedy generation, one row at a time, everything recomputed for every row."""

    def __init__(self, model: LoopedLM, prompt: list[int], tau: float, max_depth: int) -> None:
        self.model, self.tau, self.max_depth = model, tau, max_depth
        self.ids = list(prompt)
        self.prompt = len(prompt)
        self.positions: list[int] = []
        self.depths: list[int] = []
        self.entered: list[Tensor] = []
        self.margin = math.inf

    def run(self, max_tokens: int, stop_ids: frozenset[int] = frozenset()) -> Answer:
        """Generate; a stop token ends the answer and is part of ``ids``."""
        executed, ids, logprobs, margins = [], [], [], []
        position = 0
        while len(ids) < max_tokens and not (ids and ids[-1] in stop_ids):
            mixture, depth = self.token(position)
            executed.append(depth)
            position += 1
            if position >= self.prompt:
                top = mixture.topk(2).values
                self.margin = min(self.margin, float(top[0] - top[1]))
                ids.append(int(mixture.argmax()))
                logprobs.append(float(mixture.max()))
                margins.append(self.margin)
                self.ids.append(ids[-1])
        return Answer(ids, executed[self.prompt - 1 :], logprobs, executed[: self.prompt], margins)

    def token(self, position: int) -> tuple[Tensor, int]:
        """Log-probabilities of the mixture after this position, and how many depths it ran."""
        e = self.model.table(ids=torch.tensor([self.ids[position]]))
        u, probabilities, gates = e, [], []
        for depth in range(1, self.max_depth + 1):
            h = self.row(position, depth, u)
            logits = self.model.logits(h)
            probabilities.append(logits[0].softmax(-1))
            if depth == self.max_depth or not self.continues(position, e, h, logits, gates):
                break
            u = self.model.update(e, h)
        return self.mixture(probabilities, gates), len(probabilities)

    def row(self, position: int, depth: int, u: Tensor) -> Tensor:
        """Hidden state of a new row, by running all rows so far again."""
        self.positions.append(position)
        self.depths.append(depth)
        self.entered.append(u)
        positions, depths = torch.tensor(self.positions), torch.tensor(self.depths)
        meta = row_meta(torch.zeros_like(positions), positions, depths)
        view = DenseView(self.model.method.visibility, meta)
        return self.model.backbone.norm(self.model.backbone.body(torch.cat(self.entered), positions, view)[0])[-1:]

    def continues(self, position: int, e: Tensor, h: Tensor, logits: Tensor, gates: list[Tensor]) -> bool:
        """TaH2: g > tau. TaH2-fixed: the last prompt token and every later one."""
        if self.model.method.name == "tah2-fixed":
            return position >= self.prompt - 1
        assert self.model.decider is not None
        gate = self.model.decider(e, h, read_logits(logits, self.model.top_k()).top)[0].sigmoid()
        self.margin = min(self.margin, abs(float(gate) - self.tau))
        gates.append(gate)
        return bool(gate > self.tau)

    def mixture(self, probabilities: list[Tensor], gates: list[Tensor]) -> Tensor:
        """Equation 4, or the plain mean."""
        if self.model.method.name == "tah2-fixed":
            return torch.stack(probabilities).mean(0).log()
        total, remaining = torch.zeros_like(probabilities[0]), torch.ones(())
        for number, q in enumerate(probabilities):
            last = number == len(probabilities) - 1
            total = total + (remaining if last else remaining * (1 - gates[number])) * q
            remaining = remaining if last else remaining * gates[number]
        return total.log()


@torch.inference_mode()
def generate(
    model: LoopedLM,
    prompt: list[int],
    max_tokens: int,
    tau: float,
    max_depth: int,
    stop_ids: frozenset[int] = frozenset(),
) -> Answer:
    """Greedy answer of the oracle."""
    return Oracle(model, prompt, tau, max_depth).run(max_tokens, stop_ids)
