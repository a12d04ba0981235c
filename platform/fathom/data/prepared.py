"""Prepared data: immutable token shards (Arrow, memory-mapped) and a manifest that accounts for every row."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from fathom.config.schema import DataConfig, Supervise
from fathom.data.oracle import ReferenceModel, forwards
from fathom.data.records import Conversation, Dropped, read_conversations
from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError
from fathom.storage.files import open_input
from fathom.storage.local import refusals

MANIFEST = "MANIFEST.json"
SCHEMA = pa.schema({"ids": pa.list_(pa.int32()), "supervised": pa.list_(pa.bool_()), "where": pa.string()})
ORACLE = pa.field("oracle", pa.list_(pa.int8()))
"""A column of data that a reference model has labelled: the depth of each row."""
SHARD_ROWS = 16_384
Split = Literal["train", "heldout"]


class Prepared:
    """A prepared data set, read-only; documents are read from memory-mapped shards.

    Args:
        folder: what :func:`prepare` wrote.

    Attributes:
        counts: rows read, documents and tokens kept, supervised tokens, what was dropped by reason, and how many
            tokens are labelled to go deeper than depth 1.
        digest: sha256 (hex) of the manifest, which holds every shard's sha256.
        labelled: whether a reference model has labelled it with depths.
        lengths: int64 ``[documents]``, tokens of each.
        supervised_counts: int64 ``[documents]``, supervised tokens of each.

    Raises:
        DataError: no manifest, or a shard's bytes are not those of the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        try:
            raw = (self.folder / MANIFEST).read_bytes()
            manifest = json.loads(raw)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} holds no prepared data: {error}", "run `fathom prepare`") from error
        self.digest = hashlib.sha256(raw).hexdigest()
        self.counts: dict[str, Any] = manifest["counts"]
        self.made_from: dict[str, Any] = manifest["made_from"]
        table = pa.concat_tables([self._shard(name, digest) for name, digest in manifest["shards"].items()])
        self._where = table["where"]
        self._ids = [chunk for chunk in table["ids"].chunks if len(chunk)]
        self._supervised = [chunk for chunk in table["supervised"].chunks if len(chunk)]
        self.labelled = ORACLE.name in table.column_names
        self._oracle = table[ORACLE.name] if self.labelled else None
        self._starts = np.cumsum([0, *(len(chunk) for chunk in self._ids)])
        self.lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in self._ids]).astype(np.int64)
        self.supervised_counts = np.concatenate([_true_counts(chunk) for chunk in self._supervised])

    def _shard(self, name: str, digest: str) -> pa.Table:
        path = self.folder / name
        if not path.is_file() or _sha256(path) != digest:
            raise DataError(f"{path} is damaged or missing", f"remove {self.folder} and run `fathom prepare` again")
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> tuple[list[int], list[bool]]:
        """Token ids and mask of one document."""
        chunk = int(np.searchsorted(self._starts, number, side="right")) - 1
        row = number - int(self._starts[chunk])
        return self._ids[chunk][row].as_py(), self._supervised[chunk][row].as_py()

    def oracle(self, number: int) -> list[int]:
        """The depth that the reference model asks of each row of one document; 0, nothing, in data without labels."""
        return [0] * int(self.lengths[number]) if self._oracle is None else self._oracle[number].as_py()

    def where(self, number: int) -> str:
        """The row a document was made from, ``source:line``."""
        return self._where[number].as_py()


def prepare(data_cfg: DataConfig, split: Split, renderer: Renderer, folder: Path) -> Prepared:
    """Render a split into token shards, once.

    A folder that already holds the same data (source bytes, templates, tokenizer, reference model) is used as it is.
    Writing happens beside the folder, which appears complete or not at all. Only the training split is labelled:
    decoding never looks at labels.

    Raises:
        ConfigError: the recipe has no such split, or its reference model has another tokenizer.
        ModelError: the reference model cannot be read.
        DataError: a row is wrong, nothing is supervised, all is too long, or the folder holds other data.
    """
    source = data_cfg.train if split == "train" else data_cfg.heldout
    if source is None:
        raise ConfigError(f"data.{split} is not set", f"set data.{split} to a .jsonl or .parquet file")
    labels = data_cfg.label_model if split == "train" else None
    reference = None if labels is None else ReferenceModel(labels, renderer.tokenizer)
    made_from = _made_from(data_cfg, split, source, renderer, reference)
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        found = Prepared(folder)
        if found.made_from == made_from:
            return found
        both = found.made_from | made_from
        changed = [key for key in both if found.made_from.get(key) != made_from.get(key)]
        raise DataError(f"{folder} holds data prepared from other {', '.join(changed)}", "choose or clear the folder")
    with refusals(str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(data_cfg, split, source, renderer, _Shards(work, reference), made_from)
        if folder.is_dir():
            folder.rmdir()  # only an empty one may be replaced
        os.replace(work, folder)
    except OSError as error:
        if folder.exists() and not (folder / MANIFEST).exists():
            raise DataError(f"{folder} is not empty", "choose another folder") from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Prepared(folder)


def _made_from(
    cfg: DataConfig, split: Split, source: str, renderer: Renderer, reference: ReferenceModel | None
) -> dict[str, Any]:
    """All that the token shards depend on."""
    shaping = ("question_template", "answer_template", "strip_pattern", "system_prompt", "supervise", "context_tokens")
    return {
        "source": source,
        "source_sha256": _source_sha256(source),
        "max_examples": cfg.max_train_examples if split == "train" else cfg.max_heldout_examples,
        "template_digest": renderer.digest,
        **{key: getattr(cfg, key) for key in shaping},
        **({} if reference is None else {"label_model_sha256": reference.digest}),
    }


class _Shards:
    """Writes documents to numbered shard files, labelled if there is a reference model."""

    def __init__(self, folder: Path, reference: ReferenceModel | None) -> None:
        self.folder = folder
        self.reference = reference
        self.schema = SCHEMA if reference is None else SCHEMA.append(ORACLE)
        self.digests: dict[str, str] = {}
        self.rows: list[dict[str, Any]] = []
        self.deep = 0

    def add(self, ids: list[int], supervised: list[bool], where: str) -> None:
        self.rows.append({"ids": ids, "supervised": supervised, "where": where})
        if len(self.rows) == SHARD_ROWS:
            self.flush()

    def flush(self) -> None:
        if not self.rows:
            return
        path = self.folder / f"shard-{len(self.digests):05d}.arrow"
        if self.reference is not None:
            self._label(self.reference)
        table = pa.Table.from_pylist(self.rows, schema=self.schema)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, self.schema) as writer:
            writer.write_table(table)
        self.digests[path.name] = _sha256(path)
        self.rows = []

    def _label(self, reference: ReferenceModel) -> None:
        documents = [(row["ids"], row["supervised"]) for row in self.rows]
        found = (
            depths for part in _with_progress(forwards(documents), "labelling") for depths in reference.depths(part)
        )
        for row, depths in zip(self.rows, found, strict=True):
            row[ORACLE.name] = depths
            self.deep += sum(depth > 1 for depth in depths)


def _write(
    cfg: DataConfig, split: Split, source: str, renderer: Renderer, shards: _Shards, made_from: dict[str, Any]
) -> None:
    count: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    longest = 0
    for row in _with_progress(read_conversations(source, cfg, made_from["max_examples"]), f"preparing {split}"):
        count["rows"] += 1
        if isinstance(row, Dropped):
            dropped[row.reason] += 1
            continue
        ids, supervised = _render(renderer, row, cfg.supervise)
        learned = sum(supervised)
        reason = "no_supervised" if not learned else "too_long" if len(ids) > cfg.context_tokens else None
        if reason:
            longest = max(longest, len(ids)) if learned else longest
            dropped[reason] += 1
            count.update(dropped_tokens=len(ids), dropped_supervised_tokens=learned)
            continue
        count.update(documents=1, tokens=len(ids), supervised_tokens=learned)
        shards.add(ids, supervised, row.where)
    shards.flush()
    if not shards.digests:
        raise _nothing(source, cfg, count["rows"], dropped, longest)
    names = (
        "rows",
        "documents",
        "tokens",
        "supervised_tokens",
        "dropped_tokens",
        "dropped_supervised_tokens",
    )
    counts = {**{name: count[name] for name in names}, "dropped": dict(sorted(dropped.items()))}
    if shards.reference is not None:
        counts["deep_tokens"] = shards.deep
    manifest = {"counts": counts, "made_from": made_from, "shards": shards.digests}
    (shards.folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _render(renderer: Renderer, row: Conversation, supervise: Supervise) -> tuple[list[int], list[bool]]:
    try:
        return renderer.render(row.messages, row.tools, supervise)
    except DataError as error:
        raise DataError(f"{row.where}: {error.message}", error.remedy) from error


def _nothing(source: str, cfg: DataConfig, rows: int, dropped: Counter[str], longest: int) -> DataError:
    """Why a source gave no document at all."""
    if longest:
        return DataError(
            f"{source}: every conversation is longer than the context of {cfg.context_tokens} tokens; "
            f"the longest has {longest}",
            "raise data.context_tokens (and train.micro_batch_tokens), or use shorter conversations",
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "it has no rows"
    return DataError(
        f"{source}: zero supervised tokens in {rows} rows ({reasons})",
        "a conversation needs an assistant turn after a user turn; other rows need data.answer_template",
    )


def _with_progress(rows: Iterator[Any], what: str) -> Iterator[Any]:
    """The same rows, counted on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield from rows
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(rows, description=what)


def _true_counts(masks: pa.ListArray) -> np.ndarray:
    """Number of True in each list; lists are never empty."""
    flat = masks.values.to_numpy(zero_copy_only=False).astype(np.int64)
    return np.add.reduceat(flat, masks.offsets.to_numpy()[:-1])


def _source_sha256(source: str) -> str:
    if source.startswith("generated:"):
        return hashlib.sha256(source.encode()).hexdigest()
    with open_input(source) as file:
        return _hash(file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return _hash(file)


def _hash(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
