"""Which model is served and where its bytes are: resolved once, so that every replica serves the same version."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from fathom.errors import CheckpointError, ModelError
from fathom.model.config import read_config
from fathom.model.folder import SECTION
from fathom.model.hub import cache_root, require_specification, resolve_base
from fathom.storage import files
from fathom.storage.manifest import MANIFEST, fetch_folder, read_manifest

REGISTRY = "models:/"


class Source(NamedTuple):
    """A model to serve.

    Attributes:
        name: what requests call it.
        uri: a local folder, the URI of a published folder, or a hub specification; no alias.
        version: in the registry, if it came from there.
        digest: of the published folder's manifest, if known.
    """

    name: str
    uri: str
    version: str | None = None
    digest: str | None = None


def resolve(model: str, tracking_uri: str | None = None) -> Source:
    """Look up an alias or version, or take a folder, URI or hub specification as it is.

    Raises:
        ModelError: nothing there.
        ServiceError: the registry does not answer.
    """
    if model.startswith(REGISTRY):
        from fathom.tracking.registry import resolve_model

        found = resolve_model(model, tracking_uri)
        return Source(found.name, found.source, str(found.version), found.digest)
    if "://" not in model and Path(model).is_dir():
        folder = Path(model).resolve()
        if not (folder / "config.json").exists():
            raise ModelError(f"{model} holds no config.json", "give a model folder, an export or a checkpoint's model")
        return Source(folder.name, str(folder))
    if "://" not in model and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise ModelError(f"{model} does not exist", "give a model folder, a URI, or models:/NAME@ALIAS")
    return Source(model.rstrip("/").rsplit("/", 1)[-1].removeprefix("pypi:"), model)


def local_folder(source: Source, cache: Path | None = None) -> Path:
    """The model as a local folder; what is fetched is verified byte by byte and kept under its digest.

    Raises:
        CheckpointError: bytes that are not those of the manifest, or not the version that was registered.
    """
    if "://" not in source.uri and (Path(source.uri) / "config.json").exists() and source.digest is None:
        return Path(source.uri)
    published = ("://" in source.uri or Path(source.uri).is_dir()) and files.exists(files.join(source.uri, MANIFEST))
    if not published and source.digest is None:
        return resolve_base(source.uri, cache)
    manifest = read_manifest(source.uri)
    if source.digest is not None and manifest.digest != source.digest:
        raise CheckpointError(
            f"{source.uri} has digest {manifest.digest[:12]}, version {source.version} was registered with "
            f"{source.digest[:12]}: the files were replaced",
            "register the new files as a version of their own",
        )
    return _fetched(source.uri, (cache or cache_root()) / "served" / manifest.digest)


def inspect(source: Source) -> None:
    """Look at a model's configuration before anything starts; a hub specification is looked at when it is fetched.

    Raises:
        ModelError: no model folder, or an architecture that is not supported.
        StorageError: the store refused.
    """
    if "://" not in source.uri and not Path(source.uri).is_dir():
        require_specification(source.uri)
        return
    where = files.join(source.uri, "config.json")
    try:
        config = json.loads(files.read_bytes(where))
    except ValueError as error:
        raise ModelError(f"{where} is not valid JSON: {error}", "export the model again") from error
    config.pop(SECTION, None)
    read_config(config, source.uri)


def _fetched(uri: str, folder: Path) -> Path:
    """Fetch beside the place and move there, so that replicas that start together never see half a model."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        fetch_folder(uri, work)
        if not folder.is_dir():
            os.replace(work, folder)
    except OSError:
        # Another replica was faster.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
