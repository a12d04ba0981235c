"""Keyed randomness: what is drawn for a row follows from its keys alone, wherever and whenever it runs.

A counter-based generator (splitmix64) in integer arithmetic, so a row gets the same numbers packed or alone, in
training or in serving, on any device.
"""

import math

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""The constants of splitmix64 as signed 64-bit integers."""


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64, overflow wraps."""
    x = (x ^ _logical_shift(x, 30)) * _FIRST
    x = (x ^ _logical_shift(x, 27)) * _SECOND
    return x ^ _logical_shift(x, 31)


def uniform(seed: int, *keys: Tensor | int, width: int, like: Tensor) -> Tensor:
    """Numbers in (0, 1), fp64 ``[rows, width]``.

    Args:
        seed: of the run or the request.
        keys: int64 ``[rows]`` or one for all; every key changes every number.
        width: numbers per row.
        like: int64 ``[rows]``, gives rows and device.
    """
    state = torch.full_like(like, seed)
    for key in keys:
        state = _scramble(state * _GOLDEN + key + 1)
    counter = torch.arange(1, width + 1, device=like.device)
    mixed = _scramble(state[:, None] + counter[None, :] * _GOLDEN)
    return (_logical_shift(mixed, 11).double() + 0.5) * 2.0**-53


def truncated_normal(draws: Tensor, cut: float = 3.0) -> Tensor:
    """Standard normal numbers within ``cut`` standard deviations, from uniform ones of the same shape."""
    tail = 0.5 * math.erfc(cut / math.sqrt(2.0))
    return torch.special.ndtri(tail + draws * (1.0 - 2.0 * tail))
