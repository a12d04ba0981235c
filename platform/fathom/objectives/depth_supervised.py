"""TaH2's objective: the mixture's likelihood, and decisions that learn from measured gains (methods 1.3, 1.4)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.config.schema import ObjectiveConfig
from fathom.model.levels import LoopOptions, Trace
from fathom.model.looped import LoopedLM
from fathom.objectives.context import Context, Draw, Loss, ran_in
from fathom.objectives.labels import DepthLabels, depth_labels
from fathom.objectives.value_head import predicted_gains, value_error


def depth_supervised(context: Context) -> Loss:
    """-log q of the mixture + alpha_D times the decisions' cost (Eq. 7, 25, 26), and times the value head's, if any."""
    predicted = predicted_gains(context.helper, context.trace, context.model.method.max_depth)
    labels = context.labels
    if labels is None:
        labels = depth_labels(ran_in(context, predicted))
    language = -context.trace.log_prob[context.rows.supervised].sum()
    decisions = decision_loss(context.trace, labels)
    total = language + context.config.decider_weight * decisions
    if predicted is None:
        return Loss(total, decisions.detach(), labels)
    pairs = zip(predicted, labels, strict=True)
    error = torch.stack([value_error(value[at.measured], at.gain[at.measured]) for value, at in pairs]).sum()
    total = total + context.config.decider_weight * error
    return Loss(total, decisions.detach(), labels, [value.detach() for value in predicted])


def decision_loss(trace: Trace, labels: list[DepthLabels]) -> Tensor:
    """Sum over depths and supervised rows of w * BCE, the continue class times beta (Eq. 25, 26); a scalar."""
    total = trace.log_prob.new_zeros(())
    for ran, at in zip(trace.depths, labels, strict=False):
        if ran.continue_logit is None:
            continue
        logit, keep = ran.continue_logit, at.supervised
        total = total + F.binary_cross_entropy_with_logits(
            logit[keep],
            at.label[keep].to(logit.dtype),
            weight=at.cost[keep].to(logit.dtype),
            pos_weight=logit.new_tensor(at.balance),
            reduction="sum",
        )
    return total


def exploration(options: LoopOptions, model: LoopedLM, config: ObjectiveConfig, draw: Draw) -> LoopOptions:
    """Options beyond the paper, off by default: a share of stopped rows goes on; the threshold grows from 0."""
    threshold = model.method.threshold
    if config.threshold_warmup_ratio:
        threshold *= min(1.0, draw.progress / config.threshold_warmup_ratio)
    return options._replace(threshold=threshold, explore=config.explore_share)
