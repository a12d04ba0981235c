"""Prepared data: every row is accounted for, shards are immutable. What is learned: tests/regressions."""

import copy
import json
from pathlib import Path

import pytest

from fathom.config.schema import DataConfig
from fathom.data import shards as module
from fathom.data.prepared import Prepared, prepare
from fathom.data.shards import Part, PartWriter, Task
from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError
from support.tokenizers import CHATML, DEFAULT_SYSTEM, tiny_tokenizer

RENDERER = Renderer(tiny_tokenizer(CHATML))


def write(path: Path, rows: list[dict]) -> DataConfig:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(train=str(path), context_tokens=64)


def answers(count: int) -> list[dict]:
    return [
        {"question": f"q{number}", "answer": f"the answer is {number}." * (1 + number % 3)} for number in range(count)
    ]


def test_documents_lengths_and_counts_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_ROWS", 4)
    data = prepare(write(tmp_path / "rows.jsonl", answers(10)), "train", RENDERER, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("shard-*.arrow"))) == 3 and len(data) == 10
    for number, row in enumerate(answers(10)):
        ids, mask = data.document(number)
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        assert (ids, mask) == tuple(RENDERER.render(messages))
        assert (len(ids), sum(mask)) == (data.lengths[number], data.supervised_counts[number])
        assert data.where(number) == f"{tmp_path / 'rows.jsonl'}:{number + 1}"
    assert data.counts["tokens"] == data.lengths.sum()
    assert data.counts["supervised_tokens"] == data.supervised_counts.sum()


def test_the_context_is_a_limit_that_may_be_reached(tmp_path: Path) -> None:
    cfg = write(tmp_path / "rows.jsonl", answers(1))
    length = int(prepare(cfg, "train", RENDERER, tmp_path / "a").lengths[0])
    exact = cfg.model_copy(update={"context_tokens": length})
    assert len(prepare(exact, "train", RENDERER, tmp_path / "b")) == 1
    with pytest.raises(DataError, match=f"longer than the context of {length - 1} tokens; the longest has {length}"):
        prepare(cfg.model_copy(update={"context_tokens": length - 1}), "train", RENDERER, tmp_path / "c")
    assert not (tmp_path / "c").exists(), "a refused data set leaves nothing behind"


def test_the_same_data_is_prepared_once_and_other_data_refused(tmp_path: Path) -> None:
    cfg = write(tmp_path / "rows.jsonl", answers(4))
    first = prepare(cfg, "train", RENDERER, tmp_path / "out")
    stamp = (tmp_path / "out" / "MANIFEST.json").stat().st_mtime_ns
    again = prepare(cfg, "train", RENDERER, tmp_path / "out")
    assert (again.digest, (tmp_path / "out" / "MANIFEST.json").stat().st_mtime_ns) == (first.digest, stamp)
    with pytest.raises(DataError, match="other template_digest"):
        prepare(cfg, "train", Renderer(tiny_tokenizer(DEFAULT_SYSTEM)), tmp_path / "out")
    write(tmp_path / "rows.jsonl", answers(5))
    with pytest.raises(DataError, match="other source_sha256"):
        prepare(cfg, "train", RENDERER, tmp_path / "out")


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    cfg = write(tmp_path / "rows.jsonl", answers(4))
    one, two = (prepare(cfg, "train", RENDERER, tmp_path / name) for name in "ab")
    fewer = prepare(cfg.model_copy(update={"max_train_examples": 3}), "train", RENDERER, tmp_path / "c")
    assert one.digest == two.digest != fewer.digest and len(fewer) == 3


def test_files_can_be_worked_on_in_any_order(tmp_path: Path) -> None:
    """As on a cluster: by copies of the writer, the last file first; shards and digest are those of one process."""
    for number in range(3):
        write(tmp_path / "rows" / f"{number}.jsonl", answers(2 + number))
    cfg = DataConfig(train=str(tmp_path / "rows"), context_tokens=64)

    def backwards(writer: PartWriter, tasks: list[Task]) -> list[Part]:
        assert [task.number for task in tasks] == [0, 1, 2]
        return [copy.deepcopy(writer)(task) for task in reversed(tasks)][::-1]

    here = prepare(cfg, "train", RENDERER, tmp_path / "here")
    there = prepare(cfg, "train", RENDERER, tmp_path / "there", backwards)
    assert there.digest == here.digest and len(here) == 9
    assert [here.where(number).split("/")[-1] for number in (0, 2, 8)] == ["0.jsonl:1", "1.jsonl:1", "2.jsonl:4"]
    limited = prepare(cfg.model_copy(update={"max_train_examples": 4}), "train", RENDERER, tmp_path / "limited")
    assert [limited.where(number).split("/")[-1] for number in (2, 3)] == ["1.jsonl:1", "1.jsonl:2"]
    assert len(limited) == 4, "the limit is over all files of a source"


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    prepare(write(tmp_path / "rows.jsonl", answers(4)), "train", RENDERER, tmp_path / "out")
    shard = tmp_path / "out" / "shard-00000-00000.arrow"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DataError, match=r"shard-00000-00000\.arrow is damaged"):
        Prepared(tmp_path / "out")
    with pytest.raises(DataError, match="holds no prepared data"):
        Prepared(tmp_path)


def test_a_split_that_is_not_set_and_a_folder_in_use(tmp_path: Path) -> None:
    cfg = write(tmp_path / "rows.jsonl", answers(2))
    with pytest.raises(ConfigError, match=r"data\.heldout is not set"):
        prepare(cfg, "heldout", RENDERER, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="is not empty"):
        prepare(cfg, "train", RENDERER, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_rows_from_an_object_store(s3_server: str, tmp_path: Path) -> None:
    """JSONL and Parquet over S3 give the same documents as the local files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from fathom.storage.files import write_bytes

    cfg = write(tmp_path / "rows.jsonl", answers(4))
    local = prepare(cfg, "train", RENDERER, tmp_path / "local")
    pq.write_table(pa.Table.from_pylist(answers(4)), tmp_path / "rows.parquet")
    for kind in ("jsonl", "parquet"):
        uri = f"{s3_server}/data/rows.{kind}"
        write_bytes(uri, (tmp_path / f"rows.{kind}").read_bytes())
        far = prepare(DataConfig(train=uri, context_tokens=64), "train", RENDERER, tmp_path / kind)
        assert [far.document(number) for number in range(4)] == [local.document(number) for number in range(4)]
        assert far.where(1) == f"{uri}:2"
