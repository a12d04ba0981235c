"""Prepared data: the mask survives the whole pipeline, every row is accounted for, shards are immutable."""

import json
from pathlib import Path

import pytest

from fathom.config.schema import DataConfig
from fathom.data import shards as module
from fathom.data.packing import micro_batch_rows
from fathom.data.prepared import Prepared, prepare
from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError
from support.tokenizers import CHATML, DEFAULT_SYSTEM, REWRITES, tiny_tokenizer

RENDERER = Renderer(tiny_tokenizer(CHATML))


def write(path: Path, rows: list[dict]) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(train=str(path), context_tokens=64)


def answers(count: int) -> list[dict]:
    return [
        {"question": f"q{number}", "answer": f"the answer is {number}." * (1 + number % 3)} for number in range(count)
    ]


def test_golden_targets_after_the_whole_pipeline(tmp_path: Path) -> None:
    """D.2 #4: the exact supervised tokens, from file to packed rows."""
    cfg = write(tmp_path / "rows.jsonl", [{"question": "How?", "answer": "So."}, {"question": "Why?", "answer": "12"}])
    data = prepare(cfg, "train", RENDERER, tmp_path / "out")
    rows = micro_batch_rows(data, [1, 0])
    assert RENDERER.tokenizer.decode(rows.targets[rows.supervised]) == "12<|im_end|>So.<|im_end|>"
    assert rows.sequence.max() == 1 and rows.count == data.lengths.sum()


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


def test_what_is_dropped_is_counted_by_reason(tmp_path: Path) -> None:
    """D.2 #6, #13: tokens in = tokens kept + tokens dropped, and how much supervision was lost; nothing is cut."""
    unasked = [{"role": "assistant", "content": "Hello"}]
    rows = [*answers(3), {"question": "q", "answer": "long " * 80}, {"messages": unasked}]
    rows += [{"messages": [{"role": "user", "content": "q"}]}]
    cfg = write(tmp_path / "rows.jsonl", rows)
    counts = prepare(cfg, "train", RENDERER, tmp_path / "a").counts
    assert counts["dropped"] == {"no_assistant_turn": 1, "no_supervised": 1, "too_long": 1}
    assert counts["rows"] == counts["documents"] + sum(counts["dropped"].values())
    whole = prepare(cfg.model_copy(update={"context_tokens": 4096}), "train", RENDERER, tmp_path / "b").counts
    for kind in ("tokens", "supervised_tokens"):
        assert counts[kind] + counts[f"dropped_{kind}"] == whole[kind] + whole[f"dropped_{kind}"]


def test_the_context_is_a_limit_that_may_be_reached(tmp_path: Path) -> None:
    cfg = write(tmp_path / "rows.jsonl", answers(1))
    length = int(prepare(cfg, "train", RENDERER, tmp_path / "a").lengths[0])
    exact = cfg.model_copy(update={"context_tokens": length})
    assert len(prepare(exact, "train", RENDERER, tmp_path / "b")) == 1
    with pytest.raises(DataError, match=f"longer than the context of {length - 1} tokens; the longest has {length}"):
        prepare(cfg.model_copy(update={"context_tokens": length - 1}), "train", RENDERER, tmp_path / "c")
    assert not (tmp_path / "c").exists(), "a refused data set leaves nothing behind"


@pytest.mark.parametrize("rows", [[], [{"messages": [{"role": "assistant", "content": "unasked"}]}]])
def test_nothing_to_learn_is_refused_at_once(tmp_path: Path, rows: list[dict]) -> None:
    """D.2 #5."""
    with pytest.raises(DataError, match="zero supervised tokens") as caught:
        prepare(write(tmp_path / "rows.jsonl", rows), "train", RENDERER, tmp_path / "out")
    assert caught.value.exit_code == 2


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    cfg = write(tmp_path / "rows.jsonl", [*answers(1), {"messages": turns}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: message 2: the chat template rewrites earlier turns"):
        prepare(cfg, "train", Renderer(tiny_tokenizer(REWRITES)), tmp_path / "out")


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
