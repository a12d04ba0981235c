"""Choosing a token from the mixture, with noise that depends on nothing but (seed, choice, position)."""

import hashlib
import struct

import torch
from torch import Tensor

from fathom_serve.engine.request import Sampling

WORD = (1 << 64) - 1


def choose(log_probs: Tensor, sampling: Sampling, choice: int, position: int) -> int:
    """A token id.

    Args:
        log_probs: ``[V]`` of the mixture.
        sampling: temperature, top_p and seed.
        choice: which of a request's answers.
        position: of the row that predicts.
    """
    if sampling.temperature == 0:
        return int(log_probs.argmax())
    scores = keep_top_p((log_probs.float() / sampling.temperature).log_softmax(-1), sampling.top_p)
    return int((scores + gumbel(scores.shape[0], sampling.seed, choice, position).to(scores.device)).argmax())


def keep_top_p(log_probs: Tensor, top_p: float) -> Tensor:
    """Minus infinity for all but the most probable tokens that together reach ``top_p``; the first always stays."""
    if top_p >= 1:
        return log_probs
    ordered, index = log_probs.sort(descending=True, stable=True)
    mass = ordered.exp()
    dropped = mass.cumsum(0) - mass >= top_p
    dropped[0] = False
    return log_probs.index_fill(0, index[dropped], -torch.inf)


def gumbel(size: int, seed: int, choice: int, position: int) -> Tensor:
    """Standard Gumbel noise fp32 ``[size]``: adding it and taking the largest is sampling."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed & WORD, choice, position), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return -torch.empty(size).exponential_(generator=generator).log()
