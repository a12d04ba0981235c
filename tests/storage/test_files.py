"""Files by URI: the same behaviour in a folder and in S3."""

import hashlib
import os
import secrets
from pathlib import Path

import pytest

from fathom.errors import StorageError
from fathom.storage import files
from fathom.storage.files import FileInfo


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path) -> str:
    """A fresh place in a folder, then in S3."""
    if request.param == "folder":
        return str(tmp_path / "store")
    return files.join(request.getfixturevalue("s3_server"), secrets.token_hex(4))


def make_tree(folder: Path) -> dict[str, bytes]:
    contents = {"a.txt": b"alpha", "deep/er/b.bin": os.urandom(3 << 20), "empty": b""}
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return contents


def test_a_tree_goes_there_and_comes_back(store, tmp_path):
    contents = make_tree(tmp_path / "local")
    sent = files.upload_tree(tmp_path / "local", store)
    assert sent == {n: FileInfo(len(d), hashlib.sha256(d).hexdigest()) for n, d in contents.items()}
    assert files.list_names(store) == ["a.txt", "deep", "empty"]
    assert files.list_files(store) == sorted(contents)
    files.download_tree(store, tmp_path / "back")
    assert {n: (tmp_path / "back" / n).read_bytes() for n in contents} == contents
    files.download_tree(store, tmp_path / "one", {"a.txt": sent["a.txt"]})
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["a.txt"]


def test_single_files(store):
    uri = files.join(store, "x", "y.json")
    assert not files.exists(uri)
    files.write_bytes(uri, b"one")
    files.write_bytes(uri, b"two")
    assert files.read_bytes(uri) == b"two"
    assert files.size(uri) == 3
    assert files.exists(uri) and files.exists(files.join(store, "x"))
    assert files.list_names(files.join(store, "x")) == ["y.json"]
    with files.open_input(uri) as file:
        assert list(file) == [b"two"]


def test_removing_spares_neighbours(store):
    for name in ("run/a", "run/b/c", "run2/a"):
        files.write_bytes(files.join(store, name), b".")
    files.remove_tree(files.join(store, "run"))
    files.remove_tree(files.join(store, "run"))
    assert files.list_names(store) == ["run2"]


def test_nothing_there(store, tmp_path):
    assert files.list_names(files.join(store, "none")) == []
    assert files.list_files(files.join(store, "none")) == []
    for action in (
        lambda: files.read_bytes(files.join(store, "none")),
        lambda: files.open_input(files.join(store, "none")),
        lambda: files.download_tree(files.join(store, "none"), tmp_path / "x"),
    ):
        with pytest.raises(StorageError, match="none"):
            action()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\\..\\x", ""])
def test_a_name_cannot_leave_its_folder(name, tmp_path):
    with pytest.raises(StorageError, match="outside its folder"):
        files.download_tree(str(tmp_path), tmp_path / "to", {name: FileInfo(0, "")})


@pytest.mark.parametrize("uri", ["gs://bucket/x", "s3://", "s3:///x"])
def test_uris_that_name_no_store(uri):
    with pytest.raises(StorageError, match=r"storage|bucket"):
        files.exists(uri)


def test_join_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.join("s3://b/run/", "/step-1/", "M.json") == "s3://b/run/step-1/M.json"
    assert files.join("/", "a") == "/a"
    assert files.join("rel", "a") == "rel/a"
    assert files.absolute("rel/a") == str(tmp_path / "rel/a")
    assert files.absolute("s3://b/x/") == "s3://b/x"
    assert files.absolute(f"file://{tmp_path}/with%20space") == str(tmp_path / "with space")


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    files.write_bytes(str(target), b"old")

    def cut(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", cut)
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(str(target), b"new content")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_open_input_of_s3_reads_in_pieces(s3_server):
    uri = files.join(s3_server, "pieces.jsonl")
    data = b"".join(b'{"n": %d}\n' % n for n in range(20000))
    files.write_bytes(uri, data)
    with files.open_input(uri) as file:
        file.seek(len(data) - 11)
        assert data.endswith(file.read())
        file.seek(0)
        assert sum(1 for _ in file) == 20000
