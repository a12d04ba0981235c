"""The shape of a pretrained decoder, read from a Hugging Face ``config.json``."""

from dataclasses import dataclass
from typing import Any

from fathom.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Scalings whose frequencies do not depend on the length of the input.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class BackboneConfig:
    """What the backbone needs to know; ``source`` keeps the whole Hugging Face dictionary."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    rope: dict[str, Any]
    max_positions: int
    source: dict[str, Any]


def read_config(source: dict[str, Any], where: str) -> BackboneConfig:
    """Read a ``config.json`` dictionary.

    Raises:
        ModelError: an architecture, rotary scaling or layer variant that is not supported, or a size is missing; names
        it and ``where``.
    """
    kind = source.get("model_type")
    if "auto_map" in source:
        raise ModelError(
            f"{where}: config.json asks for code of the model's own repository (auto_map)",
            "use a model whose architecture is built in; Fathom never runs code from a model folder",
        )
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{where}: unknown architecture {kind!r}",
            f"use a model of one of: {', '.join(ARCHITECTURES)}",
        )
    if source.get("use_sliding_window") and source.get("sliding_window"):
        raise ModelError(
            f"{where}: sliding-window attention is not supported",
            "use a model with full attention",
        )
    rope = _rope(source, where)
    missing = [key for key in REQUIRED if not isinstance(source.get(key), int)]
    if missing:
        raise ModelError(
            f"{where}: config.json lacks {', '.join(missing)}",
            "copy or download config.json again",
        )
    heads = source["num_attention_heads"]
    return BackboneConfig(
        architecture=kind,
        vocab_size=source["vocab_size"],
        hidden_size=source["hidden_size"],
        layers=source["num_hidden_layers"],
        heads=heads,
        kv_heads=source.get("num_key_value_heads") or heads,
        head_width=source.get("head_dim") or source["hidden_size"] // heads,
        ffn_width=source["intermediate_size"],
        norm_eps=source.get("rms_norm_eps", 1e-6),
        tied=bool(source.get("tie_word_embeddings", False)),
        # Qwen2 always has a bias on q, k and v and none on the output; Llama and Qwen3 say so for all four.
        qkv_bias=kind == "qwen2" or bool(source.get("attention_bias", False)),
        output_bias=kind != "qwen2" and bool(source.get("attention_bias", False)),
        qk_norm=kind == "qwen3",
        rope=rope,
        max_positions=source.get("max_position_embeddings", 2048),
        source=source,
    )


def _rope(source: dict[str, Any], where: str) -> dict[str, Any]:
    """Rotary parameters of both spellings: ``rope_parameters`` and ``rope_theta`` with ``rope_scaling``."""
    rope = dict(source.get("rope_parameters") or source.get("rope_scaling") or {})
    rope.setdefault("rope_theta", source.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope["rope_type"] not in ROPE_TYPES:
        raise ModelError(
            f"{where}: rotary scaling {rope['rope_type']!r} is not supported",
            f"use a model with one of: {', '.join(ROPE_TYPES)}",
        )
    if source.get("mlp_bias"):
        raise ModelError(
            f"{where}: a bias in the MLP is not supported",
            "use a model without mlp_bias",
        )
    return rope
