"""Depth labels and their costs (methods 1.3, 1.4; paper Eq. 5-7, 24-26). Everything here is a constant of the loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import Collectives
from fathom.model.levels import Trace
from fathom.model.looped import LoopedLM
from fathom.model.rows import PackedRows
from fathom.objectives.lookahead import lookahead_log_prob

SMALLEST_COST, LARGEST_COST = 1e-6, 1.0
SMALLEST_BALANCE, LARGEST_BALANCE = 0.02, 50.0


class DepthLabels(NamedTuple):
    """Targets of one depth's decisions, over the rows of that depth's trace.

    Attributes:
        supervised: bool ``[n]``, rows that count.
        eligible: bool ``[n]``, supervised rows whose label said to continue at every depth before.
        gain: fp64 ``[n]``, loss at m minus loss at m+1; 0 where not eligible.
        label: bool ``[n]``, continue.
        cost: fp32 ``[n]``, the weight w of the decision.
        balance: beta, the weight of the continue class.
        cut: the smallest gain worth a depth, 0 where no gain is positive.
    """

    supervised: Tensor
    eligible: Tensor
    gain: Tensor
    label: Tensor
    cost: Tensor
    balance: float
    cut: float


def coverage_cut(gains: Tensor, rho: float) -> float | None:
    """Smallest gain of the shortest descending prefix that holds ``rho`` of all positive gain; None without any.

    Args:
        gains: 1-D, any sign; NaN and infinities count as 0.
    """
    gains = torch.nan_to_num(gains.double(), nan=0.0, posinf=0.0, neginf=0.0)
    positive = gains[gains > 0].sort(descending=True).values
    if positive.shape[0] == 0:
        return None
    covered = positive.cumsum(0)
    place = int(torch.searchsorted(covered, rho * covered[-1]))
    return float(positive[min(place, positive.shape[0] - 1)])


@torch.no_grad()
def depth_labels(
    model: LoopedLM,
    trace: Trace,
    rows: PackedRows,
    objective: ObjectiveConfig,
    collectives: Collectives,
    head_chunk_rows: int,
) -> list[DepthLabels]:
    """Labels for every depth that could have continued, from the current model; they never alter this forward's routes.

    The pool of the coverage cut and of the class balance is this micro-batch over all ranks.
    """
    wanted = rows.supervised  # c^(m-1): a token is in the pool of depth m only if its labels so far said continue
    labels = []
    for depth in range(1, min(model.method.max_depth - 1, len(trace.depths)) + 1):
        ran = trace.depths[depth - 1]
        eligible = wanted[ran.index]
        gain = _gain(model, trace, rows, depth, eligible, collectives, head_chunk_rows)
        cut = coverage_cut(collectives.gather(gain[eligible & (gain > 0)]), objective.coverage_rho)
        supervised = rows.supervised[ran.index]
        # A pass that costs more than it brings is not worth labelling (objective.pass_price_nats; 0 as published).
        least = max(cut or 0.0, objective.pass_price_nats)
        label = eligible & (gain >= least) if cut is not None else torch.zeros_like(eligible)
        cost = (gain - least).abs().clamp(SMALLEST_COST, LARGEST_COST)
        cost = torch.where(label, cost, cost.clamp_min(objective.stop_cost_floor))
        cost = torch.where(eligible, cost if objective.weighted else torch.ones_like(cost), SMALLEST_COST)
        balance = _balance(label, supervised, collectives)
        labels.append(DepthLabels(supervised, eligible, gain, label, cost.float(), balance, least))
        wanted = torch.zeros_like(wanted).index_put((ran.index,), label)
    return labels


def _gain(
    model: LoopedLM,
    trace: Trace,
    rows: PackedRows,
    depth: int,
    eligible: Tensor,
    collectives: Collectives,
    head_chunk_rows: int,
) -> Tensor:
    """log q^(m+1) - log q^(m) of eligible rows, fp64: from the main pass for rows that continued, else look-ahead."""
    ran = trace.depths[depth - 1]
    deeper = ran.log_prob.detach().clone()
    if depth < len(trace.depths):
        deeper[ran.goes_on] = trace.depths[depth].log_prob.detach()
    stopped = eligible & ~ran.goes_on
    deeper[stopped] = lookahead_log_prob(model, trace, rows, depth, stopped, collectives, head_chunk_rows)
    gain = torch.nan_to_num((deeper - ran.log_prob.detach()).double(), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.where(eligible, gain, torch.zeros_like(gain))


def _balance(label: Tensor, supervised: Tensor, collectives: Collectives) -> float:
    """beta = stop labels over continue labels of supervised rows of this depth, all ranks; 1 if a class is empty."""
    counts = torch.stack(((supervised & ~label).sum(), (supervised & label).sum())).double()
    stop, go = collectives.sum(counts).tolist()
    return min(max(stop / go, SMALLEST_BALANCE), LARGEST_BALANCE) if stop and go else 1.0
