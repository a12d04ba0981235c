"""``fathom prepare --ray``: the same shards as one process makes, and the same words for a wrong row."""

import json
from pathlib import Path

import pytest

from fathom.config.schema import DataConfig
from fathom.data.prepared import prepare
from fathom.data.template import Renderer
from fathom.errors import DataError
from fathom.orchestrate.prepare_job import each_on_ray
from support.tokenizers import CHATML, tiny_tokenizer


@pytest.mark.timeout(600)
def test_a_cluster_makes_the_shards_of_one_process(tmp_path: Path, ray_cluster: dict[str, str]) -> None:
    renderer = Renderer(tiny_tokenizer(CHATML))
    for number in range(4):
        rows = [{"question": f"q{number}", "answer": f"a{row}"} for row in range(3 + number)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = DataConfig(train=str(tmp_path / "*.jsonl"), context_tokens=64)
    here = prepare(cfg, "train", renderer, tmp_path / "here")
    there = prepare(cfg, "train", renderer, tmp_path / "there", each_on_ray)
    assert there.digest == here.digest and len(there) == 3 + 4 + 5 + 6
    (tmp_path / "2.jsonl").write_text('{"question": "q"}\n')
    with pytest.raises(DataError, match=r"2\.jsonl:1: the row has no answer"):
        prepare(cfg, "train", renderer, tmp_path / "wrong", each_on_ray)
    assert not (tmp_path / "wrong").exists()
