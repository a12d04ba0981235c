"""A folder as object store: a write goes to a temporary file, is flushed and renamed into place."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fathom.errors import StorageError
from fathom.storage.backend import COPY_CHUNK_BYTES

PARTIAL = ".partial-"  # prefix of files being written; no listing shows them


class LocalBackend:
    """Files of this machine; paths are ordinary paths."""

    def exists(self, path: str) -> bool:
        """Whether a file, or anything below that folder, is there."""
        with refusals(path):
            return Path(path).exists()

    def size(self, path: str) -> int:
        """Bytes of a file."""
        with refusals(path):
            return Path(path).stat().st_size

    def read(self, path: str) -> bytes:
        """The whole file."""
        with refusals(path):
            return Path(path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Replace the file, all or nothing."""
        with refusals(path, len(data)), replacing(Path(path)) as file:
            file.write(data)

    def put(self, local: Path, path: str) -> None:
        """Copy a local file there."""
        copy_file(local, Path(path))

    def get(self, path: str, local: Path, size: int | None) -> None:
        """Copy a file from there, all or nothing."""
        copy_file(Path(path), local)

    def names(self, path: str) -> list[str]:
        """Names directly below a folder, sorted."""
        with refusals(path):
            if not Path(path).is_dir():
                return []
            return sorted(name for name in os.listdir(path) if not name.startswith(PARTIAL))

    def files_below(self, path: str) -> list[str]:
        """Files at any depth below a folder, relative, sorted."""
        with refusals(path):
            root = Path(path)
            found = [file.relative_to(root) for file in root.rglob("*") if file.is_file()]
            return sorted(file.as_posix() for file in found if not file.name.startswith(PARTIAL))

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all below it."""
        with refusals(path):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)

    def tidy(self, path: str) -> None:
        """Remove the temporary files directly in a folder."""
        with refusals(path):
            for left in Path(path).glob(f"{PARTIAL}*"):
                left.unlink(missing_ok=True)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        with refusals(path):
            return open(path, "rb")


def copy_file(source: Path, target: Path) -> None:
    """Copy a local file atomically.

    Raises:
        StorageError: the source is missing, or the target's folder is full or not writable.
    """
    with refusals(str(source)):
        size = source.stat().st_size
    with refusals(str(target), size), open(source, "rb") as reader, replacing(target) as writer:
        shutil.copyfileobj(reader, writer, COPY_CHUNK_BYTES)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes ``target`` when the block ends well, and vanishes otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f"{PARTIAL}{secrets.token_hex(8)}"
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def refusals(path: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn what the operating system says into a StorageError that names the place.

    Args:
        path: the file or folder at work.
        needed_bytes: size of what is being written, told when the disk is full.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"{path}: no such file or folder", "check the path") from error
    except PermissionError as error:
        raise StorageError(f"{path}: permission denied", "choose a folder you may read and write") from error
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        raise StorageError(f"{path}: {error.strerror}", "check which parts of the path are folders") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"{path}: {error.strerror or error}", "check the disk and the path") from error
        raise no_space(Path(path).parent, needed_bytes) from error


@contextlib.contextmanager
def saving_tensors(path: Path) -> Iterator[None]:
    """safetensors reports a full disk as an error of its own kind; make it the StorageError that others give."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if not any(f"(os error {code})" in str(error) for code in (errno.ENOSPC, errno.EDQUOT)):
            raise
        raise no_space(path.parent, None) from error


def no_space(folder: Path, needed_bytes: int | None) -> StorageError:
    """The error for a full disk: which folder, how much was needed, how much is free."""
    needed = f": {needed_bytes:,} bytes needed" if needed_bytes is not None else ""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    return StorageError(
        f"no space left in {folder}{needed}, {free:,} bytes free",
        "free some space there or choose another folder or bucket; nothing that was complete is lost",
    )
