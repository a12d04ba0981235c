"""What a person calls a model on the command line, turned into a verified local folder."""

from pathlib import Path


def local_folder(reference: str, tracking_uri: str | None = None) -> Path:
    """The model folder that a reference means, fetched and verified when it lies elsewhere.

    Args:
        reference: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` (registered in MLflow), the folder or URI
            of an exported model, or anything ``model.base`` takes in a recipe.
        tracking_uri: MLflow server for ``models:/``; default the local stack's.

    Raises:
        ModelError: nothing there.
        CheckpointError: bytes differ from the manifest, or the manifest from what was registered.
    """
    from fathom.model.hub import resolve_base
    from fathom.storage import files

    if reference.startswith("models:/"):
        from fathom.tracking.registry import resolve_model

        registered = resolve_model(reference, tracking_uri)
        return _fetched(registered.source, registered.digest)
    if files.exists(files.join(reference, "MANIFEST.json")):
        return _fetched(reference, None)
    return resolve_base(reference)


def _fetched(uri: str, digest: str | None) -> Path:
    """Fetch a published folder once; its digest names the copy, so another version is another copy."""
    import shutil
    import tempfile

    from fathom.errors import CheckpointError
    from fathom.model.hub import cache_root
    from fathom.storage.manifest import fetch_folder, read_manifest

    stored = read_manifest(uri)
    if digest is not None and stored.digest != digest:
        raise CheckpointError(
            f"{uri}: its manifest has digest {stored.digest[:12]}, the registered version has {digest[:12]}",
            "the folder changed after it was registered: export and register it again, or choose another version",
        )
    folder = cache_root() / "published" / stored.digest
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        fetch_folder(uri, work / "model")
        if not folder.exists():
            (work / "model").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
