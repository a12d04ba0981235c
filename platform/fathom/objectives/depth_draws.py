"""Depths that a forward is run at when they are drawn: alike on all ranks, since the key is."""

import math
import random

from fathom.config.schema import ObjectiveConfig
from fathom.model.levels import LoopOptions
from fathom.model.looped import LoopedLM
from fathom.objectives.context import Draw

SIGMA = 0.5
"""Of the log-normal (Huginn, methods 4.2)."""


def draw_depth(mean: float, key: int) -> int:
    """A depth from Huginn's log-normal Poisson distribution: p ~ Poisson(LogNormal(ln mean - sigma^2 / 2, sigma)) + 1.

    Its mean is ``mean + 1``, with a heavy tail to the right.
    """
    source = random.Random(key)
    rate = source.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)
    return _poisson(rate, source) + 1


def _poisson(rate: float, source: random.Random) -> int:
    """Arrivals in a time of ``rate``, one exponential wait after the other."""
    arrivals, clock = 0, source.expovariate(1.0)
    while clock < rate:
        arrivals += 1
        clock += source.expovariate(1.0)
    return arrivals


def mean_depth(config: ObjectiveConfig, progress: float) -> float:
    """The mean of the draw at this time: from 1 up to ``mean_depth`` over the curriculum's share of the run
    (retrofitted recurrence, methods 6.4)."""
    assert config.mean_depth is not None
    if not config.curriculum_ratio:
        return config.mean_depth
    return max(1.0, math.ceil(config.mean_depth * min(1.0, progress / config.curriculum_ratio)))


def sampled_depth(options: LoopOptions, model: LoopedLM, config: ObjectiveConfig, draw: Draw) -> LoopOptions:
    """A drawn depth for the whole forward, the gradient through its last passes only (truncated backprop).

    Draws above M are cut to M, so that what a forward costs is bounded.
    """
    if config.mean_depth is None:
        return options
    depth = min(draw_depth(mean_depth(config, draw.progress), draw.key), model.method.max_depth)
    return options._replace(max_depth=depth, constant_depths=max(0, depth - config.gradient_depths))


def capacity_warmup(options: LoopOptions, model: LoopedLM, config: ObjectiveConfig, draw: Draw) -> LoopOptions:
    """A router's capacities come down from every row along a cosine (MoR's ``cap_warmup``, methods 7.2)."""
    if not config.capacity_warmup_ratio:
        return options
    done = min(1.0, draw.progress / config.capacity_warmup_ratio)
    return options._replace(narrowed=(1.0 - math.cos(math.pi * done)) / 2.0)


def supervised_depths(options: LoopOptions, model: LoopedLM, config: ObjectiveConfig, draw: Draw) -> LoopOptions:
    """K of the M depths, drawn for the whole forward, each with a gradient through itself alone (LoopUS, 9.2)."""
    chosen = drawn_depths(model.method.max_depth, config, draw)
    return options._replace(read_depths=frozenset(chosen), detach_between=True)


def drawn_depths(max_depth: int, config: ObjectiveConfig, draw: Draw) -> list[int]:
    """K of M depths, increasing."""
    depths = range(1, max_depth + 1)
    return sorted(random.Random(draw.key).sample(depths, min(config.supervised_depths, max_depth)))
