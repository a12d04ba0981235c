"""The no-grad pass that measures what one more depth would have brought to tokens that stopped (methods 1.2)."""

import torch
from torch import Tensor

from fathom.model.collectives import Collectives
from fathom.model.levels import GHOST, Trace
from fathom.model.looped import LoopedLM
from fathom.model.rows import PackedRows
from fathom.model.state import ghost_pass, zero_row
from fathom.model.visibility import row_meta


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
    index = ran.index[chosen]
    count = index.shape[0]
    logit = ran.continue_logit
    if count:
        left, kept, survival = ran.passed.at(chosen), ran.kept[chosen], ran.survival[chosen]
        logit = None if logit is None else logit[chosen]
        sequence, position, targets = rows.sequence[index], rows.positions[index], rows.targets[index]
    else:
        # A row of zeros takes every step: sharded modules, the update's too, are called equally often on every rank.
        left, kept, survival = ghost_pass(ran.passed), zero_row(ran.kept), zero_row(ran.survival)
        logit = None if logit is None else zero_row(logit)
        targets = rows.ids.new_zeros(1)
        sequence, position = targets + GHOST, targets
    state = model.enter(left, kept, logit, survival)
    meta = row_meta(sequence, position, depth + 1)
    view = trace.streams.lookahead_view(meta, depth + 1)
    _, x, h, _ = model.run(state, meta.depth, position, view)
    read = model.kept(state, x, h) if model.readout.sums_hidden else h
    return model.read_out(read, targets, 0, head_chunk_rows).log_prob[:count]
