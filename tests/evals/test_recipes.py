"""Every recipe that is shipped loads, and says what its file name says."""

from pathlib import Path

import pytest

from fathom.config.load import config_dict, load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "jobs" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_under_its_own_name(path: Path) -> None:
    config = load_recipe(path)
    assert config.name == path.stem
    assert config.data.heldout, "a recipe without held-out data cannot say whether it helped"
    assert config.tracking.register_as


def test_the_expected_recipes_are_there() -> None:
    assert {path.stem for path in RECIPES} >= {
        "tah2-demo",
        "tah2-smollm2-gsm8k",
        "standard-smollm2-gsm8k",
        "tah2-fixed-smollm2-gsm8k",
        "tah2-qwen3-1.7b",
    }


def test_twins_differ_in_the_method_and_their_names_only() -> None:
    by_name = {path.stem: config_dict(load_recipe(path)) for path in RECIPES}
    reference = by_name["tah2-smollm2-gsm8k"]
    for twin in ("standard-smollm2-gsm8k", "tah2-fixed-smollm2-gsm8k"):
        changed = {key for key, value in by_name[twin].items() if value != reference[key]}
        assert changed == {"name", "method", "tracking"}


def test_the_paper_recipe_has_the_published_hyper_parameters() -> None:
    config = load_recipe(next(path for path in RECIPES if path.stem == "tah2-qwen3-1.7b"))
    optimizer, schedule, train = config.optimizer, config.schedule, config.train
    assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2) == (
        4e-5,
        0.9,
        0.999,
    )
    assert (optimizer.epsilon, optimizer.weight_decay, optimizer.clip_norm) == (
        1e-8,
        0.01,
        1.0,
    )
    assert (schedule.kind, schedule.warmup_ratio, schedule.min_ratio) == (
        "cosine",
        0.03,
        0.1,
    )
    assert (train.steps, train.examples_per_step, train.micro_batch_tokens) == (
        6402,
        128,
        16384,
    )
    assert (train.precision, train.eval_every_steps, config.seed) == ("bf16", 120, 42)
    assert (config.method.preset, config.method.max_depth, config.method.threshold) == (
        "tah2",
        2,
        0.5,
    )
    assert (config.objective.coverage_rho, config.objective.decider_weight) == (
        0.99,
        0.05,
    )
    assert config.parallel.strategy == "zero" and config.data.context_tokens == 16384
