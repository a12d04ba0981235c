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


def visible(rule: str, query: RowMeta, key: RowMeta) -> Tensor:
    """Which keys each query sees, bool ``[queries, keys]``.

    * ``duo_causal`` (methods 1.2): s <= t and j <= m, whatever was executed.
    * ``root_and_own`` (the "causal" mode of TaH2-fixed): depth 1 of s <= t, and t's own depths up to m.
    """
    same = query.sequence[:, None] == key.sequence[None, :]
    causal = key.position[None, :] <= query.position[:, None]
    shallow = key.depth[None, :] <= query.depth[:, None]
    if rule == DUO_CAUSAL:
        return same & causal & shallow
    if rule == ROOT_AND_OWN:
        own = key.position[None, :] == query.position[:, None]
        return same & shallow & causal & ((key.depth == 1)[None, :] | own)
    raise ValueError(f"unknown visibility rule {rule!r}")


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
