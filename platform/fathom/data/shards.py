"""One file of a source to token shards, by itself: files can be worked on in any order, or at the same time."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fathom.config.schema import DataConfig
from fathom.data.oracle import ReferenceModel, forwards, quantile_depths
from fathom.data.overlap import Overlap
from fathom.data.records import Conversation, Dropped, read_conversations
from fathom.data.template import Rendered, Renderer
from fathom.errors import DataError
from fathom.storage.files import sha256_file

SCHEMA = pa.schema({"ids": pa.list_(pa.int32()), "supervised": pa.list_(pa.bool_()), "where": pa.string()})
ORACLE = pa.field("oracle", pa.list_(pa.int8()))
"""A column of data that a reference model has labelled: the depth of each row."""
SHARD_ROWS, SHARD_TOKENS = 16_384, 1 << 24
"""A shard ends with the document that reaches one of them: so much is in memory at once."""


class Task(NamedTuple):
    """A file to prepare.

    Attributes:
        number: its place among all files of the split, from 0; begins the names of its shards.
        source: number of its source in the recipe, from 0.
        file: path, URI or generator.
        limit: rows to read at most.
    """

    number: int
    source: int
    file: str
    limit: int | None


class Part(NamedTuple):
    """What a file gave.

    Attributes:
        source: as its task's.
        counts: rows read, documents and tokens kept, supervised tokens, those dropped, those labelled to go deeper.
        dropped: rows by reason.
        longest: tokens of the longest conversation that was too long, 0 for none.
        shards: sha256 (hex) by name.
    """

    source: int
    counts: Counter[str]
    dropped: Counter[str]
    longest: int
    shards: dict[str, str]


@dataclass(frozen=True)
class PartWriter:
    """Renders a file's conversations into shards.

    Args:
        cfg: how rows become conversations, which turns are learned, how long they may be.
        renderer: of the base model's tokenizer.
        reference: labels documents with depths, if given.
        overlap: conversations that touch it are dropped, if given.
        folder: receives the shards.
    """

    cfg: DataConfig
    renderer: Renderer
    reference: ReferenceModel | None
    overlap: Overlap | None
    folder: Path

    def __call__(self, task: Task) -> Part:
        """Prepare one file."""
        counts: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        longest = 0
        shards = _Shards(self.folder, task.number, self.reference, self.cfg.label_shares)
        rows = read_conversations(task.file, self.cfg, task.limit)
        for row in with_progress(rows, f"preparing {task.file.rpartition('/')[2]}"):
            counts["rows"] += 1
            if isinstance(row, Dropped):
                dropped[row.reason] += 1
                continue
            rendered = self._render(row)
            learned, length = sum(rendered.supervised), len(rendered.ids)
            reason = self._fault(row, length, learned)
            if reason is None:
                counts.update(documents=1, tokens=length, supervised_tokens=learned)
                shards.add(rendered, row.where)
                continue
            longest = max(longest, length) if reason == "too_long" else longest
            dropped[reason] += 1
            counts.update(dropped_tokens=length, dropped_supervised_tokens=learned)
        shards.flush()
        return Part(task.source, counts + Counter(deep_tokens=shards.deep), dropped, longest, shards.digests)

    def _render(self, row: Conversation) -> Rendered:
        try:
            return self.renderer.render(row.messages, row.tools, self.cfg.supervise)
        except DataError as error:
            raise DataError(f"{row.where}: {error.message}", error.remedy) from error

    def _fault(self, row: Conversation, length: int, learned: int) -> str | None:
        if not learned:
            return "no_supervised"
        if length > self.cfg.context_tokens:
            return "too_long"
        return "contaminated" if self.overlap is not None and self.overlap.touches(row.messages) else None


class _Shards:
    """Gathers a file's documents and writes them to numbered shards, labelled if there is a reference model: with what
    it gets wrong, or with so large ``shares`` of depths 1 to M by quantile of a shard's losses."""

    def __init__(
        self, folder: Path, number: int, reference: ReferenceModel | None, shares: Sequence[float] | None
    ) -> None:
        self.prefix = folder / f"shard-{number:05d}"
        self.reference = reference
        self.shares = shares
        self.schema = SCHEMA if reference is None else SCHEMA.append(ORACLE)
        self.digests: dict[str, str] = {}
        self.deep = 0
        self._begin()

    def _begin(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in self.schema.names}
        self.tokens = 0

    def add(self, rendered: Rendered, where: str) -> None:
        self.columns["ids"].append(np.array(rendered.ids, np.int32))
        self.columns["supervised"].append(np.array(rendered.supervised, np.bool_))
        self.columns["where"].append(where)
        self.tokens += len(rendered.ids)
        if len(self.columns["ids"]) >= SHARD_ROWS or self.tokens >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self.tokens:
            return
        if self.reference is not None:
            self._label(self.reference)
        path = self.prefix.with_name(f"{self.prefix.name}-{len(self.digests):05d}.arrow")
        table = pa.table(self.columns, schema=self.schema)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, self.schema) as writer:
            writer.write_table(table)
        self.digests[path.name] = sha256_file(path)
        self._begin()

    def _label(self, reference: ReferenceModel) -> None:
        both = zip(self.columns["ids"], self.columns["supervised"], strict=True)
        documents = [(ids.tolist(), supervised.tolist()) for ids, supervised in both]
        parts = with_progress(forwards(documents), "labelling")
        if self.shares is None:
            found = [depths for part in parts for depths in reference.depths(part)]
        else:
            found = quantile_depths([losses for part in parts for losses in reference.losses(part)], self.shares)
        self.columns[ORACLE.name] = found
        self.deep += sum(depth > 1 for depths in found for depth in depths)


def with_progress(rows: Iterator[Any], what: str) -> Iterator[Any]:
    """The same rows, counted on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield from rows
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(rows, description=what)
