"""Every recipe that is shipped loads, says what its file name says, and describes a model that can be built."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fathom.config.load import config_dict, load_recipe, parse_config
from fathom.config.schema import RunConfig
from fathom.model.config import BackboneConfig, read_config
from fathom.model.initial import changed_shape
from fathom.model.looped import LoopedLM
from fathom.model.methods import METHODS, method_of
from fathom.objectives.root import TrainingRoot

RECIPES = sorted((Path(__file__).parents[2] / "jobs" / "recipes").glob("*.yaml"))
BY_NAME = {path.stem: path for path in RECIPES}
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN3 = SMOLLM2 | {"model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936}
SCRATCH_PARAMETERS = 49152 * 192 + 9 * (4 * 192 * 192 + 3 * 192 * 512 + 2 * 192) + 192


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_under_its_own_name(path: Path) -> None:
    config = load_recipe(path)
    assert config.name == path.stem
    assert config.data.heldout, "a recipe without held-out data cannot say whether it helped"
    assert config.tracking.register_as
    assert parse_config(config_dict(config)) == config, "what is stored with a run is read again"


def test_the_expected_recipes_are_there() -> None:
    assert {path.stem for path in RECIPES} >= {
        "tah2-demo",
        "tah2-smollm2-gsm8k",
        "standard-smollm2-gsm8k",
        "tah2-fixed-smollm2-gsm8k",
        "tah2-qwen3-1.7b",
    }


def test_every_method_has_a_recipe() -> None:
    assert {load_recipe(path).method.preset for path in RECIPES} == set(METHODS)


def shape_of(config: RunConfig) -> BackboneConfig:
    source = QWEN3 if "Qwen3" in config.model.base else SMOLLM2
    return read_config(changed_shape(source, config.model.shape, config.method.keep_layers), config.name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_its_model_and_its_objective(path: Path) -> None:
    config = load_recipe(path)
    with torch.device("meta"):
        model = LoopedLM(shape_of(config), method_of(config.method))
    root = TrainingRoot(model, config.objective)
    assert any(parameter.requires_grad for parameter in root.parameters())
    assert ("labels" in root.objective.needs or model.method.training_routing == "oracle") == bool(
        config.data.label_model
    )


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if path.stem.endswith("-scratch")], ids=lambda path: path.stem
)
def test_recipes_from_scratch(path: Path) -> None:
    """Nothing pretrained, tied embeddings, warm-up, stable rate and decay, the same base shape for all."""
    config = load_recipe(path)
    assert config.model.weights == "random" and config.schedule.kind == "wsd"
    with torch.device("meta"):
        model = LoopedLM(shape_of(config), method_of(config.method))
    base = sum(value.numel() for name, value in model.named_parameters() if name.startswith(("table.", "backbone.")))
    second_norms = 0 if model.config.sandwich_norm == "none" else 9 * 2 * 192
    assert model.config.tied and base == SCRATCH_PARAMETERS + second_norms
    as_published = {"huginn-scratch": ("sum", True), "ouro-scratch": ("output", False)}.get(path.stem, ("none", False))
    assert (model.config.sandwich_norm, model.config.embedding_scale) == as_published


ABLATIONS = {
    "standard-smollm2": {"method": {"preset": "standard"}},
    "tah2-fixed-smollm2": {"method": {"preset": "tah2-fixed"}},
    "tah2-last-smollm2": {"method": {"preset": "tah2-last"}},
    "tah2-uniform-weights-smollm2": {"objective": {"weighted": False}},
    "tah2-mismatch-smollm2": {"objective": {"label_rule": "mismatch"}},
    "tah2-rho1-smollm2": {"objective": {"coverage_rho": 1.0}},
    "tah2-sampled-smollm2": {"method": {"routing": "sampled_decisions"}},
    "tah2-top-mix-smollm2": {"method": {"update": "top_mix"}},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_is_one_changed_value(name: str) -> None:
    plain, changed = (config_dict(load_recipe(BY_NAME[stem])) for stem in ("tah2-smollm2", name))
    found = {
        section: {key: value for key, value in changed[section].items() if value != plain[section][key]}
        for section in changed
        if section not in ("name", "tracking") and changed[section] != plain[section]
    }
    assert found == ABLATIONS[name]


def test_methods_are_compared_on_the_same_data_and_steps() -> None:
    reference = load_recipe(BY_NAME["tah2-smollm2"])
    for path in RECIPES:
        tree = yaml.safe_load(path.read_text())
        if tree.get("base") == "tah2-smollm2.yaml":
            config = load_recipe(path)
            assert config.train == reference.train and config.seed == reference.seed, path.stem
            assert config.data.model_copy(update={"label_model": None}) == reference.data, path.stem


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
