"""Depth labels of a reference model: equal to asking transformers document by document; stored, read, trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fathom.cli.prepare import summary
from fathom.config.schema import DataConfig, ObjectiveConfig
from fathom.data import oracle, shards
from fathom.data.packing import micro_batch_rows
from fathom.data.prepared import Prepared, prepare
from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError, ModelError
from fathom.model.folder import load_model, load_tokenizer
from fathom.objectives.root import TrainingRoot
from fathom.orchestrate.run import check_sources
from support.models import tiny_base_folder
from support.runs import tiny_recipe, write_questions
from support.tokenizers import CHATML, tiny_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose weights are loud, so that its predictions vary."""
    return tiny_base_folder(tmp_path_factory.mktemp("label") / "base", seed=3)


@pytest.fixture
def config(base: Path, tmp_path: Path) -> DataConfig:
    write_questions(tmp_path / "train.jsonl", range(12))
    return DataConfig(
        train=str(tmp_path / "train.jsonl"), heldout=str(tmp_path / "train.jsonl"), context_tokens=100,
        label_model=str(base),
    )  # fmt: skip


def renderer(base: Path) -> Renderer:
    return Renderer(load_tokenizer(base))


def by_transformers(base: Path, data: Prepared) -> list[list[int]]:
    """Methods 2.3, token by token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = []
    for number in range(len(data)):
        ids, mask = data.document(number)
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        depths = [1] * len(ids)
        for place in range(len(ids) - 1):
            if mask[place + 1] and best[place] != ids[place + 1]:
                depths[place] = 2
        found.append(depths)
    return found


def test_labels_are_what_the_reference_gets_wrong(
    base: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_ROWS", 5)
    monkeypatch.setattr(oracle, "FORWARD_TOKENS", 90)
    data = prepare(config, "train", renderer(base), tmp_path / "out")
    want = by_transformers(base, data)
    assert len(list((tmp_path / "out").glob("shard-*.arrow"))) == 3
    assert [data.oracle(number) for number in range(len(data))] == want
    assert data.labelled and data.counts["deep_tokens"] == sum(depth == 2 for depths in want for depth in depths)


def losses_by_transformers(base: Path, data: Prepared, numbers: range) -> list[tuple[float, int, int]]:
    """(-log q of the target, document, place) of every supervised row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = []
    for number in numbers:
        ids, mask = data.document(number)
        with torch.no_grad():
            log_q = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found += [(-float(log_q[p, ids[p + 1]]), number, p) for p in range(len(ids) - 1) if mask[p + 1]]
    return found


def test_labels_for_more_depths_are_quantiles_of_the_loss(
    base: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods 2.3: of each shard's tokens the easiest 70 % at depth 1, the hardest 10 % at depth 3."""
    monkeypatch.setattr(shards, "SHARD_ROWS", 7)
    monkeypatch.setattr(oracle, "FORWARD_TOKENS", 90)
    config = config.model_copy(update={"label_shares": (0.7, 0.2, 0.1)})
    data = prepare(config, "train", renderer(base), tmp_path / "out")
    asked = [data.oracle(number) for number in range(len(data))]
    deep = 0
    for shard in (range(7), range(7, 12)):
        ranked = sorted(losses_by_transformers(base, data, shard))
        ends = [round(0.7 * len(ranked)), round((0.7 + 0.2) * len(ranked)), len(ranked)]
        for rank, (_, number, place) in enumerate(ranked):
            assert asked[number][place] == next(m for m, end in enumerate(ends, start=1) if rank < end)
        deep += len(ranked) - ends[0]
    assert data.counts["deep_tokens"] == deep == sum(depth > 1 for depths in asked for depth in depths)
    with pytest.raises(DataError, match="other label_shares"):
        prepare(config.model_copy(update={"label_shares": (0.5, 0.5)}), "train", renderer(base), tmp_path / "out")


def test_quantiles_by_hand() -> None:
    nan = float("nan")
    assert oracle.quantile_depths([[nan, 3.0, 1.0], [2.0, nan], [0.0]], (0.5, 0.25, 0.25)) == [[1, 3, 1], [2, 1], [1]]
    assert oracle.quantile_depths([[1.0, 1.0, 1.0, 1.0]], (0.5, 0.5)) == [[1, 1, 2, 2]], "the earlier is the easier"
    assert oracle.quantile_depths([[nan], [nan]], (0.5, 0.5)) == [[1], [1]]
    many = np.random.default_rng(0).permutation(1000) / 10
    found = np.array(oracle.quantile_depths([many[:400].tolist(), many[400:].tolist()], (0.88, 0.06, 0.06))[1])
    assert np.array_equal(found, 1 + (many[400:] >= 88.0) + (many[400:] >= 94.0))


def test_a_reference_that_is_right_asks_for_no_depth(base: Path, config: DataConfig, tmp_path: Path) -> None:
    """The labels follow the targets: with the model's own predictions as targets nothing goes deeper."""
    reference = oracle.ReferenceModel(str(base), load_tokenizer(base))
    model = load_model(base)
    ids = [5, 9, 40]
    for _ in range(12):
        from fathom.model.rows import pack_documents

        with torch.no_grad():
            hidden = model(pack_documents([(ids, [True] * len(ids))])).depths[0].hidden
            ids.append(int(model.logits(hidden)[-1].argmax()))
    mask = [False] * 3 + [True] * 12
    assert reference.depths([(ids, mask)]) == [[1] * 15]
    other = [*ids[:8], (ids[8] + 1) % 97, *ids[9:]]
    assert reference.depths([(other, mask)])[0][7] == 2
    assert reference.depths([(other, [False] * 15)]) == [[1] * 15]


def test_forwards_hold_every_document_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "FORWARD_TOKENS", 10)
    documents = [([number] * length, [True] * length) for number, length in enumerate((4, 6, 1, 30, 2, 9, 1))]
    parts = list(oracle.forwards(documents))
    assert [document for part in parts for document in part] == documents
    assert all(len(part) == 1 or sum(len(ids) for ids, _ in part) <= 10 for part in parts)
    assert [len(part) for part in parts] == [2, 1, 1, 1, 2] and list(oracle.forwards([])) == []


def test_packed_rows_carry_the_labels(base: Path, config: DataConfig, tmp_path: Path) -> None:
    data = prepare(config, "train", renderer(base), tmp_path / "out")
    rows = micro_batch_rows(data, [3, 0])
    assert rows.oracle.tolist() == [*data.oracle(3), *data.oracle(0)]
    assert bool((rows.oracle[~rows.supervised] == 1).all())
    heldout = prepare(config, "heldout", renderer(base), tmp_path / "heldout")
    assert not heldout.labelled and not micro_batch_rows(heldout, [0]).oracle.any()
    assert heldout.oracle(0) == [0] * heldout.lengths[0]


def test_training_is_routed_by_the_labels(base: Path, config: DataConfig, tmp_path: Path) -> None:
    """Stage one runs exactly the labelled depths; stage two's loss falls when the decider agrees with them."""
    from fathom.config.schema import MethodConfig

    data = prepare(config, "train", renderer(base), tmp_path / "out")
    rows = micro_batch_rows(data, list(range(len(data))))
    model = load_model(base, MethodConfig(preset="tah")).train()
    with torch.no_grad():
        assert torch.equal(model(rows).executed, rows.oracle)
    root = TrainingRoot(load_model(base, MethodConfig(preset="tah-decider")).train(), ObjectiveConfig())
    optimizer = torch.optim.AdamW([p for p in root.parameters() if p.requires_grad], 1e-3)
    losses = []
    for _ in range(8):
        loss, _ = root(*rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_other_labels_are_other_data(base: Path, config: DataConfig, tmp_path: Path) -> None:
    first = prepare(config, "train", renderer(base), tmp_path / "out")
    again = prepare(config, "train", renderer(base), tmp_path / "out")
    assert again.digest == first.digest
    for label_model in (None, str(tiny_base_folder(tmp_path / "other", seed=9))):
        with pytest.raises(DataError, match="other label_model_sha256"):
            changed = config.model_copy(update={"label_model": label_model})
            prepare(changed, "train", renderer(base), tmp_path / "out")
    plain = prepare(config.model_copy(update={"label_model": None}), "train", renderer(base), tmp_path / "plain")
    with pytest.raises(DataError, match="other label_model_sha256"):
        prepare(config, "train", renderer(base), tmp_path / "plain")
    assert not plain.labelled and np.array_equal(plain.lengths, first.lengths)
    assert "labelled" in summary("train", first) and "labelled" not in summary("train", plain)


def test_a_reference_that_reads_other_tokens_is_refused(base: Path, config: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.label_model: .* has another tokenizer"):
        prepare(config, "train", Renderer(tiny_tokenizer(CHATML)), tmp_path / "out")
    missing = config.model_copy(update={"label_model": "./nowhere"})
    with pytest.raises(ModelError, match=r"data\.label_model: .*nowhere"):
        prepare(missing, "train", renderer(base), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", ["tah", "tah-decider"])
def test_a_method_that_needs_labels_says_so_before_anything_starts(preset: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"method__preset": preset}
    with pytest.raises(ConfigError, match=r"data\.label_model is not set"):
        check_sources(tiny_recipe(tmp_path, **changes))
    check_sources(tiny_recipe(tmp_path, data__label_model=str(tmp_path / "base"), **changes))
    check_sources(tiny_recipe(tmp_path))


def test_labels_and_method_have_the_same_depths(tmp_path: Path) -> None:
    labelled = {"method__preset": "tah", "data__label_model": str(tmp_path / "base")}
    thirds = {"data__label_shares": [0.88, 0.06, 0.06]}
    check_sources(tiny_recipe(tmp_path, **labelled, **thirds, method__max_depth=3))
    for changes in ({**thirds, "method__max_depth": 2}, {"method__max_depth": 3}):
        with pytest.raises(ConfigError, match=r"method\.max_depth is ., and the depth labels of the data go to"):
            check_sources(tiny_recipe(tmp_path, **labelled, **changes))
    for shares, said in (([1.0], "two or more"), ([0.5, 0.6], "sum 1"), ([1.2, -0.2], "above 0")):
        with pytest.raises(ConfigError, match=said):
            tiny_recipe(tmp_path, **labelled, data__label_shares=shares)
    with pytest.raises(ConfigError, match="set that too"):
        tiny_recipe(tmp_path, **thirds)


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    from fathom.cli.main import main
    from fathom.config.load import config_dict

    recipe = tiny_recipe(tmp_path, data__label_model=str(tmp_path / "base"), method__preset="tah")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config_dict(recipe)))
    with pytest.raises(SystemExit) as left:
        main(["prepare", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "made"), "--json"])
    assert not left.value.code
    counts = json.loads(capsys.readouterr().out)
    made = Prepared(tmp_path / "made" / "train")
    want = sum(depth == 2 for number in range(len(made)) for depth in made.oracle(number))
    assert counts["train"]["deep_tokens"] == want > 0 and "deep_tokens" not in counts["heldout"]
