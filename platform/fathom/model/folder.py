"""Model folders: Hugging Face shaped, safetensors and JSON only.

Base weights keep their Hugging Face names, so ``transformers`` still loads the base part; what a method adds is stored
as ``fathom.*``, and ``config.json`` gains a ``fathom`` section that names the point in the axes.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fathom.config.schema import MethodConfig, ModelConfig
from fathom.errors import ModelError
from fathom.model.config import BackboneConfig, is_own, read_config
from fathom.model.initial import changed_shape, match_embedding, reset_base
from fathom.model.looped import LoopedLM
from fathom.model.methods import Method, make_method, method_from_dict, method_of, method_to_dict
from fathom.storage.local import saving_tensors

SECTION = "fathom"
ADDED = ("update", "decider", "adapters")
"""Parts that a base model lacks."""
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


def load_model(
    folder: str | Path,
    method: MethodConfig | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    weights: ModelConfig | None = None,
) -> LoopedLM:
    """Read a model folder.

    Args:
        folder: local, with ``config.json`` and safetensors weights.
        method: None takes the folder's own method (``standard`` for a base model). Given, the model is converted: parts
            that the folder's own method has too keep their weights, what it lacks is initialised from ``seed``.
        dtype: of all parameters.
        seed: of what is initialised.
        weights: with ``weights: random``, the folder gives shape and tokenizer only.

    Raises:
        ModelError: unreadable, of an unknown architecture, or weights that do not fit the configuration.
    """
    folder = Path(folder)
    source = _read_json(folder / "config.json")
    section = source.pop(SECTION, None)
    own = method_from_dict(section, str(folder / "config.json")) if section else make_method("standard")
    chosen = own if method is None else method_of(method)
    scratch = weights is not None and weights.weights == "random"
    keep = None if method is None else method.keep_layers
    shape = changed_shape(source, {} if weights is None else weights.shape, keep)
    model = LoopedLM(read_config(shape, str(folder)), chosen).to(dtype)
    kept = () if section is None or scratch else tuple(p for p in ADDED if getattr(own, p) == getattr(chosen, p))
    model.reset_added(seed)
    if scratch:
        reset_base(model, seed)
    else:
        _load_weights(model, folder, kept, keep)
    if method is not None and method.updater_scale == "embedding" and "update" not in kept:
        match_embedding(model)
    return model.eval()


def read_shape(
    folder: str | Path, method: MethodConfig | None = None, weights: ModelConfig | None = None
) -> BackboneConfig:
    """The shape of a folder's model, without its weights: whether it can be used is known before any work starts.

    Args:
        folder: local.
        method: as for :func:`load_model`: the shape after conversion.
        weights: likewise.

    Raises:
        ModelError: no readable ``config.json``, no safetensors, or an architecture that is not supported.
        ConfigError: a size or a layer that the model does not have.
    """
    folder = Path(folder)
    source = _read_json(folder / "config.json")
    source.pop(SECTION, None)
    keep = None if method is None else method.keep_layers
    shape = read_config(changed_shape(source, {} if weights is None else weights.shape, keep), str(folder))
    _tensor_files(folder)
    return shape


def save_model(
    model: LoopedLM,
    folder: str | Path,
    base_folder: str | Path,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write a model folder that :func:`load_model` and, for the base part, ``transformers`` read.

    Base weights are stored in the dtype they have in ``base_folder``, so weights that did not change keep every byte;
    added parts are stored in fp32.

    Args:
        base_folder: where the base model came from: its tokenizer, template and generation files are copied.
        state: the model's state, when it is sharded elsewhere; default ``model.state_dict()``.
    """
    folder, base_folder = Path(folder), Path(base_folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {stored_name(name): value.detach() for name, value in (state or model.state_dict()).items()}
    dtypes = _stored_dtypes(base_folder)
    tensors = {
        name: value.to(
            "cpu",
            torch.float32 if name.startswith(SECTION) else dtypes.get(name, value.dtype),
        ).contiguous()
        for name, value in stored.items()
    }
    config = dict(model.config.source)
    if model.method != make_method("standard"):
        config[SECTION] = method_to_dict(model.method)
    with saving_tensors(folder / "model.safetensors"):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in COMPANIONS:
        for file in base_folder.glob(pattern):
            if file.resolve().parent != folder.resolve():
                shutil.copyfile(file, folder / file.name)
    (folder / "README.md").write_text(model_card(model.method, model.config))


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's tokenizer, a ``transformers`` fast tokenizer; no code of the folder's is run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(" :")
        raise ModelError(
            f"{folder}: no tokenizer can be read: {reason}",
            "put tokenizer.json and tokenizer_config.json beside config.json",
        ) from error


def model_card(method: Method, config: BackboneConfig) -> str:
    """README of a model folder."""
    architecture = config.architecture
    own = is_own(config.source)
    if method.name == "standard":
        loads = "`transformers` has no such layers and refuses it." if own else "`transformers` loads it."
        return f"# {architecture} model\n\nPlain decoder, written by Fathom. {loads}\n"
    loads = "refuses this folder, whose layers it lacks" if own else "loads the base part"
    return (
        f"# Looped {architecture} model\n\n"
        f"Method `{method.name}`: up to {method.max_depth} passes of the looped layers (span {method.span}); routing\n"
        f"`{method.routing}` with threshold {method.threshold}, readout `{method.readout}`. Written by Fathom;\n"
        "`fathom deploy` serves it.\n\n"
        f"`transformers` {loads}; tensors named `fathom.*` belong to the added parts.\n"
    )


def is_added(name: str) -> bool:
    """Whether a parameter, by our name, belongs to a part that the base model lacks."""
    return name.split(".")[0] in ADDED


def stored_name(name: str) -> str:
    """Our parameter name to its name in ``model.safetensors``."""
    if name == "table.embedding":
        return "model.embed_tokens.weight"
    if name == "table.head":
        return "lm_head.weight"
    if name.startswith("backbone."):
        return "model." + name.removeprefix("backbone.")
    return f"{SECTION}.{name}"


def _load_weights(model: LoopedLM, folder: Path, kept: Sequence[str], keep: Sequence[int] | None) -> None:
    """Fill the base's parameters and those of the ``kept`` added parts from the folder's safetensors, in place; one
    tensor in memory at a time."""
    wanted = {
        _kept_name(stored_name(name), keep): parameter
        for name, parameter in model.named_parameters()
        if not is_added(name) or name.split(".")[0] in kept
    }
    places = _tensor_files(folder)
    missing = sorted(set(wanted) - set(places))
    if missing:
        raise ModelError(
            f"{folder}: the weights lack {len(missing)} tensors of its config.json, the first is {missing[0]}",
            "check that the folder's config.json and safetensors belong together and the download is complete",
        )
    for file in sorted({places[name] for name in wanted}):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in (name for name in wanted if places[name] == file):
                    _fill(wanted[name], reader.get_tensor(name), name, folder)
        except SafetensorError as error:
            raise ModelError(f"{file}: cannot be read: {error}", "copy or download the file again") from error


def _kept_name(name: str, keep: Sequence[int] | None) -> str:
    """The name that a layer's tensor has in a base model of which only some layers are kept."""
    if keep is None or not name.startswith("model.layers."):
        return name
    head, number, rest = name.split(".", 3)[:2], name.split(".", 3)[2], name.split(".", 3)[3]
    return ".".join((*head, str(keep[int(number)]), rest))


def _fill(parameter: torch.nn.Parameter, value: Tensor, name: str, folder: Path) -> None:
    if parameter.shape != value.shape:
        raise ModelError(
            f"{folder}: {name} has shape {tuple(value.shape)}, config.json asks for {tuple(parameter.shape)}",
            "use the config.json that belongs to these weights",
        )
    with torch.no_grad():
        parameter.copy_(value)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: one ``model.safetensors``, or shards named by an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in _read_json(index)["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelError(
            f"{folder}: no model.safetensors",
            "convert the weights to safetensors; Fathom reads no pickled weights",
        )
    try:
        with safe_open(single, framework="pt") as reader:
            return dict.fromkeys(reader.keys(), single)
    except SafetensorError as error:
        raise ModelError(f"{single}: cannot be read: {error}", "copy or download the file again") from error


def _stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    names = {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
    }
    dtypes = {}
    for name, file in _tensor_files(folder).items():
        with safe_open(file, framework="pt") as reader:
            dtypes[name] = names.get(reader.get_slice(name).get_dtype(), torch.float32)
    return dtypes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist",
            "give a Hugging Face shaped folder with a config.json",
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", "copy or download the file again") from error
