"""Backbones against transformers, packing against documents alone, and model folders that round-trip."""

import json

import pytest
import torch
from safetensors import safe_open

from fathom.config.schema import MethodConfig
from fathom.errors import ModelError
from fathom.model.decider import Decider
from fathom.model.folder import load_model, save_model
from fathom.model.rows import pack_documents
from support.models import document, random_rows, tiny_base_folder, tiny_model, tiny_source

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1000000.0}
SHAPES = {
    "llama-tied": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama3-scaling": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide-heads-untied": ("qwen3", {"head_dim": 20, "tie_word_embeddings": False}),
    "qwen-yarn": ("qwen3", {"rope_parameters": YARN}),
}


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").eval()


def our_logits(model, ids):
    rows = pack_documents([(ids, [True] * len(ids))])
    with torch.no_grad():
        return model.logits(model(rows).depths[0].hidden)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name, tmp_path):
    architecture, changes = SHAPES[name]
    folder = tiny_base_folder(tmp_path / name, architecture, **changes)
    ids = torch.randint(97, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = transformers_model(folder)(torch.tensor([ids])).logits[0]
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(our_logits(load_model(folder), ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["tah2", "tah2-fixed"])
def test_depth_one_of_a_converted_model_is_the_base_model(method, tmp_path):
    """T1."""
    folder = tiny_base_folder(tmp_path)
    ids = list(range(60))
    converted = load_model(folder, MethodConfig(preset=method, max_depth=3))
    torch.testing.assert_close(our_logits(converted, ids), our_logits(load_model(folder), ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["standard", "tah2", "tah2-fixed"])
def test_packed_documents_equal_each_alone(method):
    model = tiny_model(method, max_depth=3)
    rows = random_rows([17, 1, 30, 8])
    packed = model(rows)
    for number in range(4):
        alone = model(document(rows, number))
        keep = rows.sequence == number
        torch.testing.assert_close(packed.log_prob[keep], alone.log_prob, atol=1e-10, rtol=0)
        assert torch.equal(packed.executed[keep], alone.executed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_changes_no_byte_of_the_base(dtype, tmp_path):
    from safetensors.torch import load_file, save_file

    base = tiny_base_folder(tmp_path / "base", "qwen3")
    save_file({k: v.to(dtype) for k, v in load_file(base / "model.safetensors").items()}, base / "model.safetensors")
    model = load_model(base, MethodConfig(preset="tah2", max_depth=4, threshold=0.25), seed=3)
    save_model(model, tmp_path / "out", base)
    with (
        safe_open(base / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "out/model.safetensors", "pt") as after,
    ):
        for name in before.keys():  # noqa: SIM118 - safe_open is not a mapping
            assert before.get_tensor(name).dtype == dtype
            assert torch.equal(before.get_tensor(name).view(torch.uint8), after.get_tensor(name).view(torch.uint8))
    again = load_model(tmp_path / "out")
    assert again.method == model.method
    for (name, ours), theirs in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_exported_folder_loads_in_transformers(tmp_path):
    base = tiny_base_folder(tmp_path / "base")
    model = load_model(base, MethodConfig(preset="tah2", max_depth=2))
    with torch.no_grad():
        model.backbone.layers[0].mlp.up_proj.weight.add_(0.3)
    save_model(model, tmp_path / "out", base)
    ids = list(range(40))
    with torch.no_grad():
        theirs = transformers_model(tmp_path / "out")(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(our_logits(model, ids), theirs, atol=1e-4, rtol=0)
    assert (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (tiny_source("mamba"), "unknown architecture 'mamba'"),
        (
            tiny_source("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}),
            "rotary scaling 'dynamic'",
        ),
        (tiny_source("llama", auto_map={"AutoModel": "x.Y"}), "auto_map"),
        (tiny_source("llama", mlp_bias=True), "bias in the MLP"),
    ],
)
def test_unknown_shapes_are_refused(source, says, tmp_path):
    folder = tiny_base_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(source))
    with pytest.raises(ModelError, match=says):
        load_model(folder)


def test_damaged_folders_are_refused(tmp_path):
    folder = tiny_base_folder(tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(config) | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lack 9 tensors .*model\.layers\.2"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(json.loads(config) | {"intermediate_size": 50}))
    with pytest.raises(ModelError, match="has shape"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model(folder)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_model(folder)


def test_new_parts_depend_on_the_seed_alone(tmp_path):
    folder = tiny_base_folder(tmp_path)
    method = MethodConfig(preset="tah2", max_depth=2)
    one, same, other = (load_model(folder, method, seed=seed) for seed in (1, 1, 2))
    first, second, third = (model.decider for model in (one, same, other))
    assert isinstance(first, Decider) and isinstance(second, Decider) and isinstance(third, Decider)
    assert torch.equal(first.join.weight, second.join.weight)
    assert not torch.equal(first.join.weight, third.join.weight)
    assert first.join.weight.abs().max() <= (3 * 32) ** -0.5
    assert 0.005 < first.score.weight.std() < 0.015
