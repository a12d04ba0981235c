"""``s3://`` through s3fs and, for Ray, through pyarrow: one configuration, read from the environment.

``AWS_ENDPOINT_URL`` (only for stores other than Amazon's), ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_SESSION_TOKEN``, ``AWS_DEFAULT_REGION``; without keys, whatever botocore finds (a role, a profile).
A filesystem is made for one operation and dropped: credentials cached for days go stale, and a cached listing
hides what another worker just wrote.
"""

import contextlib
import errno
import functools
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from fathom.errors import StorageError
from fathom.storage.local import PARTIAL, no_space

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem as ArrowS3FileSystem

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 6.0
PROBE_PAUSE_S = 0.5
PROBE_AGAIN_S = 60.0
CLIENT_ATTEMPTS = 2  # of one request, by botocore: throttling, 5xx, connection errors
FILE_ATTEMPTS = 2  # of one s3fs call, around those: also bodies that break off while they are read
REFUSED_CODES = frozenset(
    {
        "403",
        "AccessDenied",
        "Forbidden",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
    }
)


class S3Settings(NamedTuple):
    """Where the store is and who asks; ``None`` leaves it to the library's own search."""

    endpoint: str | None
    key: str | None
    secret: str | None
    token: str | None
    region: str

    @property
    def place(self) -> str:
        """The endpoint, for messages."""
        return self.endpoint or f"Amazon S3 ({self.region})"


def settings() -> S3Settings:
    """Read the environment."""
    read = os.environ.get
    return S3Settings(
        endpoint=read("AWS_ENDPOINT_URL_S3") or read("AWS_ENDPOINT_URL") or None,
        key=read("AWS_ACCESS_KEY_ID") or None,
        secret=read("AWS_SECRET_ACCESS_KEY") or None,
        token=read("AWS_SESSION_TOKEN") or None,
        region=read("AWS_DEFAULT_REGION") or read("AWS_REGION") or "us-east-1",
    )


@functools.cache
def _service_models() -> Any:
    """botocore's descriptions of services: parsing them again would cost more than most requests."""
    from botocore.loaders import create_loader

    return create_loader()


def open_filesystem() -> Any:
    """A new s3fs filesystem: bounded timeouts and retries, no cached listings, not shared."""
    import s3fs
    from aiobotocore.session import AioSession

    chosen = settings()
    session = AioSession()
    session.register_component("data_loader", _service_models())
    filesystem = s3fs.S3FileSystem(
        key=chosen.key,
        secret=chosen.secret,
        token=chosen.token,
        endpoint_url=chosen.endpoint,
        client_kwargs={"region_name": chosen.region},
        config_kwargs={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"total_max_attempts": CLIENT_ATTEMPTS, "mode": "standard"},
        },
        session=session,
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    filesystem.retries = FILE_ATTEMPTS
    return filesystem


def open_arrow_filesystem() -> "ArrowS3FileSystem":
    """A new pyarrow filesystem with the same settings, for Ray's run storage and Ray Data."""
    from pyarrow.fs import S3FileSystem

    chosen = settings()
    scheme, _, host = (chosen.endpoint or "").rpartition("://")
    return S3FileSystem(
        access_key=chosen.key,
        secret_key=chosen.secret,
        session_token=chosen.token,
        region=chosen.region,
        endpoint_override=host or None,
        scheme=scheme or "https",
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=READ_TIMEOUT_S,
    )


_answered: dict[str, float] = {}  # by endpoint: when it was last found alive, seconds of the monotonic clock


def require_answer(endpoint: str | None) -> None:
    """Ask an endpoint for any reply at all, at most once a minute.

    Reads of large objects need a patient timeout; a server that is down or hangs should be known sooner than that.

    Raises:
        ConnectionError: nothing answered in time.
    """
    import httpx

    if endpoint is None or time.monotonic() - _answered.get(endpoint, -PROBE_AGAIN_S) < PROBE_AGAIN_S:
        return
    for attempt in range(CLIENT_ATTEMPTS):
        try:
            httpx.head(endpoint, timeout=PROBE_TIMEOUT_S)
            break
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if attempt + 1 == CLIENT_ATTEMPTS or isinstance(error, httpx.InvalidURL):
                raise ConnectionError(str(error)) from error
            time.sleep(PROBE_PAUSE_S)
    _answered[endpoint] = time.monotonic()


class S3Backend:
    """Objects of S3; paths are ``bucket/key``. Lives for one operation, as does its filesystem."""

    def __init__(self) -> None:
        self._filesystem: Any = None

    @contextlib.contextmanager
    def filesystem(self, path: str, folder: Path | None = None, needed_bytes: int | None = None) -> Iterator[Any]:
        """The filesystem of this operation, made on first use; its failures become StorageErrors."""
        with refusals(path, folder, needed_bytes):
            if self._filesystem is None:
                require_answer(settings().endpoint)
                self._filesystem = open_filesystem()
            yield self._filesystem

    def exists(self, path: str) -> bool:
        """Whether a file, or anything below that folder, is there."""
        with self.filesystem(path) as filesystem:
            return bool(filesystem.ls(path, detail=False)) if "/" not in path else _present(filesystem, path)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        with self.filesystem(path) as filesystem:
            return int(filesystem.info(path)["size"])

    def read(self, path: str) -> bytes:
        """The whole file."""
        with self.filesystem(path) as filesystem:
            return filesystem.cat_file(path)

    def write(self, path: str, data: bytes) -> None:
        """Replace the file, all or nothing."""
        with self.filesystem(path) as filesystem:
            filesystem.pipe_file(path, data)

    def put(self, local: Path, path: str) -> None:
        """Copy a local file there."""
        with self.filesystem(path) as filesystem:
            filesystem.put_file(str(local), path)

    def get(self, path: str, local: Path, size: int | None) -> None:
        """Copy a file from there, all or nothing."""
        local.parent.mkdir(parents=True, exist_ok=True)
        partial = local.parent / f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            with self.filesystem(path, local.parent, size) as filesystem:
                filesystem.get_file(path, str(partial))
                os.replace(partial, local)
        finally:
            partial.unlink(missing_ok=True)

    def names(self, path: str) -> list[str]:
        """Names directly below a folder, sorted."""
        with self.filesystem(path) as filesystem:
            try:
                found = filesystem.ls(path, detail=False)
            except FileNotFoundError:
                _require_bucket(filesystem, path)
                return []
            below = {name.rstrip("/").removeprefix(path).strip("/").split("/")[0] for name in found if name != path}
            return sorted(below - {""})

    def files_below(self, path: str) -> list[str]:
        """Files at any depth below a folder, relative, sorted."""
        with self.filesystem(path) as filesystem:
            found = filesystem.find(path)
            if not found:
                _require_bucket(filesystem, path)
            return sorted(name.removeprefix(f"{path}/") for name in found if name != path)

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all below it."""
        with self.filesystem(path) as filesystem:
            found = filesystem.find(path)
            if found:
                filesystem.rm(found)

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        with self.filesystem(path) as filesystem:
            return cast(BinaryIO, filesystem.open(path, "rb"))


def _present(filesystem: Any, path: str) -> bool:
    try:
        filesystem.info(path)
    except FileNotFoundError:
        _require_bucket(filesystem, path)
        return False
    return True


def _require_bucket(filesystem: Any, path: str) -> None:
    """Tell a missing bucket from an empty prefix, which S3 reports alike."""
    filesystem.call_s3("head_bucket", Bucket=path.split("/")[0])


@contextlib.contextmanager
def refusals(path: str, folder: Path | None = None, needed_bytes: int | None = None) -> Iterator[None]:
    """What goes wrong with S3 becomes a StorageError naming endpoint and bucket.

    Args:
        path: ``bucket/key`` at work.
        folder: where a download goes, told with ``needed_bytes`` when that disk is full.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    where = f"s3://{path} at {settings().place}"
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise _refused(where, "no complete credentials were found") from error
    except (BotoCoreError, TimeoutError, ConnectionError) as error:
        raise _unreachable(path, error) from error
    except PermissionError as error:
        raise _refused(where, _code(error) or "access denied") from error
    except FileNotFoundError as error:
        raise StorageError(f"{where}: no such bucket or object", "check the URI and the bucket's name") from error
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in REFUSED_CODES:
            raise _refused(where, code) from error
        raise StorageError(
            f"{where}: {code or 'request failed'}", "check the URI, the bucket and its policy"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and folder is not None:
            raise no_space(folder, needed_bytes) from error
        code = _code(error)
        if code in REFUSED_CODES:
            raise _refused(where, code) from error
        raise StorageError(f"{where}: {code or error}", "check the URI, the bucket and its policy") from error


def _code(error: BaseException) -> str:
    """The S3 error code behind a translated exception."""
    cause = error.__cause__
    return str(getattr(cause, "response", {}).get("Error", {}).get("Code", "")) if cause is not None else ""


def _refused(where: str, reason: str) -> StorageError:
    key = settings().key
    who = f"AWS_ACCESS_KEY_ID={key}" if key else "AWS_ACCESS_KEY_ID is not set"
    return StorageError(
        f"{where} refused the request ({reason}); {who}",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a key that may read and write this bucket",
    )


def _unreachable(path: str, error: BaseException) -> StorageError:
    return StorageError(
        f"cannot reach S3 at {settings().place} for bucket {path.split('/')[0]} ({type(error).__name__})",
        "check AWS_ENDPOINT_URL and the network, then run the same command again",
    )
