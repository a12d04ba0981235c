"""A folder with ``MANIFEST.json``: complete or not there.

The manifest holds size and sha256 of every file and is written last, so whoever finds one finds all it names.
Its digest is the sha256 of its canonical JSON: a name for the content, safe to keep in a registry.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from fathom.errors import CheckpointError
from fathom.storage import files
from fathom.storage.files import FileInfo

MANIFEST = "MANIFEST.json"
FORMAT = "fathom-manifest-1"


class Manifest(NamedTuple):
    """What a published folder holds.

    Attributes:
        files: by relative name.
        meta: whatever the writer said about it, JSON.
        digest: hexadecimal sha256 over files and meta.
    """

    files: dict[str, FileInfo]
    meta: dict[str, Any]
    digest: str


def write_manifest(uri: str, contents: dict[str, FileInfo], meta: dict[str, Any]) -> Manifest:
    """Commit a folder whose files are all there already.

    Raises:
        StorageError: the store refused.
    """
    manifest = Manifest(dict(sorted(contents.items())), meta, _digest(contents, meta))
    body = {
        "format": FORMAT,
        "digest": manifest.digest,
        "meta": meta,
        "files": {name: info._asdict() for name, info in manifest.files.items()},
    }
    files.write_bytes(files.join(uri, MANIFEST), json.dumps(body, indent=1, sort_keys=True).encode() + b"\n")
    return manifest


def read_manifest(uri: str) -> Manifest:
    """The manifest of a published folder, checked against its own digest.

    Raises:
        StorageError: there is none, or the store refused.
        CheckpointError: it is no manifest, or was changed.
    """
    where = files.join(uri, MANIFEST)
    try:
        return _parsed(where, files.read_bytes(where))
    except CheckpointError:  # perhaps it was cut on its way
        return _parsed(where, files.read_bytes(where))


def _parsed(where: str, raw: bytes) -> Manifest:
    try:
        body = json.loads(raw)
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r} is unknown")
        contents = {str(name): FileInfo(int(info["size"]), str(info["sha256"])) for name, info in body["files"].items()}
        meta, digest = dict(body["meta"]), str(body["digest"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: not a readable manifest ({error})", "use another copy of this folder"
        ) from error
    if _digest(contents, meta) != digest:
        raise CheckpointError(f"{where}: its content does not have its digest", "use another copy of this folder")
    for name in contents:
        files.safe_name(name, where)
    return Manifest(contents, meta, digest)


def seal_folder(folder: Path, meta: dict[str, Any]) -> Manifest:
    """Write the manifest of files that stay where they are, on this machine."""
    contents = {
        name: FileInfo((folder / name).stat().st_size, files.sha256_file(folder / name))
        for name in files.list_files(str(folder))
        if name != MANIFEST
    }
    return write_manifest(str(folder), contents, meta)


def publish_folder(local: Path, uri: str, meta: dict[str, Any]) -> Manifest:
    """Upload a folder, check every size, write the manifest last.

    A manifest that was there before is removed first, so that no reader mixes old and new files. Files of an
    earlier publication that the new one does not have are removed after it is committed.
    """
    files.remove_tree(files.join(uri, MANIFEST))
    manifest = write_manifest(uri, files.upload_tree(local, uri, without=(MANIFEST,)), meta)
    for name in set(files.list_files(uri)) - set(manifest.files) - {MANIFEST}:
        files.remove_tree(files.join(uri, name))
    return manifest


def fetch_folder(uri: str, local: Path) -> Manifest:
    """Download a published folder and verify every byte.

    Raises:
        StorageError: no manifest (never finished, or not ours), or the store refused.
        CheckpointError: a file is missing or its bytes are not those of the manifest; the message names it.
    """
    manifest = read_manifest(uri)
    fetch_files(uri, manifest.files, local)
    return manifest


def fetch_files(uri: str, contents: dict[str, FileInfo], local: Path) -> None:
    """Download the named files and verify each one's size and sha256.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
    """
    listed = set(files.list_files(uri))
    for name in sorted(set(contents) - listed):
        if not files.exists(files.join(uri, name)):  # a listing may be older than the file
            raise CheckpointError(f"{files.join(uri, name)} is missing", "use another copy of this folder")
    files.download_tree(uri, local, contents)
    cut = {name: info for name, info in contents.items() if (local / name).stat().st_size != info.size}
    if cut:  # on their way, perhaps
        files.download_tree(uri, local, cut)
    verify_files(uri, contents, local)


def verify_files(uri: str, contents: dict[str, FileInfo], local: Path) -> None:
    """Compare files of this machine with their sizes and sha256; one that differs is removed.

    Args:
        uri: where they came from, for the message.
        contents: what they should be.
        local: the folder they are in.

    Raises:
        CheckpointError: one is damaged; the message names it.
    """
    for name, expected in contents.items():
        found = FileInfo((local / name).stat().st_size, files.sha256_file(local / name))
        if found != expected:
            (local / name).unlink()
            raise CheckpointError(
                f"{files.join(uri, name)} is damaged: {found.size:,} bytes with sha256 {found.sha256[:12]}, "
                f"its manifest says {expected.size:,} bytes with {expected.sha256[:12]}",
                "use another checkpoint or copy; this one cannot be repaired",
            )


def _digest(contents: dict[str, FileInfo], meta: dict[str, Any]) -> str:
    canonical = {"files": {name: list(info) for name, info in contents.items()}, "meta": meta}
    return hashlib.sha256(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
