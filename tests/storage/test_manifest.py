"""Published folders: complete or not there, and damage found by digest."""

import json
import secrets

import pytest

from fathom.errors import CheckpointError, StorageError
from fathom.storage import files, manifest
from fathom.storage.arrow import arrow_filesystem
from fathom.storage.manifest import MANIFEST, fetch_folder, publish_folder, read_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "local" / "sub").mkdir(parents=True)
    (tmp_path / "local" / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "local" / "sub" / "config.json").write_text("{}")
    return tmp_path / "local"


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    return files.join(request.getfixturevalue("s3_server"), secrets.token_hex(4))


def test_publish_and_fetch(folder, store, tmp_path):
    published = publish_folder(folder, store, {"step": 7, "name": "é"})
    assert read_manifest(store) == published == fetch_folder(store, tmp_path / "got")
    assert published.meta == {"step": 7, "name": "é"}
    assert (tmp_path / "got" / "sub" / "config.json").read_text() == "{}"
    assert not (tmp_path / "got" / MANIFEST).exists()


def test_the_manifest_comes_last(folder, store, monkeypatch):
    def cut(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "write_manifest", cut)
    with pytest.raises(KeyboardInterrupt):
        publish_folder(folder, store, {})
    assert len(files.list_files(store)) == 2
    with pytest.raises(StorageError, match=MANIFEST):
        fetch_folder(store, folder.parent / "got")


def test_one_flipped_bit_is_found_and_named(folder, store, tmp_path):
    publish_folder(folder, store, {})
    weights = files.join(store, "model.safetensors")
    data = bytearray(files.read_bytes(weights))
    data[1000] ^= 1
    files.write_bytes(weights, bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        fetch_folder(store, tmp_path / "got")
    assert not (tmp_path / "got" / "model.safetensors").exists()


def test_a_missing_file_is_named(folder, store, tmp_path):
    publish_folder(folder, store, {})
    files.remove_tree(files.join(store, "sub/config.json"))
    with pytest.raises(CheckpointError, match=r"sub/config\.json is missing"):
        fetch_folder(store, tmp_path / "got")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"format": "other"}', b"\xff\xfe"])
def test_a_file_that_is_no_manifest(body, tmp_path):
    files.write_bytes(str(tmp_path / MANIFEST), body)
    with pytest.raises(CheckpointError, match="manifest"):
        read_manifest(str(tmp_path))


def test_a_changed_manifest_is_found(folder, tmp_path):
    store = str(tmp_path / "store")
    publish_folder(folder, store, {"step": 1})
    where = files.join(store, MANIFEST)
    body = json.loads(files.read_bytes(where))
    body["meta"]["step"] = 2
    files.write_bytes(where, json.dumps(body).encode())
    with pytest.raises(CheckpointError, match="digest"):
        read_manifest(store)


def test_publishing_again_replaces(folder, store, tmp_path):
    first = publish_folder(folder, store, {})
    (folder / "sub" / "config.json").unlink()
    (folder / "new").write_bytes(b"1")
    second = publish_folder(folder, store, {})
    assert first.digest != second.digest
    assert files.list_files(store) == [MANIFEST, "model.safetensors", "new"]


def test_publishing_a_fetched_folder_gives_the_same_digest(folder, store, tmp_path):
    first = publish_folder(folder, store, {"a": 1})
    fetch_folder(store, tmp_path / "got")
    assert publish_folder(tmp_path / "got", str(tmp_path / "again"), {"a": 1}).digest == first.digest


def test_arrow_sees_the_same_store(folder, store):
    from pyarrow.fs import FileSelector

    publish_folder(folder, store, {})
    filesystem, path = arrow_filesystem(store)
    with filesystem.open_input_stream(f"{path}/sub/config.json") as file:
        assert file.read() == b"{}"
    found = filesystem.get_file_info(FileSelector(path, recursive=True))
    assert {entry.base_name for entry in found if entry.is_file} == {MANIFEST, "model.safetensors", "config.json"}


def test_a_local_manifest_does_not_travel(folder, tmp_path):
    """A folder that was itself published (its MANIFEST.json beside the files) publishes as its files only."""
    publish_folder(folder, str(folder), {})
    again = publish_folder(folder, str(tmp_path / "again"), {})
    assert set(again.files) == {"model.safetensors", "sub/config.json"}
