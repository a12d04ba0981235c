"""One worker's training, from inputs to the trained weights: convert, shard, resume, loop, gather."""

import os
import sys
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from fathom.checkpoint.store import CheckpointStore
from fathom.config.schema import RunConfig
from fathom.model.folder import is_added, load_model
from fathom.objectives.root import TrainingRoot
from fathom.parallel.averaged import AveragedStrategy
from fathom.parallel.strategy import Strategy, create_strategy
from fathom.storage import files
from fathom.train.group import Group
from fathom.train.inputs import Inputs
from fathom.train.kept import store_kept
from fathom.train.length import run_length
from fathom.train.loop import Hooks, run_steps
from fathom.train.place import CHECKPOINTS, REFUSED, Place, stop_requests
from fathom.train.profiling import profiler
from fathom.train.progressed import Progressed
from fathom.train.refused import RefusedSteps
from fathom.train.saving import Saver
from fathom.train.state import Found, find_checkpoint, read_weights, refuse_changes, refuse_other_data, restore_state
from fathom.train.watchdog import watched

P = ParamSpec("P")
T = TypeVar("T")


class Outcome(NamedTuple):
    """What training gives.

    Attributes:
        weights: the model's parameters by name, whole, on the CPU; None on ranks other than 0.
        weights_step: the step whose they are: the last one, or that of the best checkpoint.
        state: counters and curves.
        finished: False when the run was asked to stop before its last step.
        started_at: steps that an earlier attempt had done.
        stat_names: names of ``state.calibration``.
    """

    weights: dict[str, Tensor] | None
    weights_step: int
    state: Progressed
    finished: bool
    started_at: int
    stat_names: list[str]


MODEL = "model."
"""Begins the names that the model's parameters have in the root."""
Evaluate = Callable[[int, dict[str, Tensor]], dict[str, float]]
"""(step, whole weights) to metrics: called on rank 0 every ``train.eval_every_steps``."""


def use_threads(cfg: RunConfig, group: Group) -> None:
    """Give each worker its share of its machine's cores."""
    share = max((os.cpu_count() or 1) // group.local_world, 1)
    torch.set_num_threads(cfg.parallel.threads_per_worker or share)


def train_worker(
    cfg: RunConfig,
    inputs: Inputs,
    place: Place,
    group: Group,
    record: Callable[[int, dict[str, float]], None],
    evaluate: Evaluate,
) -> Outcome:
    """Train on this worker, together with all others.

    Args:
        cfg: the recipe.
        inputs: from :func:`fathom.train.inputs.fetch_inputs`.
        place: where checkpoints go and come from.
        group: the workers.
        record: (step, metrics), called on rank 0.
        evaluate: called on rank 0.

    Raises:
        ResumeRefused: there is a checkpoint of another configuration or other data.
        FathomError: storage refused, or the gradient was not finite too often.
    """
    use_threads(cfg, group)
    store = CheckpointStore(files.join(place.uri, CHECKPOINTS))
    run = store_kept(group, store, place.work, cfg.checkpoint.keep)
    found = resumable(cfg, inputs, place, group, store)
    strategy, root = build(cfg, inputs, group)
    state = Progressed() if found is None else restore_state(cfg, strategy, found.folder, found.meta)
    state.total = run_length(cfg, inputs, found and found.meta)
    if group.rank == 0 and cfg.train.tokens_per_parameter is not None:
        print(f"{cfg.train.tokens_per_parameter:g} tokens per parameter: {state.total:,} steps", file=sys.stderr)
    started_at = state.step

    def measure(step: int) -> dict[str, float]:
        weights = model_weights(strategy)
        return group.gather_json(None if weights is None else evaluate(step, weights))[0]

    traced = profiler(place, group.rank, cfg.train.profile_steps, state.step)

    def recorded(step: int, metrics: dict[str, float]) -> None:
        traced(step)
        if group.rank == 0:
            record(step, metrics)

    refused = RefusedSteps(files.join(place.uri, REFUSED), group.rank, inputs.train)
    watch = watched(place, group.rank, cfg.train.hang_timeout_s)
    with watch as alive, stop_requests(place, group.rank) as stop:
        saver = Saver(cfg, strategy, group, store, inputs.train.digest, place.work, run, started_at, alive)
        commit, safe = then(alive, saver.save), lambda: saver.committed
        hooks = Hooks(then(alive, recorded), commit, safe, then(alive, measure), stop, refused)
        with saver:
            finished = run_steps(cfg, strategy, root.model, root.stat_names, inputs.train, state, hooks)
    weights, step = model_weights(strategy), state.step
    if finished and state.best_step not in (0, step):
        step = state.best_step
        weights = weights and read_weights(store, step, weights, place.work / "best")
    return Outcome(weights, step, state, finished, started_at, root.stat_names)


def resumable(cfg: RunConfig, inputs: Inputs, place: Place, group: Group, store: CheckpointStore) -> Found | None:
    """The checkpoint to go on from, if there is one and this recipe may; what killed attempts left goes.

    Raises:
        ResumeRefused: it is of another configuration or other data.
    """
    found = find_checkpoint(group, store, place.work)
    if found is not None:
        refuse_changes(cfg, found.meta, place.allow_change)
        refuse_other_data(cfg, found.meta, inputs.train.digest, place.allow_change)
    if group.rank == 0:
        store.sweep()
    return found


def then(alive: Callable[[], None], action: Callable[P, T]) -> Callable[P, T]:
    """The action, after which the watchdog hears of it."""

    def act(*args: P.args, **named: P.kwargs) -> T:
        result = action(*args, **named)
        alive()
        return result

    return act


def build(cfg: RunConfig, inputs: Inputs, group: Group) -> tuple[Strategy, TrainingRoot]:
    """The converted model, alike on all workers, wrapped for training."""
    root = TrainingRoot(
        load_model(inputs.base, cfg.method, seed=cfg.seed, weights=cfg.model),
        cfg.objective,
        group.collectives,
        cfg.train.precision,
        cfg.train.head_chunk_rows,
        cfg.train.activation_checkpointing,
        cfg.seed,
    )
    root.train()
    units = list(root.model.backbone.layers)
    strategy = create_strategy(
        cfg.parallel.strategy, root, cfg.optimizer, units, group.collectives, group.device, added_parameters(root)
    )
    if cfg.train.ema_decay is not None:
        strategy = AveragedStrategy(strategy, cfg.train.ema_decay)
    return strategy, root


def added_parameters(root: TrainingRoot) -> set[str]:
    """Names in the root of the parameters that the base model lacks, those of an objective's helper among them."""
    names = {name for name, _ in root.named_parameters()}
    return {name for name in names if not name.startswith(MODEL) or is_added(name.removeprefix(MODEL))}


def model_weights(strategy: Strategy) -> dict[str, Tensor] | None:
    """Whole parameters, or their average, by the model's own names, on rank 0; not those of an objective's helper."""
    state = strategy.full_model_state()
    return state and {name.removeprefix(MODEL): value for name, value in state.items() if name.startswith(MODEL)}
