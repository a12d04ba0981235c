"""A store that stumbles is asked again; one that refuses, or stumbles for good, is one clear error."""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fathom.errors import StorageError, StorageUnavailable
from fathom.storage import files, patience, s3
from fathom.storage.patience import patiently
from support.faulty_s3 import FaultyS3

DATA = b"0123456789" * 2000


@pytest.fixture
def faulty(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A faulty endpoint; what would be tried again below our own attempts is not, so that these are counted."""
    with FaultyS3(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setattr(s3, "CLIENT_ATTEMPTS", 1)
        monkeypatch.setattr(s3, "OPERATION_PAUSE_S", 0.01)
        yield proxy


@pytest.fixture
def place(s3_server: str) -> str:
    return files.join(s3_server, secrets.token_hex(4))


Operation = Callable[[str, Path], object]
OPERATIONS: dict[str, tuple[Operation, object]] = {
    "exists": (lambda uri, local: files.exists(f"{uri}/a"), True),
    "size": (lambda uri, local: files.size(f"{uri}/a"), len(DATA)),
    "read_bytes": (lambda uri, local: files.read_bytes(f"{uri}/a"), DATA),
    "list_names": (lambda uri, local: files.list_names(uri), ["a", "b"]),
    "list_files": (lambda uri, local: files.list_files(uri), ["a", "b/c"]),
    "open_input": (lambda uri, local: read_in_pieces(f"{uri}/a"), DATA),
    "write_bytes": (
        lambda uri, local: (files.write_bytes(f"{uri}/new", DATA), files.read_bytes(f"{uri}/new"))[1],
        DATA,
    ),
    "download_tree": (
        lambda uri, local: (files.download_tree(uri, local / "to"), (local / "to/a").read_bytes())[1],
        DATA,
    ),
    "upload_tree": (lambda uri, local: uploaded(uri, local), DATA),
    "remove_tree": (lambda uri, local: (files.remove_tree(f"{uri}/b"), files.list_names(uri))[1], ["a"]),
}


def read_in_pieces(uri: str) -> bytes:
    with files.open_input(uri) as file:
        return b"".join(iter(lambda: file.read(7000), b""))


def uploaded(uri: str, local: Path) -> bytes:
    (local / "from").mkdir()
    (local / "from" / "sent").write_bytes(DATA)
    assert files.upload_tree(local / "from", f"{uri}/up")["sent"].size == len(DATA)
    return files.read_bytes(f"{uri}/up/sent")


@pytest.mark.parametrize("fault", ["slow down", "reset", "cut"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_survives_a_store_that_stumbles(name, fault, faulty, place, tmp_path):
    for key in ("a", "b/c"):
        files.write_bytes(f"{place}/{key}", DATA)
    operation, expected = OPERATIONS[name]
    faulty.first(2, fault)
    assert operation(place, tmp_path) == expected
    assert faulty.faults == 2


def test_a_store_that_does_not_answer_is_asked_again(faulty, place, monkeypatch):
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 2.0)
    files.write_bytes(f"{place}/a", DATA)
    faulty.first(1, "hang")
    assert files.read_bytes(f"{place}/a") == DATA
    assert faulty.faults == 1


@pytest.mark.parametrize(("fault", "words"), [("slow down", "SlowDown|503"), ("reset", "cannot reach S3 at http")])
def test_a_store_that_stumbles_for_good_is_unavailable(fault, words, faulty, place):
    files.write_bytes(f"{place}/a", DATA)
    for action in (files.read_bytes, files.exists, files.list_names):
        faulty.choose = lambda method, path: None if (method, path) == ("HEAD", "/") else fault
        faulty.faults = 0
        with pytest.raises(StorageUnavailable, match=words) as caught:
            action(f"{place}/a")
        assert faulty.faults >= s3.OPERATION_ATTEMPTS
        assert "s3" in str(caught.value).lower() and caught.value.remedy


def test_expired_keys_are_told_at_once(faulty, place):
    for action in (files.read_bytes, files.exists, files.list_names, lambda uri: files.write_bytes(uri, b"x")):
        faulty.choose = lambda method, path: None if (method, path) == ("HEAD", "/") else "expired"
        faulty.faults = 0
        with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID=testing-key") as caught:
            action(f"{place}/a")
        assert not isinstance(caught.value, StorageUnavailable)
        assert faulty.faults <= 2, "waiting does not mend a key"


def test_what_arrives_cut_is_sent_again(tmp_path, monkeypatch):
    from fathom.storage.local import LocalBackend

    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "file").write_bytes(DATA)
    genuine, sizes = LocalBackend.size, iter([5, 6])
    monkeypatch.setattr(LocalBackend, "size", lambda self, path: next(sizes, None) or genuine(self, path))
    assert files.upload_tree(tmp_path / "from", str(tmp_path / "to"))["file"].size == len(DATA)
    monkeypatch.setattr(LocalBackend, "size", lambda self, path: 5)
    with pytest.raises(StorageUnavailable, match="5 bytes arrived of 20,000"):
        files.upload_tree(tmp_path / "from", str(tmp_path / "to"))


def test_patience_waits_for_what_passes_and_for_nothing_else(monkeypatch):
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    answers: list[Exception | str] = [StorageUnavailable("away"), StorageUnavailable("away"), "here"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(ask, 10.0) == "here"
    answers = [StorageError("refused"), "never asked"]
    with pytest.raises(StorageError, match="refused"):
        patiently(ask, 10.0)
    answers = [StorageUnavailable(str(number)) for number in range(100)]
    with pytest.raises(StorageUnavailable):
        patiently(ask, 0.1)
    assert 90 < len(answers) < 99
