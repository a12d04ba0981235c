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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast

from fathom.errors import StorageError, StorageUnavailable
from fathom.storage.local import PARTIAL, no_space

if TYPE_CHECKING:
    from pyarrow.fs import S3FileSystem as ArrowS3FileSystem

T = TypeVar("T")
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 6.0
PROBE_PAUSE_S = 0.5
PROBE_AGAIN_S = 60.0
CLIENT_ATTEMPTS = 2  # of one request, by botocore: throttling, 5xx, connection errors
OPERATION_ATTEMPTS = 4  # of one operation of ours, around those: also bodies that break off
OPERATION_PAUSE_S = 0.5  # before the second attempt; twice as long before each further one
STREAM_ATTEMPTS = 5  # of one range of a file that is read in pieces, by s3fs
REFUSED_CODES = frozenset(
    {
        "400",  # of an answer without a body: an expired token is told so
        "403",
        "AccessDenied",
        "Forbidden",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
    }
)
PASSING_CODES = frozenset(
    {"SlowDown", "Throttling", "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}
)
"""Refusals that are no verdict on the request; every answer of 500 or above is none either."""


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
    filesystem.retries = 1  # what it would try again, and more, S3Backend does
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

    def _do(
        self, path: str, action: Callable[[Any], T], folder: Path | None = None, needed_bytes: int | None = None
    ) -> T:
        """Do something that may be done twice with a filesystem, again when the store stumbles.

        Raises:
            StorageUnavailable: it still stumbles, or does not answer at all, which is not waited for.
            StorageError: it refused.
        """
        pause = OPERATION_PAUSE_S
        for left in reversed(range(OPERATION_ATTEMPTS)):
            with refusals(path):
                require_answer(settings().endpoint)
            try:
                with refusals(path, folder, needed_bytes):
                    if self._filesystem is None:
                        self._filesystem = open_filesystem()
                    return action(self._filesystem)
            except StorageUnavailable:
                if not left:
                    raise
            self._filesystem = None
            _answered.clear()
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def exists(self, path: str) -> bool:
        """Whether a file, or anything below that folder, is there."""
        if "/" not in path:
            return self._do(path, lambda filesystem: bool(filesystem.ls(path, detail=False)))
        return self._do(path, lambda filesystem: _present(filesystem, path))

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return self._do(path, lambda filesystem: int(filesystem.info(path)["size"]))

    def read(self, path: str) -> bytes:
        """The whole file."""
        return self._do(path, lambda filesystem: filesystem.cat_file(path))

    def write(self, path: str, data: bytes) -> None:
        """Replace the file, all or nothing."""
        self._do(path, lambda filesystem: filesystem.pipe_file(path, data))

    def put(self, local: Path, path: str) -> None:
        """Copy a local file there."""
        self._do(path, lambda filesystem: filesystem.put_file(str(local), path))

    def get(self, path: str, local: Path, size: int | None) -> None:
        """Copy a file from there, all or nothing."""
        local.parent.mkdir(parents=True, exist_ok=True)
        partial = local.parent / f"{PARTIAL}{secrets.token_hex(8)}"
        try:
            self._do(path, lambda filesystem: filesystem.get_file(path, str(partial)), local.parent, size)
            os.replace(partial, local)
        finally:
            partial.unlink(missing_ok=True)

    def names(self, path: str) -> list[str]:
        """Names directly below a folder, sorted."""
        return self._do(path, lambda filesystem: _names(filesystem, path))

    def files_below(self, path: str) -> list[str]:
        """Files at any depth below a folder, relative, sorted."""
        return self._do(path, lambda filesystem: _files_below(filesystem, path))

    def remove(self, path: str) -> None:
        """Remove a file or a folder with all below it."""
        self._do(path, lambda filesystem: _remove(filesystem, path))

    def tidy(self, path: str) -> None:
        """Abort uploads in parts that were begun below a folder and never finished: their parts are paid for."""
        self._do(path, lambda filesystem: _abort_uploads(filesystem, path))

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading."""
        file = self._do(path, lambda filesystem: filesystem.open(path, "rb"))
        file.fs.retries = STREAM_ATTEMPTS
        return cast(BinaryIO, file)


def _names(filesystem: Any, path: str) -> list[str]:
    try:
        found = filesystem.ls(path, detail=False)
    except FileNotFoundError:
        _require_bucket(filesystem, path)
        return []
    below = {name.rstrip("/").removeprefix(path).strip("/").split("/")[0] for name in found if name != path}
    return sorted(below - {""})


def _files_below(filesystem: Any, path: str) -> list[str]:
    found = filesystem.find(path)
    if not found:
        _require_bucket(filesystem, path)
    return sorted(name.removeprefix(f"{path}/") for name in found if name != path)


def _remove(filesystem: Any, path: str) -> None:
    found = filesystem.find(path)
    if found:
        filesystem.rm(found)


def _abort_uploads(filesystem: Any, path: str) -> None:
    bucket, _, prefix = path.partition("/")
    begun = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
    for upload in begun.get("Uploads", []):
        filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


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
    from aiohttp import ClientError as TransportError
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
    from botocore.parsers import ResponseParserError

    where = f"s3://{path} at {settings().place}"
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise _refused(where, "no complete credentials were found") from error
    except (BotoCoreError, ResponseParserError, TransportError, TimeoutError, ConnectionError) as error:
        raise _unreachable(path, error) from error
    except PermissionError as error:
        raise _refused(where, _code(error)[0] or "access denied") from error
    except FileNotFoundError as error:
        raise StorageError(f"{where}: no such bucket or object", "check the URI and the bucket's name") from error
    except (ClientError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and folder is not None:
            raise no_space(folder, needed_bytes) from error
        code, status = _code(error)
        if code in REFUSED_CODES:
            raise _refused(where, code) from error
        if status >= 500 or code in PASSING_CODES:
            raise StorageUnavailable(f"{where}: {code}", "run the same command again in a while") from error
        raise StorageError(f"{where}: {code or error}", "check the URI, the bucket and its policy") from error


def _code(error: BaseException) -> tuple[str, int]:
    """The S3 error code and HTTP status in botocore's error, or behind what s3fs made of it; empty and 0 of none."""
    answer: Any = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(answer.get("Error", {}).get("Code", "")), int(status)


def _refused(where: str, reason: str) -> StorageError:
    key = settings().key
    who = f"AWS_ACCESS_KEY_ID={key}" if key else "AWS_ACCESS_KEY_ID is not set"
    return StorageError(
        f"{where} refused the request ({reason}); {who}",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, which expires) to a key that may read "
        "and write this bucket",
    )


def _unreachable(path: str, error: BaseException) -> StorageUnavailable:
    return StorageUnavailable(
        f"cannot reach S3 at {settings().place} for bucket {path.split('/')[0]} ({type(error).__name__})",
        "check AWS_ENDPOINT_URL and the network, then run the same command again",
    )
