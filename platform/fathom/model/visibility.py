"""What a row may see: one predicate over (sequence, position, depth, the key token's final depth).

The dense mask made from :func:`visible` is the oracle of every fast path. All rules keep sequences apart and are
causal in the position. A key exists only for depths that its token executed: the rules differ in what a query sees of
the other depths, and in what stands in for a key that is missing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

DUO_CAUSAL = "duo_causal"
ROOT_AND_OWN = "root_and_own"
SAME_DEPTH = "same_depth"
LATEST = "latest"
SHARED_FIRST = "shared_first"
RULES = (DUO_CAUSAL, ROOT_AND_OWN, SAME_DEPTH, LATEST, SHARED_FIRST)

GOES_ON = 1 << 30
"""Final depth of a token that has not stopped yet."""


class RowMeta(NamedTuple):
    """Which rows these are; every field is int64 ``[n]``.

    Attributes:
        sequence: which document or request.
        position: index in it.
        depth: the depth at which the row runs, or its key was made.
        last: the token's final depth, :data:`GOES_ON` while it has not stopped; of keys only.
    """

    sequence: Tensor
    position: Tensor
    depth: Tensor
    last: Tensor

    def at(self, index: Tensor | slice | tuple) -> "RowMeta":
        """Some of the rows, or a view of them."""
        return RowMeta(*(field[index] for field in self))


def row_meta(sequence: Tensor, position: Tensor, depth: Tensor | int) -> RowMeta:
    """Rows that have not stopped, all at one depth or each at its own."""
    depth = depth if isinstance(depth, Tensor) else torch.full_like(position, depth)
    return RowMeta(sequence, position, depth, torch.full_like(position, GOES_ON))


def sees(rule: str, query: RowMeta, key: RowMeta) -> Tensor:
    """Whether query sees key, element by element; the fields broadcast. s, j are the key's position and depth.

    * ``duo_causal`` (methods 1.2): s <= t and j <= m, whatever was executed (TaH, TaH2).
    * ``root_and_own`` (the "causal" mode of TaH2-fixed): depth 1 of s <= t, and t's own depths up to m.
    * ``same_depth``: j = m; tokens that did not run m are invisible (Huginn, AbbIE, MoR's selected-only caching).
    * ``latest``: j = m, and for tokens that stopped earlier the keys of their last depth stand in (Ouro, Huginn's
      "latest").
    * ``shared_first``: j = 1 at every depth; deeper passes make no keys (MoR's recursive sharing).
    """
    before = (query.sequence == key.sequence) & (key.position <= query.position)
    if rule == DUO_CAUSAL:
        return before & (key.depth <= query.depth)
    if rule == ROOT_AND_OWN:
        own = (key.position == query.position) & (key.depth <= query.depth)
        return before & ((key.depth == 1) | own)
    if rule == SAME_DEPTH:
        return before & (key.depth == query.depth)
    if rule == LATEST:
        return before & (key.depth == torch.minimum(query.depth, key.last))
    if rule == SHARED_FIRST:
        return before & (key.depth == 1)
    raise ValueError(f"unknown visibility rule {rule!r}")


def sees_alone(rule: str, query: RowMeta, key: RowMeta, own: Tensor) -> Tensor:
    """As :func:`sees`, for queries that would run this depth if each of them alone had continued (methods 1.2).

    A query's token has not stopped then, whatever its key says; of keys that the queries make (``own``, bool) it sees
    its own only.
    """
    itself = query.position == key.position
    going = key._replace(last=torch.where(itself, GOES_ON, key.last))
    return sees(rule, query, going) & (itself | ~own)


def visible(rule: str, query: RowMeta, key: RowMeta) -> Tensor:
    """The dense mask, bool ``[queries, keys]``."""
    return sees(rule, query.at((slice(None), None)), key.at((None, slice(None))))


def order_key(sequence: Tensor, position: Tensor) -> Tensor:
    """One int64 that sorts rows by (sequence, position)."""
    return sequence * (1 << 40) + position


def visible_count(rule: str, query: RowMeta, streams: list[RowMeta]) -> int:
    """How many (query, key) pairs attention computes for these queries, without a dense mask.

    Args:
        query: rows of one depth.
        streams: keys by depth up to the query's, each sorted by (sequence, position).
    """
    total, own = 0, len(streams) - 1
    for number, key in enumerate(streams):
        if rule == ROOT_AND_OWN and number > 0:
            total += int(torch.isin(_order(query), _order(key)).sum())
        elif (rule == SHARED_FIRST and number > 0) or (rule == SAME_DEPTH and number < own):
            continue
        elif rule == LATEST and number < own:
            total += _pairs(query, key.at(key.last == number + 1))
        else:
            total += _pairs(query, key)
    return total


def _order(meta: RowMeta) -> Tensor:
    return order_key(meta.sequence, meta.position)


def _pairs(query: RowMeta, key: RowMeta) -> int:
    """Pairs with s <= t in one sequence."""
    keys = _order(key)
    upto = torch.searchsorted(keys, _order(query), right=True)
    before = torch.searchsorted(keys, order_key(query.sequence, torch.zeros_like(query.position)))
    return int((upto - before).sum())
