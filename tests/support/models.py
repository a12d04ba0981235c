"""Tiny random models and rows that several test areas share."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fathom.model.config import read_config
from fathom.model.looped import LoopedLM
from fathom.model.methods import make_method
from fathom.model.rows import PackedRows, pack_documents

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_source(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """A ``config.json`` dictionary of a two-layer model with grouped keys."""
    source = {
        "model_type": architecture,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    if architecture == "qwen3":
        source["head_dim"] = 8
    return source | changes


def tiny_model(
    method: str = "tah2",
    max_depth: int = 2,
    architecture: str = "llama",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    threshold: float | None = 0.5,
    axes: dict[str, Any] | None = None,
    **changes: Any,
) -> LoopedLM:
    """A random model whose decider is loud enough to send some tokens on and stop others; in training mode."""
    model = LoopedLM(
        read_config(tiny_source(architecture, **changes), "tiny"),
        make_method(method, 1 if method == "standard" else max_depth, threshold, **(axes or {})),
    ).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def random_rows(lengths: list[int], vocab: int = 97, seed: int = 0, supervised: float = 0.7) -> PackedRows:
    """Packed documents of random tokens; about a share ``supervised`` of them are targets."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        ids = torch.randint(vocab, (length,), generator=generator).tolist()
        documents.append((ids, (torch.rand(length, generator=generator) < supervised).tolist()))
    return pack_documents(documents)


def document(rows: PackedRows, number: int) -> PackedRows:
    """One document of packed rows, alone."""
    keep = rows.sequence == number
    return PackedRows(*(field[keep] for field in rows))._replace(sequence=torch.zeros_like(rows.ids[keep]))


def tiny_tokenizer_files(folder: Path) -> int:
    """Write a byte-level tokenizer with a ChatML template; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(folder))
    return len(fast)


def tiny_base_folder(folder: Path, architecture: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face shaped base model with random weights and a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = tiny_tokenizer_files(folder)
    source = tiny_source(architecture, vocab_size=vocab, **changes)
    model = LoopedLM(read_config(source, "tiny"), make_method("standard", 1, 0.5))
    generator = torch.Generator().manual_seed(seed)
    from fathom.model.folder import stored_name

    state = {}
    for name, parameter in model.named_parameters():
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        state[stored_name(name)] = 1 + noise if name.endswith("norm.weight") else noise
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(source))
    return folder
