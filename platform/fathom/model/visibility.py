"""What a row may see: one predicate over (sequence, position, depth).

The dense mask made from :func:`visible` is the oracle of every fast path. All rules keep sequences apart and are
causal in the position; a key exists only for depths that its token executed, so nothing more is needed for
tokens that stopped.
"""

from typing import NamedTuple

import torch
from torch import Tensor

DUO_CAUSAL = "duo_causal"
ROOT_AND_OWN = "root_and_own"


class RowMeta(NamedTuple):
    """Which rows these are; every field is int64 ``[n]``."""

    sequence: Tensor
    position: Tensor
    depth: Tensor


def sees(rule: str, query: RowMeta, key: RowMeta) -> Tensor:
    """Whether query sees key, element by element; the fields broadcast.

    * ``duo_causal`` (methods 1.2): s <= t and j <= m, whatever was executed.
    * ``root_and_own`` (the "causal" mode of TaH2-fixed): depth 1 of s <= t, and t's own depths up to m.
    """
    before = (query.sequence == key.sequence) & (key.position <= query.position) & (key.depth <= query.depth)
    if rule == DUO_CAUSAL:
        return before
    if rule == ROOT_AND_OWN:
        return before & ((key.depth == 1) | (key.position == query.position))
    raise ValueError(f"unknown visibility rule {rule!r}")


def visible(rule: str, query: RowMeta, key: RowMeta) -> Tensor:
    """The dense mask, bool ``[queries, keys]``."""
    return sees(rule, RowMeta(*(field[:, None] for field in query)), RowMeta(*(field[None, :] for field in key)))


def order_key(sequence: Tensor, position: Tensor) -> Tensor:
    """One int64 that sorts rows by (sequence, position)."""
    return sequence * (1 << 40) + position


def visible_count(rule: str, query: RowMeta, streams: list[RowMeta]) -> int:
    """How many (query, key) pairs attention computes for these queries, without a dense mask.

    Args:
        query: rows of one depth.
        streams: keys by depth up to the query's, each sorted by (sequence, position).
    """
    total = 0
    q_order = order_key(query.sequence, query.position)
    q_start = order_key(query.sequence, torch.zeros_like(query.position))
    for number, key in enumerate(streams):
        k_order = order_key(key.sequence, key.position)
        if rule == ROOT_AND_OWN and number > 0:
            total += int(torch.isin(q_order, k_order).sum())
        else:
            upto = torch.searchsorted(k_order, q_order, right=True)
            total += int((upto - torch.searchsorted(k_order, q_start)).sum())
    return total
