"""Depth labels and their costs (methods 1.3, 1.4; paper Eq. 5-7, 24-26). Everything here is a constant of the loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import Collectives
from fathom.model.levels import DepthTrace, Trace
from fathom.model.looped import LoopedLM
from fathom.model.noise import uniform
from fathom.model.rows import PackedRows
from fathom.objectives.lookahead import lookahead_log_prob
from fathom.objectives.value_head import explained_variance, value_sums

SMALLEST_COST, LARGEST_COST = 1e-6, 1.0
LOOKAHEAD_SALT = 4
SMALLEST_BALANCE, LARGEST_BALANCE = 0.02, 50.0


class Ran(NamedTuple):
    """A forward whose gains are wanted.

    Attributes:
        model: what ran.
        trace: its trace.
        rows: all rows, of this rank.
        objective: its constants.
        collectives: the ranks.
        head_chunk_rows: rows whose logits exist at once.
        key: draws the rows that are measured, where not all are.
        predicted: a value head's gains ``[n]`` by depth; None without one.
    """

    model: LoopedLM
    trace: Trace
    rows: PackedRows
    objective: ObjectiveConfig
    collectives: Collectives
    head_chunk_rows: int
    key: int = 0
    predicted: list[Tensor] | None = None


class DepthGains(NamedTuple):
    """What is known of one depth's gains after a forward, over the rows of that depth's trace.

    Attributes:
        index: int64 ``[n]``, row numbers in the packed rows.
        supervised: bool ``[n]``, rows that count.
        known: bool ``[n]``, rows that have a gain if it was asked for, measured or predicted.
        measured: bool ``[n]``, those of them whose gain is measured.
        stands_for: fp64 ``[n]``, how many rows each known one stands for.
        gain: fp64 ``[n]``, loss at m minus loss at m+1; 0 where it was not asked for.
        wrong: bool ``[n]``, another token than the target is the likeliest; where ``label_rule`` asks.
    """

    index: Tensor
    supervised: Tensor
    known: Tensor
    measured: Tensor
    stands_for: Tensor
    gain: Tensor
    wrong: Tensor


class DepthLabels(NamedTuple):
    """Targets of one depth's decisions, over the rows of that depth's trace.

    Attributes:
        supervised: bool ``[n]``, rows that count.
        eligible: bool ``[n]``, supervised rows whose label said to continue at every depth before.
        measured: bool ``[n]``, eligible rows whose gain was measured; that of the others was predicted.
        gain: fp64 ``[n]``, loss at m minus loss at m+1; 0 where not eligible.
        label: bool ``[n]``, continue.
        cost: fp32 ``[n]``, the weight w of the decision.
        balance: beta, the weight of the continue class.
        cut: the smallest gain worth a depth, 0 where no gain is positive.
    """

    supervised: Tensor
    eligible: Tensor
    measured: Tensor
    gain: Tensor
    label: Tensor
    cost: Tensor
    balance: float
    cut: float


def coverage_cut(gains: Tensor, rho: float, weights: Tensor | None = None) -> float | None:
    """Smallest gain of the shortest descending prefix that holds ``rho`` of all positive gain; None without any.

    Args:
        gains: 1-D, any sign; NaN and infinities count as 0.
        weights: how many rows each stands for; default 1.
    """
    gains = torch.nan_to_num(gains.double(), nan=0.0, posinf=0.0, neginf=0.0)
    weights = torch.ones_like(gains) if weights is None else weights.double()
    weights = weights[gains > 0]
    positive, order = gains[gains > 0].sort(descending=True)
    if positive.shape[0] == 0:
        return None
    covered = (positive * weights[order]).cumsum(0)
    place = int(torch.searchsorted(covered, rho * covered[-1]))
    return float(positive[min(place, positive.shape[0] - 1)])


@torch.no_grad()
def depth_labels(forward: Ran) -> list[DepthLabels]:
    """Labels for every depth that could have continued, from the current model; they never alter this forward's routes.

    The pool of the coverage cut and of the class balance is this micro-batch over all ranks. Where only a share of the
    stopped rows is measured (``lookahead_fraction``), drawn by the key, each of them stands for as many as were left
    out: given the cut and the balance, the loss is unbiased. With a value head's gains the rows left out have these
    instead, or are measured too, as long as it does not explain those that were drawn.
    """
    wanted = forward.rows.supervised  # c^(m-1): in the pool of depth m only if the labels so far said continue
    labels = []
    for depth in depths_that_decide(forward.model, forward.trace):
        gains = depth_gains(forward, depth, wanted)
        labels.append(decide(gains, wanted[gains.index], forward.objective, forward.collectives))
        wanted = torch.zeros_like(wanted).index_put((gains.index,), labels[-1].label)
    return labels


def depths_that_decide(model: LoopedLM, trace: Trace) -> range:
    """Depths of a forward after which a row may go on."""
    return range(1, min(model.method.max_depth - 1, len(trace.depths)) + 1)


def depth_gains(forward: Ran, depth: int, wanted: Tensor) -> DepthGains:
    """One depth's gains of the ``wanted`` rows (bool ``[rows]``)."""
    rows, ran, objective = forward.rows, forward.trace.depths[depth - 1], forward.objective
    due = wanted[ran.index]
    drawn, stands_for = _drawn(ran, rows, objective.lookahead_fraction, forward.key, depth)
    known = measured = drawn
    gain = _gain(forward, depth, due & drawn)
    if forward.predicted is not None:
        known, stands_for, rest = torch.ones_like(drawn), torch.ones_like(stands_for), due & ~drawn
        value = forward.predicted[depth - 1].detach()
        if _is_accurate(value, gain, due & drawn & ~ran.goes_on, objective, forward.collectives):
            gain = torch.where(rest, value.double(), gain)
        else:
            measured, gain = known, gain + _gain(forward, depth, rest)
    wrong = _is_wrong(ran) if objective.label_rule == "mismatch" else torch.zeros_like(drawn)
    return DepthGains(ran.index, rows.supervised[ran.index], known, measured, stands_for, gain, wrong)


def decide(gains: DepthGains, due: Tensor, objective: ObjectiveConfig, collectives: Collectives) -> DepthLabels:
    """Cut, labels, costs and class balance of one depth; all ranks' rows that are given are one pool.

    Args:
        gains: of the due rows at least.
        due: bool ``[n]``, supervised rows whose label said to continue at every depth before.
        objective: its constants.
        collectives: the ranks.
    """
    eligible = due & gains.known
    gain = torch.where(eligible, gains.gain, torch.zeros_like(gains.gain))
    pool = eligible & (gain > 0)
    weights = collectives.gather(gains.stands_for[pool])
    cut = coverage_cut(collectives.gather(gain[pool]), objective.coverage_rho, weights)
    supervised = gains.supervised & (gains.known | ~due)
    # A pass that costs more than it brings is not worth labelling (objective.pass_price_nats; 0 as published).
    least = max(cut or 0.0, objective.pass_price_nats)
    label = eligible & (gain >= least) if cut is not None else torch.zeros_like(eligible)
    if objective.label_rule == "mismatch":
        label = eligible & gains.wrong
    counts = torch.where(eligible, gains.stands_for, torch.ones_like(gains.stands_for))
    cost = _cost(gain - least, label, eligible, objective) * counts
    balance = _balance(label, supervised, counts, collectives)
    return DepthLabels(supervised, eligible, eligible & gains.measured, gain, label, cost.float(), balance, least)


def _drawn(ran: DepthTrace, rows: PackedRows, fraction: float, key: int, depth: int) -> tuple[Tensor, Tensor]:
    """Which rows of a depth are measured (bool), and how many each stands for (fp64): those that went on always are."""
    index, one = ran.index, torch.ones(ran.index.shape, dtype=torch.float64, device=ran.index.device)
    if fraction == 1.0:
        return torch.ones_like(ran.goes_on), one
    draw = uniform(key, rows.example[index], rows.positions[index], LOOKAHEAD_SALT, depth, width=1, like=index)[:, 0]
    return ran.goes_on | (draw < fraction), torch.where(ran.goes_on, one, one / fraction)


def _is_accurate(
    predicted: Tensor, gain: Tensor, drawn: Tensor, objective: ObjectiveConfig, collectives: Collectives
) -> bool:
    """Whether the value head explains the gains of the stopped rows that were drawn, over all ranks: rows that it has
    not learned from, and a fair sample of those for which it is to speak."""
    assert objective.value_head is not None
    sums = collectives.sum(value_sums(predicted[drawn], gain[drawn]))
    return explained_variance(sums) >= objective.value_head


def _is_wrong(ran: DepthTrace) -> Tensor:
    """Whether another token than the target was the likeliest: TaH's label, as an ablation (Table 4)."""
    assert ran.head is not None
    return ran.log_prob < ran.head.top[:, 0].log() - 1e-6


def _cost(margin: Tensor, label: Tensor, eligible: Tensor, objective: ObjectiveConfig) -> Tensor:
    """w of Eq. 25: how far the gain is from the cut; 1 for labels that do not come from gains, or if unweighted."""
    if objective.label_rule == "mismatch" or not objective.weighted:
        return torch.where(eligible, torch.ones_like(margin), SMALLEST_COST)
    cost = margin.abs().clamp(SMALLEST_COST, LARGEST_COST)
    cost = torch.where(label, cost, cost.clamp_min(objective.stop_cost_floor))
    return torch.where(eligible, cost, SMALLEST_COST)


def _gain(forward: Ran, depth: int, eligible: Tensor) -> Tensor:
    """log q^(m+1) - log q^(m) of eligible rows, fp64: from the main pass for rows that continued, else look-ahead."""
    trace, ran = forward.trace, forward.trace.depths[depth - 1]
    deeper = ran.log_prob.detach().clone()
    if depth < len(trace.depths):
        deeper[ran.goes_on] = trace.depths[depth].log_prob.detach()
    stopped = eligible & ~ran.goes_on
    deeper[stopped] = lookahead_log_prob(
        forward.model, trace, forward.rows, depth, stopped, forward.collectives, forward.head_chunk_rows
    )
    gain = torch.nan_to_num((deeper - ran.log_prob.detach()).double(), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.where(eligible, gain, torch.zeros_like(gain))


def _balance(label: Tensor, supervised: Tensor, counts: Tensor, collectives: Collectives) -> float:
    """beta = stop labels over continue labels of supervised rows of this depth, all ranks; 1 if a class is empty."""
    classes = torch.stack((counts[supervised & ~label].sum(), counts[supervised & label].sum()))
    stop, go = collectives.sum(classes).tolist()
    return min(max(stop / go, SMALLEST_BALANCE), LARGEST_BALANCE) if stop and go else 1.0
