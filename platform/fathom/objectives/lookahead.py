"""The no-grad pass that measures what one more depth would have brought to tokens that stopped (methods 1.2)."""

import torch
from torch import Tensor

from fathom.model.collectives import Collectives
from fathom.model.looped import GHOST, LoopedLM, Trace
from fathom.model.rows import PackedRows
from fathom.model.visibility import RowMeta


@torch.no_grad()
def lookahead_log_prob(
    model: LoopedLM,
    trace: Trace,
    rows: PackedRows,
    depth: int,
    chosen: Tensor,
    collectives: Collectives,
    head_chunk_rows: int,
) -> Tensor:
    """log q^(depth+1)[target] of rows that executed ``depth``, each as if it alone had continued.

    They see all keys of the main pass up to ``depth + 1`` and of each other nothing; they store no keys.

    Args:
        chosen: bool over the rows of ``trace.depths[depth - 1]``, those to measure.
        collectives: when any rank measures, every rank runs the pass, a ghost row where it has none.

    Returns:
        ``[chosen]``, fp32 or wider.
    """
    ran = trace.depths[depth - 1]
    if not collectives.any(bool(chosen.any())):
        return ran.log_prob.new_empty(0)
    index, hidden = ran.index[chosen], ran.hidden[chosen]
    count = index.shape[0]
    if count:
        embedding, sequence, position = (
            trace.embedding[index],
            rows.sequence[index],
            rows.positions[index],
        )
        targets = rows.targets[index]
    else:
        targets = rows.ids.new_zeros(1)
        # Zeros, not an embedding of something: sharded modules must be called equally often on every rank.
        embedding = hidden = trace.embedding.new_zeros(1, trace.embedding.shape[1])
        sequence, position = targets + GHOST, targets
    meta = RowMeta(sequence, position, torch.full_like(position, depth + 1))
    view = trace.streams.lookahead_view(meta, depth + 1)
    deeper = model.run_span(model.enter(embedding, hidden), position, view)
    return model.read_out(deeper, targets, 0, head_chunk_rows).log_prob[:count]
