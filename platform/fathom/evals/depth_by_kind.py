"""Mean depth by kind of token: does depth follow difficulty?"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fathom.evals.batches import SIZES, Documents, Sizes, batches, evaluating, nothing_supervised
from fathom.evals.forward import routed_trace
from fathom.evals.plain import plain

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM

Labels = Callable[[int, Sequence[int]], Sequence[str]]
"""(document number, its token ids) to a label per token."""


class KindDepth(NamedTuple):
    """Tokens of one kind.

    Attributes:
        kind: label.
        tokens: how many were predicted.
        mean_depth: executed by the rows that predicted them.
        nll: their mean NLL at the readout, nats.
        depth_counts: number of them by executed depth.
    """

    kind: str
    tokens: int
    mean_depth: float
    nll: float
    depth_counts: dict[int, int]


class DepthByKind(NamedTuple):
    """Depth by kind of the predicted token, deepest kind first; ``mean_depth`` is over all supervised tokens."""

    kinds: list[KindDepth]
    mean_depth: float
    tokens: int

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return plain(self)


def depth_by_kind(
    model: "LoopedLM",
    documents: Documents,
    labels: Labels,
    sizes: Sizes = SIZES,
) -> DepthByKind:
    """Group supervised tokens by label. A token counts with the row that predicted it, as in serving.

    Args:
        labels: a label for each token of a document: those of a task's generator, or
            :func:`fathom.evals.kinds.tokenizer_kinds`.

    Raises:
        DataError: no token is supervised.
        ValueError: a document with more or fewer labels than tokens.
    """
    kinds: list[str] = []
    depths: list[int] = []
    losses: list[float] = []
    with evaluating(model) as device:
        for batch in batches(documents, sizes.tokens_per_forward):
            rows = batch.rows.to(device)
            trace = routed_trace(model, rows, sizes.head_chunk_rows)
            targets: list[str] = []
            for number in batch.documents:
                ids, _ = documents.document(number)
                named = list(labels(number, ids))
                if len(named) != len(ids):
                    raise ValueError(f"document {number} has {len(ids)} tokens and {len(named)} labels")
                targets += [*named[1:], ""]  # the last token predicts nothing, and is not supervised
            scored = rows.supervised.tolist()
            kinds += [kind for kind, keep in zip(targets, scored, strict=True) if keep]
            depths += trace.executed[rows.supervised].tolist()
            losses += (-trace.log_prob[rows.supervised].double()).tolist()
    if not kinds:
        raise nothing_supervised(len(documents))
    return group_by_kind(kinds, depths, losses)


def group_by_kind(kinds: Sequence[str], depths: Sequence[int], losses: Sequence[float]) -> DepthByKind:
    """Group predicted tokens, each with its kind, executed depth and loss."""
    members: dict[str, list[int]] = {}
    for place, kind in enumerate(kinds):
        members.setdefault(kind, []).append(place)
    rows = [
        KindDepth(
            kind,
            len(places),
            sum(depths[place] for place in places) / len(places),
            sum(losses[place] for place in places) / len(places),
            {depth: sum(depths[place] == depth for place in places) for depth in sorted(set(depths))},
        )
        for kind, places in members.items()
    ]
    rows.sort(key=lambda row: (-row.mean_depth, row.kind))
    return DepthByKind(rows, sum(depths) / len(depths), len(depths))
