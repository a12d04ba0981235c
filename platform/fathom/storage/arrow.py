"""The same storage as a pyarrow filesystem: what Ray's run storage and Ray Data take."""

from pathlib import Path
from typing import TYPE_CHECKING

from fathom.storage.files import backend_for
from fathom.storage.local import LocalBackend

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


def arrow_filesystem(uri: str) -> "tuple[FileSystem, str]":
    """A pyarrow filesystem and the path in it, without a scheme, as Ray wants ``storage_path`` then.

    The native S3 filesystem, not s3fs wrapped: Ray copies with one thread only when it sees the native one,
    and more threads can deadlock. Its retry policy does not survive pickling, so make it where it is used.

    Raises:
        StorageError: the scheme is neither absent, ``file`` nor ``s3``.
    """
    from pyarrow.fs import LocalFileSystem

    backend, path = backend_for(uri)
    if isinstance(backend, LocalBackend):
        return LocalFileSystem(), str(Path(path).absolute())
    from fathom.storage.s3 import open_arrow_filesystem

    return open_arrow_filesystem(), path
