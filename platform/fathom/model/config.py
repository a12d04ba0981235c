"""The shape of a decoder, read from a Hugging Face ``config.json``, in which two values may be Fathom's own."""

from dataclasses import dataclass
from typing import Any

from fathom.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Scalings whose frequencies do not depend on the length of the input.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SANDWICHES = ("none", "output", "sum")
"""A second norm behind attention and MLP: of their output, RN(f(RN x)) + x (Ouro, methods 3.1), or of the sum,
RN(f(RN x) + x) (Huginn, methods 4.1)."""
OWN_VALUES = {"sandwich_norm": "none", "embedding_scale": False}
"""Of ``config.json``, with what every pretrained model has; ``embedding_scale`` is Huginn's sqrt(d)."""
OWN_TYPE = "fathom-"
"""Begins the ``model_type`` of a model with other values: transformers refuses it instead of leaving them out."""


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
    sandwich_norm: str
    embedding_scale: bool
    source: dict[str, Any]


def read_config(source: dict[str, Any], where: str) -> BackboneConfig:
    """Read a ``config.json`` dictionary.

    Raises:
        ModelError: an architecture, rotary scaling or layer variant that is not supported, or a size is missing; names
        it and ``where``.
    """
    kind = str(source.get("model_type")).removeprefix(OWN_TYPE)
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
        sandwich_norm=_sandwich(source, where),
        embedding_scale=bool(source.get("embedding_scale", False)),
        source=source,
    )


def with_own_type(source: dict[str, Any]) -> dict[str, Any]:
    """The same dictionary, under a ``model_type`` that transformers refuses if it has values of Fathom's own."""
    own = any(source.get(key, usual) != usual for key, usual in OWN_VALUES.items())
    if own == is_own(source):
        return source
    kind = str(source.get("model_type")).removeprefix(OWN_TYPE)
    return source | {"model_type": OWN_TYPE + kind if own else kind}


def is_own(source: dict[str, Any]) -> bool:
    """Whether only Fathom can run the model of this ``config.json``, also without what a method adds."""
    return str(source.get("model_type")).startswith(OWN_TYPE)


def _sandwich(source: dict[str, Any], where: str) -> str:
    found = source.get("sandwich_norm", "none")
    if found not in SANDWICHES:
        raise ModelError(f"{where}: unknown sandwich_norm {found!r}", f"use one of: {', '.join(SANDWICHES)}")
    return found


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
