"""The objectives of methods that fix their depth, or learn to halt: Ouro, PonderNet, ACT, TaH, MoR, LoopUS.

Each follows one paper; sections are those of the methods' specification in the docs (docs/methods.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.model.deciding import Plan
from fathom.model.levels import DepthTrace
from fathom.objectives.context import Context, Loss
from fathom.objectives.depth_draws import drawn_depths

GATE_SHARPNESS, GATE_MARGIN_NATS = 50.0, 0.005
"""Of Ouro's stage II."""


def language_model(context: Context) -> Loss:
    """-log q[target] of the readout."""
    language = -context.trace.log_prob[context.rows.supervised].sum()
    return _loss(language)


def depth_mean(context: Context) -> Loss:
    """The plain mean of the depths' losses (Ouro's stage I as the TaH2 authors run it, methods 1.12)."""
    losses = _losses(context)
    language = torch.stack(losses).mean(0).sum()
    return _loss(language)


def entropy_regularised(context: Context) -> Loss:
    """sum_m p_m L_m - beta H(p), p from the gates (Ouro's stage I, methods 3.3)."""
    shares = stop_shares(context)
    language = (torch.stack(_losses(context)) * shares).sum()
    entropy = -(shares * shares.clamp_min(1e-10).log()).sum()
    return _loss(language, -entropy, context.config.entropy_weight)


def ponder(context: Context) -> Loss:
    """sum_m p_m L_m + beta KL(p || truncated geometric) (PonderNet, methods 8)."""
    shares = stop_shares(context)
    language = (torch.stack(_losses(context)) * shares).sum()
    rate, depths = context.config.ponder_rate, shares.shape[0]
    prior = rate * (1 - rate) ** torch.arange(depths, dtype=shares.dtype, device=shares.device)
    prior = prior / prior.sum()
    divergence = (shares * (shares.clamp_min(1e-10).log() - prior.log()[:, None])).sum()
    return _loss(language, divergence, context.config.ponder_weight)


def act(context: Context) -> Loss:
    """-log q + tau (N + R): steps run and what is left for the last one; only R has a gradient (ACT, methods 8)."""
    language = -context.trace.log_prob[context.rows.supervised].sum()
    ponder_cost = language.new_zeros(())
    for ran in context.trace.depths:
        stops = context.rows.supervised[ran.index] & ~ran.goes_on
        ponder_cost = ponder_cost + (ran.passed.state.mass + ran.passed.depth)[stops].sum()
    return _loss(language, ponder_cost, context.config.act_weight)


def gate_gain(context: Context) -> Loss:
    """Soft targets sigma(50 (gain - 0.005)) for going on, from measured gains (Ouro's stage II, methods 3.3).

    The gate of depth m < M learns whether depth m+1 improves the loss. (The paper averages over m = 2..T, which would
    leave the first gate untaught; this is the TaH2 authors' reading, methods 1.12.)
    """
    losses = [loss.detach() for loss in _losses(context)]
    total = losses[0].new_zeros(())
    for number, ran in enumerate(context.trace.depths[:-1]):
        assert ran.continue_logit is not None
        gain = (losses[number] - losses[number + 1]).clamp_min(0.0)
        target = torch.sigmoid(GATE_SHARPNESS * (gain - GATE_MARGIN_NATS))
        logit = ran.continue_logit[context.rows.supervised[ran.index]]
        total = total + F.binary_cross_entropy_with_logits(logit, target.to(logit.dtype), reduction="sum")
    routing = total / max(1, len(losses) - 1)
    return Loss(routing, routing.detach())


def oracle_labels(context: Context) -> Loss:
    """BCE of going on against the data's depths (TaH's stage 2, methods 2.3); each decision counts once."""
    total = context.trace.log_prob.new_zeros(())
    for ran in context.trace.depths:
        if ran.continue_logit is None:
            continue
        keep = context.rows.supervised[ran.index]
        wanted = (context.rows.oracle[ran.index] > ran.passed.depth)[keep]
        logit = ran.continue_logit[keep]
        weight = logit.new_tensor(context.config.oracle_positive_weight)
        total = total + F.binary_cross_entropy_with_logits(
            logit, wanted.to(logit.dtype), pos_weight=weight, reduction="sum"
        )
    return Loss(total, total.detach())


def router_auxiliary(context: Context) -> Loss:
    """-log q, and BCE of the router against what the top-k chose, so that a threshold can decode (MoR, methods 7.2).

    Optionally the z-loss, of every recursion's router; log-sum-exp of its one output is that output. Both read detached
    states: they teach the router alone.
    """
    model, z_weight = context.model, context.config.router_z_weight
    total, z_loss = context.trace.log_prob.new_zeros(()), context.trace.log_prob.new_zeros(())
    for ran in context.trace.depths:
        if ran.continue_logit is None:
            continue
        keep = context.rows.supervised[ran.index]
        passed = ran.passed._replace(x=ran.passed.x.detach())
        logit = model.continue_logit(passed)
        assert logit is not None
        chosen = ran.goes_on[keep].to(logit.dtype)
        total = total + F.binary_cross_entropy_with_logits(logit[keep], chosen, reduction="sum")
        z_loss = z_loss + logit[keep].square().sum()
    language = -context.trace.log_prob[context.rows.supervised].sum()
    loss = _loss(language, total, context.config.router_weight)
    if not z_weight or model.decider is None:
        return loss
    plan = model.decider.plan(context.trace.depths[0].passed.state.u.detach())
    if plan is not None:
        z_loss = z_loss + plan.logits[context.rows.supervised].square().sum()
    return loss._replace(total=loss.total + z_weight * z_loss)


def router_balance(context: Context) -> Loss:
    """-log q, a balance loss M sum_i f_i p_i and a z-loss on the plan's logits (MoR's token choice, methods 7.3)."""
    plan: Plan | None = context.trace.plan
    assert plan is not None, "the method's decider plans before the first pass"
    supervised = context.rows.supervised
    logits, depth = plan.logits[supervised], plan.depth[supervised]
    depths = logits.shape[1]
    counts = context.collectives.sum(torch.bincount(depth - 1, minlength=depths).to(logits.dtype))
    shares = counts / counts.sum().clamp_min(1.0)
    balance = depths * (logits.softmax(-1) * shares).sum()
    z_loss = logits.logsumexp(-1).square().sum()
    language = -context.trace.log_prob[supervised].sum()
    routing = context.config.balance_weight * balance + context.config.z_weight * z_loss
    return _loss(language, routing, 1.0)


def random_depths(context: Context) -> Loss:
    """Of each supervised depth: its loss, SiLU of its change from the one before, and BCE of the confidence head
    against the share of its sequence that is predicted rightly (LoopUS, methods 9.2).

    The paper steps the optimiser after every supervised depth; here they are accumulated into one step. The change is
    taken per sequence, so that packing does not alter it.
    """
    rows, config = context.rows, context.config
    language = context.trace.log_prob.new_zeros(())
    routing, before = language, None
    chosen = drawn_depths(context.model.method.max_depth, config, context.draw)
    read = [context.trace.depths[depth - 1] for depth in chosen]
    for ran in read:
        keep = rows.supervised[ran.index]
        loss, place = -ran.log_prob[keep], rows.sequence[ran.index][keep]
        means, counts = _by_sequence(loss, place)
        language = language + loss.sum() / len(read)
        if before is not None:
            routing = routing + (counts * F.silu(means - before)).sum() * config.improvement_weight / len(read)
        before = means.detach()
        routing = routing + _confidence(ran, keep, place, counts) / len(read)
    return _loss(language, routing, 1.0)


def _confidence(ran: DepthTrace, keep: Tensor, place: Tensor, counts: Tensor) -> Tensor:
    """BCE of the exit probability at each sequence's last supervised row; a sequence counts as its rows do."""
    if ran.continue_logit is None or not keep.any():
        return ran.survival.new_zeros(())
    assert ran.head is not None
    right = (ran.head.log_prob >= ran.head.top[:, 0].log() - 1e-6)[keep].to(counts.dtype)
    share, _ = _by_sequence(right, place)
    last = torch.cat((place[1:] != place[:-1], place.new_ones(1, dtype=torch.bool)))
    logit = -ran.continue_logit[keep][last]
    each = F.binary_cross_entropy_with_logits(logit, share.to(logit.dtype), reduction="none")
    return (each * counts).sum()


def _by_sequence(values: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Mean per sequence and number of rows, ``[sequences]`` each; ``place`` is sorted."""
    _, number, counts = torch.unique_consecutive(place, return_inverse=True, return_counts=True)
    sums = values.new_zeros(counts.shape[0]).index_add(0, number, values)
    return sums / counts, counts.to(values.dtype)


def stop_shares(context: Context) -> Tensor:
    """p_m ``[M, supervised]`` of rows that ran all M depths: lambda_m prod_{j<m} (1 - lambda_j), the last the rest."""
    shares = []
    for ran in context.trace.depths:
        keep = context.rows.supervised[ran.index]
        left = ran.survival if ran.continue_logit is not None else torch.zeros_like(ran.survival)
        shares.append((ran.passed.state.mass - left)[keep])
    return torch.stack(shares)


def _losses(context: Context) -> list[Tensor]:
    """Per depth the loss ``[supervised]`` of rows that ran all depths."""
    count = context.rows.count
    if any(ran.index.shape[0] != count for ran in context.trace.depths):
        raise ValueError("this objective compares depths: train with method.training_routing 'every_row'")
    return [-ran.log_prob[context.rows.supervised] for ran in context.trace.depths]


def _loss(language: Tensor, routing: Tensor | None = None, weight: float = 0.0) -> Loss:
    if routing is None:
        return Loss(language, torch.zeros_like(language.detach()))
    return Loss(language + weight * routing, routing.detach())
