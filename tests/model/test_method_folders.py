"""Every method as a model folder: converted, saved, loaded; layers kept; from scratch; and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.config.load import parse_config
from fathom.config.schema import MethodConfig, ModelConfig, ObjectiveConfig
from fathom.errors import ConfigError
from fathom.model.config import read_config
from fathom.model.folder import load_model, save_model
from fathom.model.looped import LoopedLM
from fathom.model.methods import METHODS, make_method
from fathom.objectives.root import TrainingRoot
from support.models import random_rows, tiny_base_folder, tiny_model, tiny_source

ROWS = random_rows([11, 7])._replace(oracle=torch.ones(18, dtype=torch.int64))
DEPTHS = 3


def config_of(name: str, **changes: Any) -> MethodConfig:
    return MethodConfig(preset=name, max_depth=1 if name == "standard" else DEPTHS, **changes)


def scratch(**shape: int | float | bool | str) -> ModelConfig:
    return ModelConfig(base="unused", weights="random", shape=shape)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers in bf16, as most checkpoints are."""
    folder = tiny_base_folder(tmp_path_factory.mktemp("model") / "base", num_hidden_layers=6)
    state = load_file(folder / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in state.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_a_converted_model_comes_back_bit_for_bit(name: str, base: Path, tmp_path: Path) -> None:
    made = load_model(base, config_of(name), seed=7)
    save_model(made, tmp_path / "made", base)
    again = load_model(tmp_path / "made", seed=8)
    assert again.method == made.method
    before, after = dict(made.named_parameters()), dict(again.named_parameters())
    assert list(before) == list(after)
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    with torch.no_grad():
        assert torch.equal(made(ROWS).log_prob, again(ROWS).log_prob)
    stored, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "made", base))
    added = {key for key in stored if key not in source}
    assert all(key.startswith("fathom.") for key in added) and source.keys() <= stored.keys()
    for key, value in source.items():
        assert stored[key].dtype == value.dtype
        assert torch.equal(stored[key].view(torch.int16), value.view(torch.int16)), key
    assert bool(added) == any(part is not None and list(part.parameters()) for part in (made.update, made.decider))


@pytest.mark.parametrize("name", METHODS)
def test_transformers_reads_the_base_part(name: str, base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(load_model(base, config_of(name)), tmp_path / "made", base)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    ours = load_model(base)
    with torch.no_grad():
        logits = theirs(ROWS.ids[None, :11]).logits[0]
        hidden = ours(ROWS).depths[0].hidden[:11]
        torch.testing.assert_close(ours.logits(hidden), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_kept_layers_are_those_of_the_base(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    kinds: dict[str, Any] = {"layer_types": ["full_attention"] * 6} if architecture == "qwen3" else {}
    base = tiny_base_folder(tmp_path / "base", architecture, num_hidden_layers=6, **kinds)
    keep = (0, 1, 3, 4, 5)
    made = load_model(base, config_of("retrofit", keep_layers=keep))
    save_model(made, tmp_path / "made", base)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["num_hidden_layers"] == 5 and len(config.get("layer_types", keep)) == 5
    source = load_file(base / "model.safetensors")
    for number, layer in enumerate(keep):
        for part in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            mine = made.backbone.layers[number].get_parameter(part)
            assert torch.equal(mine, source[f"model.layers.{layer}.{part}"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    assert theirs.config.num_hidden_layers == 5
    plain = load_model(base, config_of("standard", keep_layers=keep))
    with torch.no_grad():
        want = plain.logits(plain(ROWS).depths[0].hidden[:11])
        torch.testing.assert_close(theirs(ROWS.ids[None, :11]).logits[0], want, atol=1e-4, rtol=0)
        again = load_model(tmp_path / "made")
        assert torch.equal(made(ROWS).log_prob, again(ROWS).log_prob)


@pytest.mark.parametrize("keep", [(), (0, 6), (2, 1), (1, 1)])
def test_layers_that_cannot_be_kept_are_refused(keep: tuple[int, ...], base: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.keep_layers: .* model with 6"):
        load_model(base, config_of("retrofit", keep_layers=keep))


@pytest.mark.parametrize("name", ["standard", "tah2", "abbie-d", "mor-expert", "huginn"])
@pytest.mark.parametrize("tied", [True, False])
def test_from_scratch(name: str, tied: bool, base: Path, tmp_path: Path) -> None:
    """Another shape, nothing of the base's weights, the same again from the same seed; it saves and loads."""
    weights = scratch(hidden_size=48, num_hidden_layers=4, tie_word_embeddings=tied)
    made, same, other = (load_model(base, config_of(name), seed=seed, weights=weights) for seed in (1, 1, 2))
    assert made.config.hidden_size == 48 and made.config.layers == 4 and made.config.tied is tied
    for key, value in made.named_parameters():
        assert bool(value.isfinite().all()) and torch.equal(value, same.get_parameter(key)), key
        if value.dim() == 2 and bool(value.any()):
            assert torch.equal(value, torch.eye(48)) or not torch.equal(value, other.get_parameter(key)), key
    save_model(made, tmp_path / "made", base)
    stored = load_file(tmp_path / "made" / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    again = load_model(tmp_path / "made")
    assert again.config.tied is tied
    with torch.no_grad():
        start = made(ROWS).log_prob
        assert bool(start.isfinite().all())
        # As bf16, the dtype of the base's tensors.
        torch.testing.assert_close(again(ROWS).log_prob, start, atol=0.1, rtol=0)


def test_a_first_loss_from_scratch_is_little_above_guessing(base: Path) -> None:
    """log V, and half the variance of logits that are near N(0, 1)."""
    with torch.no_grad():
        log_prob = load_model(base, config_of("standard"), weights=scratch(num_hidden_layers=4))(ROWS).log_prob
    guessing = math.log(json.loads((base / "config.json").read_text())["vocab_size"])
    assert guessing < -float(log_prob.mean()) < guessing + 1.0


def test_a_size_that_the_base_does_not_name_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.shape\.hidden_sise.*\n.*did you mean 'hidden_size'"):
        load_model(base, config_of("standard"), weights=scratch(hidden_sise=48))


def test_parts_that_two_methods_share_keep_their_weights(base: Path, tmp_path: Path) -> None:
    """TaH's second stage starts from the adapters of its first, also with another decider."""
    first = load_model(base, config_of("tah"), seed=1)
    with torch.no_grad():
        for parameter in first.adapters.up.parameters():
            parameter.fill_(0.25)
    save_model(first, tmp_path / "first", base)
    for changes, kept in (({}, True), ({"decider": "exit_gate"}, False)):
        second = load_model(tmp_path / "first", config_of("tah-decider", **changes), seed=2)
        for key, value in first.adapters.named_parameters():
            assert torch.equal(value, second.adapters.get_parameter(key))
        assert (second.method.decider == first.method.decider) is kept
    fresh = load_model(tmp_path / "first", config_of("tah2"), seed=2)
    assert fresh.adapters is None and torch.equal(fresh.table.embedding, first.table.embedding)


WRONG_NAMES = {
    "preset": ("abie-d", "abbie-d"),
    "span": ("third", "thirds"),
    "update": ("residul", "residual"),
    "visibility": ("duo_casual", "duo_causal"),
    "decider": ("exitgate", "exit_gate"),
    "routing": ("decider_treshold", "decider_threshold"),
    "training_routing": ("every_rows", "every_row"),
    "readout": ("stopmass", "stop_mass"),
}


@pytest.mark.parametrize("axis", WRONG_NAMES)
def test_an_unknown_part_is_refused_with_the_nearest(axis: str, base: Path) -> None:
    wrong, near = WRONG_NAMES[axis]
    with pytest.raises(ConfigError) as caught:
        load_model(base, MethodConfig.model_validate({"preset": "tah2", axis: wrong}))
    assert wrong in caught.value.message and f"did you mean '{near}'?" in caught.value.remedy


def test_three_numbers_are_a_span_in_yaml_too(base: Path) -> None:
    tree = {"name": "x", "model": {"base": "b"}, "data": {"train": "generated:word-problems"}, "train": {"steps": 1}}
    config = parse_config(
        tree | {"method": {"preset": "abbie-d", "span": [1, 3, 2], "keep_layers": [0, 1, 2, 3, 4, 5]}}
    )
    assert tuple(load_model(base, config.method).backbone.span) == (1, 3, 2)
    for wrong in ([1, 3], [1, "3", 2], "1,3,2"):
        with pytest.raises(ConfigError):
            load_model(base, parse_config(tree | {"method": {"preset": "abbie-d", "span": wrong}}).method)


def test_an_unknown_axis_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"method\.readuot.*\n.*did you mean 'readout'"):
        make_method("tah2", readuot="last_depth")
    tree = {"name": "x", "model": {"base": "b"}, "method": {"preset": "tah2", "readuot": "last_depth"}}
    with pytest.raises(ConfigError, match=r"did you mean 'method\.readout'"):
        parse_config(tree | {"data": {"train": "generated:word-problems"}, "train": {"steps": 1}})


IMPOSSIBLE = {
    "a mixture over depths, read once": ("tah2", {"span": "thirds"}, "one only after the last"),
    "a head per depth for the update": ("tah", {"span": "thirds"}, "one only after the last"),
    "likely tokens, states mixed": ("tah2", {"readout": "weighted_states"}, "one only after the last"),
    "a uniform mixture, read once": ("abbie-d", {"readout": "uniform"}, "one only after the last"),
    "a threshold and nobody to ask": ("tah2-fixed", {"routing": "decider_threshold"}, "no decider"),
    "a mixture without gates": ("tah2-fixed", {"readout": "stop_mass"}, "no decider"),
    "a plan that nobody makes": ("tah2", {"routing": "planned"}, "planned at the start, and it has decider 'tah2'"),
    "a plan without depths": ("mor-expert", {"routing": "planned"}, "it has decider 'expert_router'"),
    "a planner asked at every depth": ("mor-token", {"routing": "decider_threshold"}, "it has decider 'token_router'"),
    "a pass that nobody weighs": ("abbie-d", {"update": "routed_residual"}, "no decider"),
    "training by a rule without its head": ("abbie-d", {"training_routing": "expert_choice"}, "training_routing"),
    "many depths, none to enter": ("standard", {"routing": "every_row"}, "one depth only"),
    "many depths, none to enter in training": ("standard", {"training_routing": "every_row"}, "one depth only"),
    "a plan that nobody follows": ("mor-token", {"routing": "every_row"}, "planned depth, and its exit rules"),
    "a plan that training does not follow": ("mor-token", {"training_routing": "random"}, "planned depth"),
    "a coda in every pass, gaps in its keys": (
        "abbie-d",
        {"routing": "divergence"},
        "same_depth.*does not show one key",
    ),
    "a split of other layers": ("abbie-d", {"span": (1, 1, 1)}, "does not split 6 layers"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_parts_that_do_not_go_together_are_refused(what: str) -> None:
    name, axes, says = IMPOSSIBLE[what]
    with pytest.raises(ConfigError, match=says) as caught:
        LoopedLM(read_config(tiny_source(num_hidden_layers=6), "tiny"), make_method(name, DEPTHS, **axes))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("abbie-d", "depth_mean", "a distribution at every depth"),
        ("tah2-fixed", "depth_supervised", "a decider that is asked"),
        ("ouro-adaptive", "router_balance", "a router that plans"),
        ("act", "ponder", "a distribution at every depth"),
        ("tah2", "depth_mean", "every_row"),
        ("tah2", "depth_supervise", "did you mean 'depth_supervised'"),
    ],
)
def test_an_objective_that_the_model_cannot_learn_by_is_refused(name: str, kind: str, says: str) -> None:
    model = tiny_model(name, DEPTHS, num_hidden_layers=6)
    with pytest.raises(ConfigError, match=r"objective\.kind") as caught:
        TrainingRoot(model, ObjectiveConfig(kind=kind))
    assert says in caught.value.remedy


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_by_its_own_objective(name: str) -> None:
    model = tiny_model(name, DEPTHS, threshold=None, num_hidden_layers=6)
    root = TrainingRoot(model, ObjectiveConfig())
    loss, _ = root(*ROWS)
    loss.backward()
    trained = {
        key.split(".")[0] for key, value in model.named_parameters() if value.grad is not None and value.grad.any()
    }
    assert trained == {"decider"} if root.objective.trains == "decider" else {"table", "backbone"} <= trained
