"""The loop over optimizer steps. Everything a step does follows from its number, so a resumed run repeats nothing."""

import hashlib
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.config.schema import RunConfig
from fathom.data.packing import micro_batch_rows
from fathom.data.prepared import Prepared
from fathom.errors import FathomError
from fathom.model.flops import forward_flops
from fathom.model.looped import LoopedLM
from fathom.objectives.context import Draw
from fathom.objectives.pool import decide_step
from fathom.objectives.stats import summarise
from fathom.parallel.strategy import Strategy
from fathom.train.machine import machine_metrics
from fathom.train.plan import StepPlan, plan_step
from fathom.train.progress import Progress
from fathom.train.progressed import Progressed
from fathom.train.refused import RefusedSteps
from fathom.train.schedule import learning_rate

MOST_REFUSED = 3
"""Steps in a row whose gradient is not finite before the run gives up."""
CALIBRATION_STEPS = 20
"""The last steps whose decisions the calibration plot shows."""


class Hooks(NamedTuple):
    """What the loop calls and does not know about; each on every rank, in step with the others.

    Attributes:
        record: (step, metrics) after each step; acts on rank 0.
        commit: makes a checkpoint of the current state; asked to wait, it returns when that is committed.
        safe: the newest step that is committed.
        evaluate: measures held-out data, every ``train.eval_every_steps``; gives what it found, alike on all ranks.
        stop: whether this rank was asked to stop.
        refused: keeps what a step read that is not applied.
    """

    record: Callable[[int, dict[str, float]], None]
    commit: Callable[[Progressed, bool], None]
    safe: Callable[[], int]
    evaluate: Callable[[int], dict[str, float]]
    stop: Callable[[], bool]
    refused: RefusedSteps


def run_steps(
    cfg: RunConfig,
    strategy: Strategy,
    model: LoopedLM,
    stat_names: list[str],
    prepared: Prepared,
    state: Progressed,
    hooks: Hooks,
) -> bool:
    """Train from ``state.step`` to ``state.total``, updating ``state``.

    Returns:
        True when all steps are done, or evaluations stopped getting better (``train.early_stop_evals``); False when
        asked to stop before. A checkpoint is committed either way.

    Raises:
        FathomError: the gradient was not finite :data:`MOST_REFUSED` times in a row; the last good state is committed.
    """
    total = state.total
    with Progress(total, state.step, enabled=strategy.rank == 0) as progress:
        if state.step:
            progress.note(f"resumed: {state.step} of {total} steps were done")
        while state.step < total and not given_up(cfg, state):
            metrics = one_step(cfg, strategy, model, stat_names, prepared, state, hooks.refused)
            hooks.record(state.step, metrics)
            progress.step(state.step, metrics, hooks.safe())
            stopping = strategy.collectives.any(hooks.stop())
            # Before the commit: a run that goes on from this checkpoint knows what was found here.
            best = evaluated(cfg, state, hooks)
            ending = stopping or state.step == total or given_up(cfg, state) or state.refused_in_a_row >= MOST_REFUSED
            if ending or best or state.step % cfg.checkpoint.every_steps == 0:
                hooks.commit(state, ending)
            if state.refused_in_a_row >= MOST_REFUSED:
                raise not_finite(state.step, hooks.refused.uri)
            if stopping and state.step < total:
                progress.note(f"stopped as asked; step {state.step} is committed and the run can go on from it")
                return False
        if given_up(cfg, state) and state.step < total:
            progress.note(f"{state.evals_since_best} evaluations without a better one than step {state.best_step}'s")
    return True


def evaluated(cfg: RunConfig, state: Progressed, hooks: Hooks) -> bool:
    """Measure if it is time; whether that gave the best ``checkpoint.best_metric`` so far.

    The last step is measured after training, and here too if it may be the best.
    """
    every, metric = cfg.train.eval_every_steps, cfg.checkpoint.best_metric
    last = state.step == state.total
    if not every or (state.step % every and not last) or (last and metric is None):
        return False
    found = hooks.evaluate(state.step)
    if metric is None:
        return False
    # A depth that no held-out token ran has no metric: the run goes on, and this evaluation is not the best.
    return state.judge(found.get(metric, math.nan))


def given_up(cfg: RunConfig, state: Progressed) -> bool:
    """Whether the last evaluations say that training on makes nothing better."""
    return 0 < cfg.train.early_stop_evals <= state.evals_since_best


def one_step(
    cfg: RunConfig,
    strategy: Strategy,
    model: LoopedLM,
    stat_names: list[str],
    prepared: Prepared,
    state: Progressed,
    refused: RefusedSteps,
) -> dict[str, float]:
    """One optimizer step: all its micro-batches, one division by the step's supervised tokens, one update."""
    begin = time.perf_counter()
    plan = plan_step(cfg, prepared, state.step, strategy.rank, strategy.world)
    rate = learning_rate(cfg.schedule, cfg.optimizer.learning_rate, state.step, state.total)
    state.step += 1
    if not plan.supervised:
        state.empty_steps += 1
        return {"learning_rate": rate, "steps_empty": float(state.empty_steps)}
    stats, losses = accumulate(cfg, strategy, prepared, plan, state, len(stat_names))
    norm = strategy.step(rate, cfg.optimizer.clip_norm)
    stats = strategy.sum(stats)
    found = dict(zip(stat_names, stats.tolist(), strict=True))
    if found["supervised"] != plan.supervised:
        raise RuntimeError(f"the step was to hold {plan.supervised} targets, its forwards saw {found['supervised']}")
    finite = math.isfinite(norm)
    state.updates = strategy.updates
    state.refused_in_a_row = 0 if finite else state.refused_in_a_row + 1
    state.refused_steps += not finite
    if not finite:
        refused.save(state.step, plan, [float(loss) for loss in losses], norm)
    seconds = time.perf_counter() - begin
    count(state, plan, stats, seconds)
    metrics = summarise(stat_names, stats) | {
        "learning_rate": rate,
        "steps_refused": float(state.refused_steps),
        "steps_empty": float(state.empty_steps),
        "tokens_per_second": plan.tokens / seconds,
        "step_seconds": seconds,
        "micro_batches": float(len(plan.micro_batches)),
        "epoch": state.step * cfg.train.examples_per_step / len(prepared),
        "flops_per_token": (flops := flops_per_token(model, found)),
        "tokens_seen": float(state.tokens),
    }
    metrics |= machine_metrics(cfg, model, strategy.device, strategy.world, flops, plan.tokens / seconds)
    # A tracking server has no place for NaN or infinity; the count of refused steps tells of them.
    metrics = {name: value for name, value in (metrics | {"grad_norm": norm}).items() if math.isfinite(value)}
    state.remember(state.step, metrics)
    return metrics


def draw_key(seed: int, step: int, micro_batch: int) -> int:
    """What keys a micro-batch's drawn depths: alike on all ranks and after a resume; 56 bits."""
    digest = hashlib.sha256(f"{seed} {step} {micro_batch}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def accumulate(
    cfg: RunConfig, strategy: Strategy, prepared: Prepared, plan: StepPlan, state: Progressed, width: int
) -> tuple[Tensor, list[Tensor]]:
    """Forward and backward of all micro-batches of the step before ``state.step``; this rank's summed statistics, and
    the summed loss of each."""
    step, losses = state.step - 1, []
    stats = torch.zeros(width, dtype=torch.float64, device=strategy.device)
    batches = [
        (
            micro_batch_rows(prepared, examples).to(strategy.device),
            Draw(draw_key(cfg.seed, step, number), step / state.total),
        )
        for number, examples in enumerate(plan.micro_batches)
    ]
    decided = None
    if cfg.objective.pool == "step":
        decided = decide_step(strategy.root, batches, cfg.objective, strategy.collectives)
    for number, (rows, draw) in enumerate(batches):
        given = {} if decided is None else decided[number]._asdict()
        loss, seen = strategy.root(*rows, draw=draw, **given)
        strategy.backward(loss / plan.supervised, last=number == len(batches) - 1)
        stats += seen
        losses.append(loss.detach())
    return stats, losses


def count(state: Progressed, plan: StepPlan, stats: Tensor, seconds: float) -> None:
    """Add a step to the counters; old calibration sums fade so that about the last steps remain."""
    state.tokens += plan.tokens
    state.supervised_tokens += plan.supervised
    state.seconds += seconds
    values = torch.nan_to_num(stats).tolist()
    kept = state.calibration or [0.0] * len(values)
    fade = 1.0 - 1.0 / CALIBRATION_STEPS
    state.calibration = [old * fade + new for old, new in zip(kept, values, strict=True)]


def flops_per_token(model: LoopedLM, found: dict[str, float]) -> float:
    """Forward FLOPs per token of the step, by the depths that its rows really ran."""
    depths = range(1, model.method.max_depth + 1)
    rows, pairs = ([found[f"{what}/{m}"] for m in depths] for what in ("rows", "pairs"))
    return forward_flops(model.config, model.method, rows, pairs, training=True) / max(found["rows"], 1.0)


def not_finite(step: int, refused_uri: str) -> FathomError:
    """The message of a run that diverged."""
    return FathomError(
        f"the gradient was not finite in {MOST_REFUSED} steps in a row, the last of them step {step}",
        f"look at what they read, in {refused_uri}; lower optimizer.learning_rate, or set train.precision to fp32; "
        "the state before them is committed",
    )
