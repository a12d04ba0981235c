"""Blocks that only Fathom knows, with a second norm or scaled embeddings: by formula, through the loop, in folders."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fathom.config.schema import MethodConfig, ModelConfig
from fathom.errors import ModelError
from fathom.model.config import read_config
from fathom.model.flops import row_flops
from fathom.model.folder import load_model, load_tokenizer, save_model
from fathom.model.looped import LoopedLM
from model.test_methods import assert_close, model_of, rows_of
from support.command import fathom
from support.models import random_rows, tiny_base_folder, tiny_model, tiny_source
from support.reference import decode

SHAPES = [("output", False), ("sum", True), ("none", True)]


def written_out(model: LoopedLM, ids: Tensor) -> Tensor:
    """Logits ``[T, V]`` of one document at depth 1 (methods 3.1, 4.1)."""
    of, config, count = dict(model.named_parameters()), model.config, len(ids)
    heads, groups, width = config.heads, config.heads // config.kv_heads, config.head_width

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * of[f"backbone.{name}.weight"]

    def add(name: str, x: Tensor, out: Tensor) -> Tensor:
        if config.sandwich_norm == "output":
            return norm(name, out) + x
        return norm(name, out + x) if config.sandwich_norm == "sum" else out + x

    def turned(x: Tensor) -> Tensor:
        half = width // 2
        angle = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    x = of["table.embedding"][ids] * (config.hidden_size**0.5 if config.embedding_scale else 1.0)
    for number in range(config.layers):
        at = f"layers.{number}"
        h = norm(f"{at}.input_layernorm", x)
        q, k, v = (
            (h @ of[f"backbone.{at}.self_attn.{name}_proj.weight"].T).reshape(count, -1, width) for name in "qkv"
        )
        k, v = (turned(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        scores = torch.einsum("qhw,khw->hqk", turned(q), k) / width**0.5
        mask = torch.ones(count, count, dtype=torch.bool).triu(1)
        out = torch.einsum("hqk,khw->qhw", scores.masked_fill(mask, -torch.inf).softmax(-1), v)
        out = out.reshape(count, heads * width) @ of[f"backbone.{at}.self_attn.o_proj.weight"].T
        x = add(f"{at}.input_layernorm_2", x, out)
        h = norm(f"{at}.post_attention_layernorm", x)
        gate, up, down = (of[f"backbone.{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = add(f"{at}.post_attention_layernorm_2", x, (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T)
    return norm("norm", x) @ of["table.embedding"].T


@pytest.mark.parametrize(("sandwich", "scale"), SHAPES)
def test_logits_equal_the_formula(sandwich: str, scale: bool) -> None:
    model = tiny_model("standard", sandwich_norm=sandwich, embedding_scale=scale)
    rows = random_rows([14])
    with torch.no_grad():
        got, want = model.logits(model(rows).depths[0].hidden), written_out(model, rows.ids)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
        plain = tiny_model("standard")
        plain.load_state_dict({name: value for name, value in model.state_dict().items() if "_2." not in name})
        assert float((plain.logits(plain(rows).depths[0].hidden) - want).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("name", "sandwich", "scale"),
    [("huginn", "sum", True), ("ouro", "output", False), ("tah2", "output", True), ("tah", "sum", True)],
)
def test_level_synchronous_equals_token_by_token(name: str, sandwich: str, scale: bool) -> None:
    model, rows = model_of(name, sandwich_norm=sandwich, embedding_scale=scale).eval(), rows_of(9, 6)
    with torch.no_grad():
        trace, slow = model(rows), decode(model, rows)
    assert torch.equal(trace.executed, slow["executed"])
    assert_close(trace.log_prob, slow["log_prob"], atol=1e-9)


def test_embeddings_first_state_and_mixed_embeddings_have_one_scale() -> None:
    rows = rows_of(5)
    for name in ("tah", "huginn"):
        model, scaled = model_of(name), model_of(name, embedding_scale=True)
        scaled.load_state_dict(model.state_dict() | {"table.embedding": model.table.embedding / 32**0.5})
        if name == "tah":
            weights = torch.ones(5, 2, dtype=torch.float64)
            mixes = (part.table(mix=(rows.ids[:, None].repeat(1, 2), weights)) for part in (model, scaled))
            assert_close(*mixes)
            continue
        # Huginn starts from A [s; z]: z as before, and s sqrt(d) times as wide.
        half = torch.cat((torch.full((32,), 32**-0.5, dtype=torch.float64), torch.ones(32)))
        scaled.get_parameter("update.adapter.weight").data.mul_(half)
        with torch.no_grad():
            one, two = (part(rows).depths[0].passed.state.u for part in (model, scaled))
        assert_close(one, two)


@pytest.mark.parametrize(("sandwich", "scale"), SHAPES)
def test_norms_and_scales_are_no_matrix_products(sandwich: str, scale: bool) -> None:
    counts, rows = [], rows_of(9, 6)
    for changes in ({}, {"sandwich_norm": sandwich, "embedding_scale": scale}):
        model = model_of("ouro", **changes)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(rows)
        counts.append((row_flops(model.config, model.method), counter.get_total_flops()))
    assert counts[0] == counts[1]


def from_scratch(folder: Path, **shape: str | bool) -> LoopedLM:
    weights = ModelConfig(base=str(folder), weights="random", shape=dict(shape))
    return load_model(folder, MethodConfig(preset="ouro", max_depth=3), seed=5, weights=weights)


def test_a_folder_round_trips_and_transformers_refuses_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = tiny_base_folder(tmp_path / "base")
    model = from_scratch(base, sandwich_norm="output", embedding_scale=True)
    assert bool((model.get_parameter("backbone.layers.1.post_attention_layernorm_2.weight") == 1).all())
    save_model(model, tmp_path / "out", base)
    again, rows = load_model(tmp_path / "out"), random_rows([20])
    assert (again.config.sandwich_norm, again.config.embedding_scale) == ("output", True)
    with torch.no_grad():
        assert torch.equal(again(rows).log_prob, model.eval()(rows).log_prob)
    with pytest.raises(ValueError, match="fathom-llama"):
        AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    assert "refuses" in (tmp_path / "out" / "README.md").read_text()
    assert load_tokenizer(tmp_path / "out").get_vocab() == load_tokenizer(base).get_vocab()
    back = from_scratch(tmp_path / "out", sandwich_norm="none", embedding_scale=False)
    assert back.config.source["model_type"] == "llama", "a plain model again"


def test_usual_values_leave_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    base = tiny_base_folder(tmp_path)
    assert from_scratch(base, sandwich_norm="none", embedding_scale=False).config.source["model_type"] == "llama"
    with pytest.raises(ModelError, match="unknown sandwich_norm 'both'"):
        read_config(tiny_source(sandwich_norm="both"), "here")


def test_export_says_who_can_load_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_base_folder(tmp_path / "base")
    save_model(from_scratch(base, sandwich_norm="sum"), tmp_path / "model", base)
    code, _, said = fathom(capsys, "export", tmp_path / "model", tmp_path / "out")
    assert code == 0 and "transformers refuses it" in said
    assert load_model(tmp_path / "out").config.sandwich_norm == "sum"
    code, _, said = fathom(capsys, "export", tmp_path / "model", tmp_path / "plain", "--base-only")
    assert code == 2 and "no plain model has" in said and not (tmp_path / "plain").exists()
