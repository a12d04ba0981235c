"""What a kind of storage must be able to do; :mod:`fathom.storage.files` chooses one by the URI's scheme."""

import hashlib
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

COPY_CHUNK_BYTES = 1 << 20


class FileInfo(NamedTuple):
    """A file's size in bytes and the hexadecimal sha256 of its content."""

    size: int
    sha256: str


class Backend(Protocol):
    """One place that holds files. Paths are what :func:`fathom.storage.files.backend_for` returned beside it.

    Every method raises ``StorageError`` for a missing file, a refusal, an unreachable service or a full disk.
    """

    def exists(self, path: str) -> bool:
        """Whether a file, or anything below that folder, is there."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file."""
        ...

    def read(self, path: str) -> bytes:
        """The whole file."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replace the file: readers see the old content or the new, never half."""
        ...

    def put(self, local: Path, path: str) -> None:
        """Copy a local file there."""
        ...

    def get(self, path: str, local: Path, size: int | None) -> None:
        """Copy a file from there; ``local`` appears when it is complete."""
        ...

    def names(self, path: str) -> list[str]:
        """Names directly below a folder, sorted; empty when there is no such folder."""
        ...

    def files_below(self, path: str) -> list[str]:
        """Files at any depth below a folder, relative to it, sorted."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all below it; nothing there is no error."""
        ...

    def tidy(self, path: str) -> None:
        """Remove what writes into a folder left that were cut off; none may be under way."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        ...


def sha256_file(path: Path) -> str:
    """Hexadecimal sha256 of a local file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(COPY_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
