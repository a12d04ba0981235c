"""Choosing a token from the mixture, with noise that depends on nothing but (seed, choice, position).

The order is that of ``transformers``: penalties and bias, temperature, then top-k, top-p of what it leaves, and min-p.
A mixture over depths has log-probabilities where a single softmax has logits, so those are what penalties act on.
"""

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fathom_serve.engine.request import Sampling

WORD = (1 << 64) - 1
CANDIDATES = 1024
"""Top-p looks at so many tokens before it sorts the whole vocabulary."""


def choose(
    log_probs: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], choice: int, position: int
) -> int:
    """A token id.

    Args:
        log_probs: ``[V]`` of the mixture.
        sampling: how to choose.
        prompt: token ids that penalties look at.
        answer: token ids generated so far, likewise.
        choice: which of a request's answers.
        position: of the row that predicts.
    """
    scores = adjust(log_probs, sampling, prompt, answer)
    if sampling.temperature == 0:
        return int(scores.argmax())
    # The best at zero and the temperature a normal number: whatever overflows is then -inf, and never the best.
    temperature = max(sampling.temperature, torch.finfo(scores.dtype).tiny)
    kept = narrow((scores - scores.max()) / temperature, sampling)
    return int((kept + gumbel(kept.shape[0], sampling.seed, choice, position).to(kept.device)).argmax())


def adjust(log_probs: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Scores ``[V]`` after penalties and bias.

    Repetition multiplies the (negative) log-probability of each token of prompt or answer; presence and frequency
    subtract per distinct token, and per occurrence, of the answer; the bias is added last.
    """
    scores = log_probs.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *answer}), device=scores.device)
        scores[seen] *= sampling.repetition_penalty
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = torch.tensor(answer, device=scores.device).unique(return_counts=True)
        scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(scores.dtype)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    return scores


def narrow(scores: Tensor, sampling: Sampling) -> Tensor:
    """Minus infinity for tokens that top-k, top-p or min-p leave out."""
    if 0 < sampling.top_k < scores.shape[0]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    scores = keep_top_p(scores.log_softmax(-1), sampling.top_p)
    if sampling.min_p > 0:
        scores = scores.masked_fill(scores < scores.max() + math.log(sampling.min_p), -torch.inf)
    return scores


def keep_top_p(log_probs: Tensor, top_p: float) -> Tensor:
    """Minus infinity for all but the most probable tokens that together reach ``top_p``; the first always stays."""
    if top_p >= 1:
        return log_probs
    size = log_probs.shape[0]
    for count in (min(CANDIDATES, size), size):
        best = log_probs.topk(count)
        mass = best.values.exp().cumsum(0)
        if mass[-1] >= top_p:
            break
    before = mass.roll(1).index_fill(0, mass.new_zeros(1, dtype=torch.int64), 0.0)
    kept = best.indices[before < top_p]
    return torch.full_like(log_probs, -torch.inf).index_copy(0, kept, log_probs[kept])


def gumbel(size: int, seed: int, choice: int, position: int) -> Tensor:
    """Standard Gumbel noise fp32 ``[size]``: adding it and taking the largest is sampling."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed & WORD, choice, position), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return -torch.empty(size).exponential_(generator=generator).log()
