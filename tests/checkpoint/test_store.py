"""Checkpoints of a run: complete or unseen, damage passed over, leftovers removed."""

import logging
import secrets
from pathlib import Path

import pytest

from fathom.checkpoint import store as module
from fathom.checkpoint.store import CheckpointStore, Committed
from fathom.errors import CheckpointError, StorageError
from fathom.storage import files
from fathom.storage.manifest import MANIFEST


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    return files.join(request.getfixturevalue("s3_server"), secrets.token_hex(4))


def save(store: CheckpointStore, step: int, tmp: Path, ranks: int = 2, commit: bool = True) -> Committed | None:
    """What a run does: rank 0 begins, every rank stages and uploads, rank 0 commits."""
    uploaded = {}
    store.begin(step)
    for rank in range(ranks):
        staged = tmp / f"stage-{step}-{rank}"
        staged.mkdir(exist_ok=True)
        (staged / f"rank-{rank:05d}.safetensors").write_bytes(f"{step}/{rank}".encode() * 10)
        uploaded.update(store.upload_rank(step, staged))
    return store.commit(step, uploaded, {"cursor": step * 8}) if commit else None


def test_commit_and_fetch(place, tmp_path):
    store = CheckpointStore(place)
    assert store.latest() is None and store.newest_readable(tmp_path / "x") is None
    saved = save(store, 60, tmp_path)
    assert saved == store.latest() == CheckpointStore(place).newest_readable(tmp_path / "got")
    assert saved.meta == {"cursor": 480} and saved.uri.endswith("/step-00000060")
    assert (tmp_path / "got" / "rank-00001.safetensors").read_bytes() == b"60/1" * 10
    assert sorted(saved.files) == ["rank-00000.safetensors", "rank-00001.safetensors"]


def test_what_is_not_committed_is_never_seen(place, tmp_path):
    store = CheckpointStore(place)
    save(store, 10, tmp_path)
    save(store, 20, tmp_path, commit=False)
    assert store.latest().step == 10
    assert store.newest_readable(tmp_path / "got").step == 10


def test_a_commit_wants_every_file(place, tmp_path):
    store = CheckpointStore(place)
    with pytest.raises(CheckpointError, match="rank-00009"):
        store.commit(5, {"rank-00009.json": {"size": 1, "sha256": "0"}}, {})
    assert store.latest() is None


def test_damage_is_passed_over_with_a_warning(place, tmp_path, caplog):
    store = CheckpointStore(place)
    for step in (10, 20, 30):
        save(store, step, tmp_path)
    files.write_bytes(files.join(store.folder(30), MANIFEST), b"{ torn")
    files.write_bytes(files.join(store.folder(20), "rank-00001.safetensors"), b"20/X" * 10)
    assert store.latest().step == 20
    with pytest.raises(CheckpointError, match="rank-00001"):
        store.fetch(store.committed()[0], tmp_path / "x")
    with caplog.at_level(logging.WARNING):
        assert store.newest_readable(tmp_path / "got").step == 10
    assert "step 30" in caplog.text and "rank-00001.safetensors is damaged" in caplog.text
    assert (tmp_path / "got" / "rank-00000.safetensors").read_bytes() == b"10/0" * 10


def test_an_attempt_at_a_committed_step_hides_it_until_it_is_complete(tmp_path):
    store = CheckpointStore(str(tmp_path / "store"))
    save(store, 10, tmp_path)
    save(store, 20, tmp_path, ranks=3)
    save(store, 20, tmp_path, ranks=1, commit=False)
    assert store.latest().step == 10
    Path(store.folder(20), ".partial-left").write_bytes(b"of a killed upload")
    again = save(store, 20, tmp_path, ranks=2)
    assert not Path(store.folder(20), ".partial-left").exists()
    assert store.latest() == again and len(again.files) == 2
    assert store.newest_readable(tmp_path / "got").step == 20
    assert len(list((tmp_path / "got").iterdir())) == 2


def test_prune_and_sweep(place, tmp_path):
    store = CheckpointStore(place)
    save(store, 5, tmp_path, commit=False)
    for step in (10, 20, 30):
        save(store, step, tmp_path)
    save(store, 40, tmp_path, commit=False)
    files.write_bytes(files.join(place, "other", "file"), b"not ours")
    assert store.prune(2) == [10]
    assert store.sweep() == [5]
    assert store.steps() == [40, 30, 20]
    assert store.prune(0) == [20] and store.latest().step == 30
    assert files.exists(files.join(place, "other", "file"))


def test_a_later_checkpoint_that_was_passed_over_does_not_push_out_good_ones(tmp_path):
    store = CheckpointStore(str(tmp_path / "store"))
    for step in (10, 20, 30):
        save(store, step, tmp_path)
    assert store.prune(1, newest=20) == [10]
    assert store.steps() == [30, 20]


def test_when_every_checkpoint_is_damaged_nothing_starts_over_in_silence(tmp_path):
    store = CheckpointStore(str(tmp_path / "store"))
    for step in (10, 20):
        save(store, step, tmp_path)
    files.write_bytes(files.join(store.folder(20), MANIFEST), b"{ torn")
    files.write_bytes(files.join(store.folder(10), "rank-00000.safetensors"), b"X")
    with pytest.raises(CheckpointError, match=r"every checkpoint is damaged \(steps 20, 10\)"):
        store.newest_readable(tmp_path / "got")


def test_pruning_removes_the_manifest_first(tmp_path, monkeypatch):
    store = CheckpointStore(str(tmp_path / "store"))
    save(store, 10, tmp_path)
    save(store, 20, tmp_path)
    removed = []
    monkeypatch.setattr(module.files, "remove_tree", removed.append)
    store.prune(1)
    assert removed == [files.join(store.folder(10), MANIFEST), store.folder(10)]


def test_sweep_without_a_commit_removes_nothing(tmp_path):
    store = CheckpointStore(str(tmp_path / "store"))
    save(store, 5, tmp_path, commit=False)
    assert store.sweep() == [] and store.steps() == [5]


def test_a_stale_listing_hides_neither_the_newest_checkpoint_nor_its_files(tmp_path, monkeypatch):
    store = CheckpointStore(str(tmp_path / "store"))
    save(store, 10, tmp_path)
    stale = {uri: files.list_names(uri) for uri in (store.uri,)}
    newest = save(store, 20, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "list_names", lambda uri: stale[uri])
        patch.setattr(files, "list_files", lambda uri: [])
        assert store.steps() == [20, 10]
        assert store.latest() == store.newest_readable(tmp_path / "got") == newest
        again = save(store, 30, tmp_path)
    assert store.latest() == again


def test_a_series_of_checkpoints_keeps_its_name_until_it_is_removed(place):
    store = CheckpointStore(place)
    name = store.identity()
    assert CheckpointStore(place).identity() == name
    files.remove_tree(place)
    assert store.identity() != name


def test_a_damaged_pointer_is_passed_over(place, tmp_path, caplog):
    store = CheckpointStore(place)
    save(store, 10, tmp_path)
    files.write_bytes(files.join(store.uri, module.LATEST), b"\xff 1o")
    with caplog.at_level(logging.WARNING):
        assert store.steps() == [10] and store.latest().step == 10
    assert module.LATEST in caplog.text


def test_writes_that_were_cut_off_are_swept(s3_server, tmp_path):
    import boto3

    local, remote = CheckpointStore(str(tmp_path / "store")), CheckpointStore(files.join(s3_server, "cut/off"))
    save(local, 10, tmp_path)
    left = tmp_path / "store" / ".partial-of-a-pointer"
    left.write_bytes(b"1")
    local.sweep()
    assert not left.exists() and local.latest().step == 10
    client = boto3.client("s3")
    for key in ("cut/off/step-00000010/rank-00000.safetensors", "cut/off-other/file"):
        client.create_multipart_upload(Bucket="fathom-test", Key=key)
    remote.sweep()
    begun = client.list_multipart_uploads(Bucket="fathom-test")["Uploads"]
    assert [upload["Key"] for upload in begun] == ["cut/off-other/file"]


def test_a_key_that_may_not_look_for_cut_off_writes_may_train(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(str(tmp_path / "store"))
    save(store, 5, tmp_path, commit=False)
    save(store, 10, tmp_path)

    def refuse(uri):
        raise StorageError("not allowed")

    monkeypatch.setattr(files, "tidy", refuse)
    assert store.sweep() == [5]
    assert "not allowed" in caplog.text
