"""Folders of files, as ``datasets`` and its hub lay them out, local or in an object store: rows always in one order."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fathom.config.schema import DataConfig
from fathom.data.records import Conversation, read_conversations
from fathom.data.sources import require_source, source_files, source_sha256
from fathom.errors import DataError
from fathom.storage.files import upload_tree


def rows(*numbers: int) -> list[dict]:
    return [{"question": f"q{number}", "answer": "a"} for number in numbers]


def questions(source: object, limit: int | None = None) -> list[str]:
    made = read_conversations(str(source), DataConfig(train="unused"), limit)
    return [row.messages[0]["content"] for row in made if isinstance(row, Conversation)]


def write_parquet(path: Path, *numbers: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows(*numbers)), path)


def write_stream(path: Path, *numbers: int) -> None:
    """As ``datasets`` writes: the streaming kind of Arrow file, here with a batch a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows(*numbers))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What ``Dataset.save_to_disk`` leaves; a file that it does not name lies beside."""
    folder = tmp_path / "saved"
    write_stream(folder / "data-00000-of-00002.arrow", 1, 2)
    write_stream(folder / "data-00001-of-00002.arrow", 3)
    write_stream(folder / "cache-1234.arrow", 9)
    listed = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in (0, 1)]
    (folder / "state.json").write_text(json.dumps({"_data_files": listed, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_folder_that_datasets_saved(saved: Path) -> None:
    assert questions(saved) == ["q1", "q2", "q3"]
    assert questions(f"{saved}/", limit=2) == ["q1", "q2"]
    both = saved.parent
    (both / "dataset_dict.json").write_text('{"splits": ["saved", "other"]}')
    with pytest.raises(DataError, match="a dataset of 2 splits") as caught:
        questions(both)
    assert f"{both}/saved" in caught.value.remedy


def test_state_json_cannot_point_outside_its_folder(saved: Path) -> None:
    (saved / "state.json").write_text('{"_data_files": [{"filename": "../rows.arrow"}]}')
    with pytest.raises(Exception, match="points outside its folder"):
        questions(saved)


def test_a_folder_of_one_split_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", 3)
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", 1, 2)
    (tmp_path / "README.md").write_text("a card")
    assert questions(tmp_path) == ["q1", "q2", "q3"]
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", 8)
    with pytest.raises(DataError, match="holds several splits: test, train") as refused:
        questions(tmp_path)
    assert questions(Path(str(refused.value.remedy).split(": ")[1])) == ["q8"]
    assert questions(tmp_path / "data" / "train-*") == ["q1", "q2", "q3"]
    assert questions(tmp_path / "*" / "test-*.parquet") == ["q8"]


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "none", tmp_path / "*.jsonl"):
        with pytest.raises(DataError, match="not a kind of data that can be read, or nothing is there"):
            require_source("data.train", str(source))


def test_the_digest_of_a_folder_follows_names_and_bytes(tmp_path: Path) -> None:
    for number in (1, 2):
        write_parquet(tmp_path / "x" / f"{number}.parquet", number)
        write_parquet(tmp_path / "y" / f"{number}.parquet", number)
    assert source_sha256(str(tmp_path / "x")) == source_sha256(str(tmp_path / "y"))
    write_parquet(tmp_path / "y" / "2.parquet", 3)
    assert source_sha256(str(tmp_path / "x")) != source_sha256(str(tmp_path / "y"))


def test_both_kinds_of_arrow_file_and_damaged_ones(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([*rows(1), {"question": "q2", "answer": "a", "note": "n"}])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    assert questions(tmp_path / "a.arrow") == ["q1", "q2"]
    (tmp_path / "b.arrow").write_bytes(b"no")
    with pytest.raises(DataError, match="not readable as Arrow"):
        questions(tmp_path / "b.arrow")


def test_folders_in_an_object_store_read_as_local_ones(s3_server: str, saved: Path) -> None:
    upload_tree(saved, f"{s3_server}/sets/saved")
    far = f"{s3_server}/sets/saved"
    assert source_files(far) == [f"{far}/data-0000{number}-of-00002.arrow" for number in (0, 1)]
    assert questions(far) == questions(saved)
    assert questions(f"{s3_server}/sets/saved/data-00001*") == ["q3"]
    require_source("data.train", far)
    assert source_sha256(far) == source_sha256(str(saved))
