"""Files by URI: a local path, ``file://`` or ``s3://bucket/key``; every store is reached through this.

Every function takes a URI or a local path and raises ``StorageError`` for what a person can mend:
something missing, refused, unreachable or full.
"""

import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from fathom.errors import StorageError, StorageUnavailable
from fathom.storage.backend import Backend, FileInfo, sha256_file
from fathom.storage.local import LocalBackend

__all__ = [
    "FileInfo",
    "absolute",
    "download_tree",
    "exists",
    "join",
    "list_files",
    "list_names",
    "open_input",
    "read_bytes",
    "remove_tree",
    "safe_name",
    "sha256_file",
    "size",
    "tidy",
    "upload_tree",
    "write_bytes",
]
PUT_ATTEMPTS = 3


def backend_for(uri: str) -> tuple[Backend, str]:
    """The storage that holds a URI, and the path by which it knows it.

    Raises:
        StorageError: the scheme is neither absent, ``file`` nor ``s3``, or an s3 URI has no bucket.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return LocalBackend(), uri
    if scheme == "file":
        return LocalBackend(), unquote(urlsplit(uri).path)
    if scheme != "s3":
        raise StorageError(f"{uri}: unknown kind of storage {scheme!r}", "give a folder or an s3://bucket/prefix URI")
    path = rest.strip("/")
    if not path or rest.startswith("/"):
        raise StorageError(f"{uri}: no bucket in the URI", "write s3://bucket/prefix")
    from fathom.storage.s3 import S3Backend

    return S3Backend(), path


def join(uri: str, *parts: str) -> str:
    """A URI below another: ``join("s3://b/run", "step-1", "MANIFEST.json")``."""
    kept = [part.strip("/") for part in parts if part.strip("/")]
    return "/".join([uri.rstrip("/") or "/", *kept]) if uri != "/" else "/" + "/".join(kept)


def absolute(uri: str) -> str:
    """The same place, named so that it holds from any working folder (local paths become absolute)."""
    backend, path = backend_for(uri)
    return str(Path(path).absolute()) if isinstance(backend, LocalBackend) else f"s3://{path}"


def exists(uri: str) -> bool:
    """Whether a file is there, or anything below a folder."""
    backend, path = backend_for(uri)
    return backend.exists(path)


def size(uri: str) -> int:
    """Bytes of one file."""
    backend, path = backend_for(uri)
    return backend.size(path)


def read_bytes(uri: str) -> bytes:
    """The content of one file."""
    backend, path = backend_for(uri)
    return backend.read(path)


def write_bytes(uri: str, data: bytes) -> None:
    """Replace one file; a reader sees the old content or the new, never half."""
    backend, path = backend_for(uri)
    backend.write(path, data)


def list_names(uri: str) -> list[str]:
    """Names of files and folders directly below, sorted; empty when nothing is there."""
    backend, path = backend_for(uri)
    return backend.names(path)


def list_files(uri: str) -> list[str]:
    """Files at any depth below, relative, with ``/``, sorted."""
    backend, path = backend_for(uri)
    return backend.files_below(path)


def remove_tree(uri: str) -> None:
    """Remove a file or a folder with all below it; nothing there is no error."""
    backend, path = backend_for(uri)
    backend.remove(path)


def tidy(uri: str) -> None:
    """Remove what writes into a folder left that were cut off; none may be under way."""
    backend, path = backend_for(uri)
    backend.tidy(path)


def open_input(uri: str) -> BinaryIO:
    """Open one file for reading, as a binary file object; the caller closes it."""
    backend, path = backend_for(uri)
    return backend.open(path)


def upload_tree(local: Path, uri: str, without: Sequence[str] = ()) -> dict[str, FileInfo]:
    """Copy every file below a local folder to a store and check what arrived by size.

    Args:
        local: the folder.
        uri: where its files go.
        without: relative names that stay behind.

    Returns:
        for every file, by its relative name with ``/``: size and sha256 of the local bytes.

    Raises:
        StorageError: as everywhere here, or a file arrived with another size.
    """
    backend, path = backend_for(uri)
    sent: dict[str, FileInfo] = {}
    for name in LocalBackend().files_below(str(local)):
        if name in without:
            continue
        source = local / name
        info = FileInfo(source.stat().st_size, sha256_file(source))
        _put(backend, source, posixpath.join(path, name), info.size, join(uri, name))
        sent[name] = info
    return sent


def _put(backend: Backend, source: Path, target: str, size: int, where: str) -> None:
    """Copy a file there, again if it arrives with another size."""
    for _ in range(PUT_ATTEMPTS):
        backend.put(source, target)
        arrived = backend.size(target)
        if arrived == size:
            return
    raise StorageUnavailable(f"{where}: {arrived:,} bytes arrived of {size:,}", "run the same command again")


def download_tree(uri: str, local: Path, files: dict[str, FileInfo] | None = None) -> None:
    """Copy files from a store into a local folder.

    Args:
        uri: the folder in the store.
        local: made if missing; files of the same name are replaced.
        files: which, with their sizes; default everything there.

    Raises:
        StorageError: a name points outside the folder, or anything the store refuses.
    """
    backend, path = backend_for(uri)
    names = backend.files_below(path) if files is None else sorted(files)
    if not names and files is None:
        raise StorageError(f"{uri}: nothing is there", "check the URI")
    for name in names:
        expected = None if files is None else files[name].size
        backend.get(posixpath.join(path, safe_name(name, uri)), local / name, expected)


def safe_name(name: str, uri: str) -> str:
    """A relative name that stays below its folder, unchanged.

    Raises:
        StorageError: it is absolute, climbs out with ``..``, or has a backslash.
    """
    if not name or name.startswith("/") or "\\" in name or ".." in name.split("/"):
        raise StorageError(
            f"{uri}: file name {name!r} points outside its folder",
            "do not use this folder: it was tampered with",
        )
    return name
