"""What goes wrong with a store: one clear error, soon, without secrets."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import time

import httpx
import pytest

from fathom.errors import StorageError
from fathom.storage import files


def test_an_endpoint_nobody_listens_at(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
        start = time.monotonic()
        with pytest.raises(StorageError) as caught:
            files.read_bytes("s3://some-bucket/run/x")
    assert time.monotonic() - start < 20
    assert endpoint in str(caught.value) and "some-bucket" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_an_endpoint_that_never_answers(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)  # connects, then says nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
        start = time.monotonic()
        with pytest.raises(StorageError, match="cannot reach S3") as caught:
            files.exists("s3://some-bucket/run/x")
    assert time.monotonic() - start < 20
    assert endpoint in str(caught.value)


def test_a_refused_key_is_named_but_not_its_secret(s3_server, monkeypatch):
    reset = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    httpx.post(reset, content=b"0").raise_for_status()
    try:
        for action in (
            lambda: files.read_bytes(f"{s3_server}/x"),
            lambda: files.exists(f"{s3_server}/x"),
            lambda: files.list_names(f"{s3_server}/x"),
            lambda: files.write_bytes(f"{s3_server}/x", b"1"),
        ):
            with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID=AKIAWRONG") as caught:
                action()
            assert "hush-hush" not in str(caught.value) + repr(caught.value)
    finally:
        httpx.post(reset, content=b"inf").raise_for_status()


def test_a_missing_bucket_is_an_error_not_an_empty_folder(s3_server):
    for action in (files.exists, files.list_names, files.list_files, files.read_bytes):
        with pytest.raises(StorageError, match="no-such-bucket"):
            action("s3://no-such-bucket/run")


def test_a_full_disk_names_folder_and_bytes(tmp_path, monkeypatch):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "weights").write_bytes(bytes(12_345))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(StorageError, match=r"no space left in .*to.*12,345 bytes needed"):
        files.upload_tree(tmp_path / "from", str(tmp_path / "to"))
    assert list((tmp_path / "to").iterdir()) == []


def test_a_full_disk_while_downloading_from_s3(s3_server, tmp_path, monkeypatch):
    import s3fs

    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "weights").write_bytes(bytes(2_345))
    sent = files.upload_tree(tmp_path / "from", f"{s3_server}/full")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(s3fs.S3FileSystem, "get_file", full)
    with pytest.raises(StorageError, match=r"no space left in .*to.*2,345 bytes needed"):
        files.download_tree(f"{s3_server}/full", tmp_path / "to", sent)


REALLY_FULL = """
import sys
from fathom.errors import StorageError
from fathom.storage import files
files.write_bytes(sys.argv[1] + "/small", b"kept")
try:
    files.write_bytes(sys.argv[1] + "/large", bytes(1 << 20))
except StorageError as error:
    assert files.read_bytes(sys.argv[1] + "/small") == b"kept" and files.list_names(sys.argv[1]) == ["small"]
    print(error)
"""


def can_mount() -> bool:
    """Whether this process may mount a small file system in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces")
def test_a_disk_that_is_really_full(tmp_path):
    script = f'mount -t tmpfs -o size=128k none "{tmp_path}" && "{sys.executable}" -c "$0" "{tmp_path}"'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script, REALLY_FULL], capture_output=True, text=True)
    assert f"no space left in {tmp_path}: 1,048,576 bytes needed" in done.stdout, done.stderr


def test_a_folder_one_may_not_use(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        files.write_bytes(str(tmp_path / "file" / "below"), b"")
