"""Drawn depths: their statistics, that a key decides them, truncated backprop, and the curriculum of the mean (T18)."""

import math
from collections import Counter
from functools import cache

import pytest

from fathom.config.schema import ObjectiveConfig
from fathom.model.levels import LoopOptions
from fathom.model.looped import LoopedLM
from fathom.objectives.context import Draw
from fathom.objectives.depth_draws import SIGMA, draw_depth, mean_depth, sampled_depth, supervised_depths
from support.models import tiny_model

DRAWS = 20_000


@pytest.mark.parametrize("mean", [1.0, 4.0, 32.0])
def test_mean_and_spread_are_those_of_the_log_normal_poisson(mean: float) -> None:
    """E[p] = mean + 1; Var[p] = mean + mean^2 (exp(sigma^2) - 1), the Poisson's and the rate's (methods 4.2)."""
    draws = [draw_depth(mean, key) for key in range(DRAWS)]
    variance = mean + mean**2 * (math.exp(SIGMA**2) - 1)
    average = sum(draws) / DRAWS
    assert average == pytest.approx(mean + 1, abs=4 * math.sqrt(variance / DRAWS))
    spread = sum((draw - average) ** 2 for draw in draws) / DRAWS
    assert spread == pytest.approx(variance, rel=0.1)
    assert min(draws) >= 1 and sum(draw > mean + 1 for draw in draws) < DRAWS / 2, "a tail to the right"


def test_small_draws_have_the_exact_probabilities() -> None:
    """P(p = 1) = E[exp(-rate)], by integrating over the log-normal."""
    mean, steps = 2.0, 4000
    mu = math.log(mean) - SIGMA**2 / 2
    points = [-6 + 12 * (step + 0.5) / steps for step in range(steps)]
    density = [math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * 12 / steps for z in points]
    counts = Counter(draw_depth(mean, key) for key in range(DRAWS))
    for depth in (1, 2, 3):
        rates = [math.exp(mu + SIGMA * z) for z in points]
        share = sum(
            weight * math.exp(-rate) * rate ** (depth - 1) / math.factorial(depth - 1)
            for weight, rate in zip(density, rates, strict=True)
        )
        assert counts[depth] / DRAWS == pytest.approx(share, abs=4 * math.sqrt(share / DRAWS))


def test_a_key_decides_the_draw() -> None:
    assert [draw_depth(8, key) for key in range(50)] == [draw_depth(8, key) for key in range(50)]
    assert len({draw_depth(8, key) for key in range(50)}) > 5


@cache
def huginn(max_depth: int) -> LoopedLM:
    return tiny_model("huginn", max_depth, num_hidden_layers=4)


def options(mean: float | None, key: int, max_depth: int = 64, progress: float = 1.0, **config: float) -> LoopOptions:
    settings = ObjectiveConfig.model_validate({"mean_depth": mean, **config})
    return sampled_depth(LoopOptions(), huginn(max_depth), settings, Draw(key, progress))


@pytest.mark.parametrize("key", range(12))
def test_the_gradient_covers_the_last_passes(key: int) -> None:
    """n = max(p - 8, 0) passes without gradient, then min(8, p) with (methods 4.2)."""
    drawn = draw_depth(10.0, key)
    found = options(10.0, key)
    assert (found.max_depth, found.constant_depths) == (drawn, max(drawn - 8, 0))
    assert options(10.0, key, gradient_depths=3).constant_depths == max(drawn - 3, 0)


def test_draws_never_exceed_the_models_depths_and_none_is_asked_for_none() -> None:
    assert {options(30.0, key, max_depth=6).max_depth for key in range(20)} == {6}
    assert options(None, 1) == LoopOptions()


def test_the_mean_grows_over_its_share_of_the_run() -> None:
    """ceil(max_mean * step / (share * steps)), from 1, then constant (methods 6.4)."""
    config = ObjectiveConfig(mean_depth=8, curriculum_ratio=0.25)
    assert [mean_depth(config, done / 100) for done in (0, 1, 4, 12, 13, 24, 25, 26, 100)] == [
        1,
        1,
        2,
        4,
        5,
        8,
        8,
        8,
        8,
    ]
    assert mean_depth(ObjectiveConfig(mean_depth=8), 0.0) == 8
    early = [options(16.0, key, progress=0.0, curriculum_ratio=0.5).max_depth or 0 for key in range(300)]
    late = [options(16.0, key, progress=0.5, curriculum_ratio=0.5).max_depth or 0 for key in range(300)]
    assert sum(early) / 300 == pytest.approx(2, abs=0.4) and sum(late) / 300 == pytest.approx(17, abs=2)


def test_supervised_depths_are_drawn_evenly_without_repeats() -> None:
    """K of the M depths (methods 9.2), each as often as the others."""
    model = tiny_model("loopus", 10, num_hidden_layers=4)
    config = ObjectiveConfig(supervised_depths=3)
    counts: Counter[int] = Counter()
    for key in range(2000):
        found = supervised_depths(LoopOptions(), model, config, Draw(key))
        assert len(found.read_depths) == 3 and found.detach_between
        counts.update(found.read_depths)
    assert set(counts) == set(range(1, 11)) and max(abs(count - 600) for count in counts.values()) < 100
    all_of_them = supervised_depths(LoopOptions(), model, ObjectiveConfig(supervised_depths=20), Draw())
    assert all_of_them.read_depths == frozenset(range(1, 11))


def test_capacities_come_down_along_a_cosine() -> None:
    """MoR's warm-up: every row runs every recursion at first, the designed shares at the end."""
    from fathom.objectives.root import TrainingRoot
    from fathom.objectives.stats import summarise
    from support.models import random_rows, tiny_model

    model, rows = tiny_model("mor-expert", 4, num_hidden_layers=4), random_rows([40], supervised=1.0)
    root = TrainingRoot(model, ObjectiveConfig(capacity_warmup_ratio=0.5)).train()
    ran = {}
    for progress in (0.0, 0.25, 0.5, 1.0):
        _, stats = root(*rows, draw=(0, progress))
        at = dict(zip(root.stat_names, stats.tolist(), strict=True))
        ran[progress] = [at[f"rows/{m}"] for m in range(1, 5)]
    assert ran[0.0] == [40, 40, 40, 40]
    assert ran[0.25] == [40, 35, 30, 25]
    assert ran[0.5] == ran[1.0] == [40, 30, 20, 10]
    assert summarise(root.stat_names, stats)["mean_depth"] == pytest.approx(2.5, abs=0.1)
