"""A data set larger than memory can be opened and trained on: shards stay on disk, and are written one at a time."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fathom.config.schema import DataConfig
from fathom.data import shards
from fathom.data.packing import micro_batch_rows
from fathom.data.prepared import MANIFEST, Prepared
from fathom.data.template import Rendered

DOCUMENTS, LENGTH = 256, 32_768
TOKEN_BYTES = 4 + 1 / 8


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8.4 million tokens, 35 MB, in 16 shards, without the time that a tokenizer would take."""
    folder = tmp_path_factory.mktemp("large")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", 16 * LENGTH)
        writer = shards._Shards(folder, 0, None, None)
        supervised = [place % 3 == 0 for place in range(LENGTH)]
        for number in range(DOCUMENTS):
            writer.add(Rendered([number] * LENGTH, supervised), f"made:{number}")
            assert writer.tokens < 16 * LENGTH, "what is gathered is written once it is a shard"
        writer.flush()
    assert len(writer.digests) == 16
    counts = {"documents": DOCUMENTS}
    manifest = {"counts": counts, "made_from": {}, "shards": writer.digests}
    (folder / MANIFEST).write_text(json.dumps(manifest, sort_keys=True))
    return folder


def test_opening_and_reading_a_large_set_does_not_load_it(large: Path) -> None:
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        data = Prepared(large)
        rows = micro_batch_rows(data, [3, 200])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = pa.total_allocated_bytes() - before
    on_disk = DOCUMENTS * LENGTH * TOKEN_BYTES
    assert sum(path.stat().st_size for path in large.glob("*.arrow")) >= on_disk
    assert peak + held < on_disk / 4, "a mask of a shard, a block of a file and two documents, not the set"
    assert rows.ids.tolist() == [3] * LENGTH + [200] * LENGTH
    assert np.array_equal(data.supervised_counts, [-(-LENGTH // 3)] * DOCUMENTS)


def test_a_shard_ends_by_documents_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 2)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n' * 5)
    from fathom.data.template import Renderer
    from support.tokenizers import tiny_tokenizer

    write = shards.PartWriter(DataConfig(train=str(path)), Renderer(tiny_tokenizer()), None, None, tmp_path)
    part = write(shards.Task(7, 0, str(path), None))
    assert sorted(part.shards) == [f"shard-00007-0000{number}.arrow" for number in range(3)]
    assert part.counts["documents"] == 5
