"""Prepared data: immutable token shards (Arrow, memory-mapped) and a manifest that accounts for every row."""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from fathom.config.schema import DataConfig
from fathom.data.oracle import ReferenceModel
from fathom.data.overlap import Overlap
from fathom.data.shards import ORACLE, Part, PartWriter, Task
from fathom.data.sources import source_files, source_sha256
from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError
from fathom.storage.files import sha256_file
from fathom.storage.local import refusals

MANIFEST = "MANIFEST.json"
Split = Literal["train", "heldout"]
KEPT = ("rows", "documents", "tokens", "supervised_tokens", "dropped_tokens", "dropped_supervised_tokens")
Each = Callable[[PartWriter, list[Task]], Iterable[Part]]
"""Has every task done, as ``map`` does: results in the same order, wherever they are made."""


class Prepared:
    """A prepared data set, read-only; documents are read from memory-mapped shards.

    Args:
        folder: what :func:`prepare` wrote.

    Attributes:
        counts: rows read, documents and tokens kept, supervised tokens, what was dropped by reason, those of each
            source of a mixture, how many tokens are labelled to go deeper than depth 1, and of an evaluation file that
            the data was compared with.
        digest: sha256 (hex) of the manifest, which holds every shard's sha256.
        labelled: whether a reference model has labelled it with depths.
        lengths: int64 ``[documents]``, tokens of each.
        supervised_counts: int64 ``[documents]``, supervised tokens of each.
        sizes: documents of each source; they are numbered through in the recipe's order.

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
        self.sizes = [each["documents"] for each in self.counts.get("sources", [self.counts])]
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
        if not path.is_file() or sha256_file(path) != digest:
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


def prepare(data_cfg: DataConfig, split: Split, renderer: Renderer, folder: Path, each: Each = map) -> Prepared:
    """Render a split into token shards, once.

    A folder that already holds the same data (source bytes, templates, tokenizer, reference model, evaluation file) is
    used as it is. Writing happens beside the folder, which appears complete or not at all. Only the training split is
    labelled and compared with an evaluation file: decoding never looks at labels.

    Args:
        data_cfg: the recipe's.
        split: which of its sources.
        renderer: of the base model's tokenizer.
        folder: receives shards and manifest.
        each: how files are worked on; the shards are the same with any. It is not asked with a limit on rows, for which
            files have to be read in turn.

    Raises:
        ConfigError: the recipe has no such split, or its reference model has another tokenizer.
        ModelError: the reference model cannot be read.
        DataError: a row is wrong, nothing is supervised, all is too long, or the folder holds other data.
    """
    train = split == "train"
    sources = data_cfg.train_sources if train else [data_cfg.heldout] if data_cfg.heldout else []
    if not sources:
        raise ConfigError(f"data.{split} is not set", f"set data.{split} to a .jsonl or .parquet file")
    labels = data_cfg.label_model if train else None
    reference = None if labels is None else ReferenceModel(labels, renderer.tokenizer)
    made_from = _made_from(data_cfg, split, sources, renderer, reference)
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        found = Prepared(folder)
        if found.made_from == made_from:
            return found
        both = found.made_from | made_from
        changed = [key for key in both if found.made_from.get(key) != made_from.get(key)]
        raise DataError(f"{folder} holds data prepared from other {', '.join(changed)}", "choose or clear the folder")
    overlap = Overlap(data_cfg) if train and data_cfg.decontaminate_against else None
    with refusals(str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write = PartWriter(data_cfg, renderer, reference, overlap, work)
        parts = list(_parts(write, sources, made_from["max_examples"], each))
        manifest = {
            "counts": _counts(parts, sources, data_cfg, reference, overlap),
            "made_from": made_from,
            "shards": {name: digest for part in parts for name, digest in part.shards.items()},
        }
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
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
    cfg: DataConfig, split: Split, sources: list[str], renderer: Renderer, reference: ReferenceModel | None
) -> dict[str, Any]:
    """All that the token shards depend on."""
    shaping = ("question_template", "answer_template", "strip_pattern", "system_prompt", "supervise", "context_tokens")
    made_from = {
        "source": sources,
        "source_sha256": [source_sha256(source) for source in sources],
        "max_examples": cfg.max_train_examples if split == "train" else cfg.max_heldout_examples,
        "template_digest": renderer.digest,
        **{key: getattr(cfg, key) for key in shaping},
    }
    if reference is not None:
        made_from["label_model_sha256"] = reference.digest
        if cfg.label_shares is not None:
            made_from["label_shares"] = list(cfg.label_shares)
    if split == "train" and cfg.decontaminate_against:
        made_from["decontaminate_sha256"] = source_sha256(cfg.decontaminate_against)
        made_from["decontaminate_words"] = cfg.decontaminate_words
    return made_from


def _parts(write: PartWriter, sources: list[str], limit: int | None, each: Each) -> Iterator[Part]:
    """What every file of every source gave, in order; at most ``limit`` rows of each source are read."""
    named = [(number, file) for number, source in enumerate(sources) for file in source_files(source)]
    tasks = [Task(place, number, file, limit) for place, (number, file) in enumerate(named)]
    if limit is None:
        yield from each(write, tasks)
        return
    read: Counter[int] = Counter()
    for task in tasks:
        left = limit - read[task.source]
        if left > 0:
            part = write(task._replace(limit=left))
            read[task.source] += part.counts["rows"]
            yield part


def _counts(
    parts: list[Part],
    sources: list[str],
    cfg: DataConfig,
    reference: ReferenceModel | None,
    overlap: Overlap | None,
) -> dict[str, Any]:
    """Everything that was read, accounted for; refuses a source that gave nothing."""
    by_source: list[dict[str, Any]] = []
    for number, source in enumerate(sources):
        own = [part for part in parts if part.source == number]
        total, dropped = _sum(part.counts for part in own), _sum(part.dropped for part in own)
        if not total["documents"]:
            raise _nothing(source, cfg, total["rows"], dropped, max((part.longest for part in own), default=0))
        by_source.append({"source": source, **{name: total[name] for name in KEPT}})
    total = _sum(part.counts for part in parts)
    counts: dict[str, Any] = {name: total[name] for name in KEPT}
    counts["dropped"] = dict(sorted(_sum(part.dropped for part in parts).items()))
    if len(sources) > 1:
        counts["sources"] = by_source
    if reference is not None:
        counts["deep_tokens"] = total["deep_tokens"]
    if overlap is not None:
        counts["evaluation"] = overlap.counts
    return counts


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total


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


def _true_counts(masks: pa.ListArray) -> np.ndarray:
    """Number of True in each list, int64; lists are never empty. Looks at a shard at a time, a byte a token."""
    flat = masks.values.to_numpy(zero_copy_only=False)
    return np.add.reduceat(flat, masks.offsets.to_numpy()[:-1], dtype=np.int64)
