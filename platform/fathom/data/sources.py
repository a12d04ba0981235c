"""Where rows come from: JSONL, Parquet and Arrow files, folders of them, local or ``s3://``, and generators."""

import hashlib
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from fathom.data.word_problems import SPLITS, word_problem
from fathom.errors import DataError, FathomError
from fathom.storage import files
from fathom.storage.files import open_input

KINDS = (".jsonl", ".parquet", ".arrow")
GENERATED = "generated:word-problems"
GENERATED_ROWS = {"train": 20_000, "heldout": 1_000}
"""Rows of a generated split when no limit is set."""
SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
"""Words in the names of files or folders of one split, as ``datasets`` and its hub write them."""


def source_files(source: str) -> list[str]:
    """The files of a source, in the order in which they are read: always the same.

    Args:
        source: a file of :data:`KINDS`; a path with ``*`` in its last parts; a folder that ``datasets`` saved; a folder
            with files of one split at any depth; or ``generated:word-problems[:train|:heldout]``. Paths or URIs.

    Raises:
        DataError: nothing there can be read, or the folder holds several splits.
        StorageError: the object store does not answer or refuses.
    """
    if source.startswith("generated:") or ("*" not in source and source.endswith(KINDS)):
        return [source]
    whole = source.rstrip("/").split("/")
    fixed = next((number for number, part in enumerate(whole) if "*" in part), len(whole))
    folder, pattern = "/".join(whole[:fixed]) or ("/" if source.startswith("/") else "."), "/".join(whole[fixed:])
    names = files.list_files(folder)
    if pattern:
        names = [name for name in names if fnmatchcase(name, pattern)]
    elif "dataset_dict.json" in names:
        splits = json.loads(files.read_bytes(files.join(folder, "dataset_dict.json")))["splits"]
        raise DataError(f"{source}: a dataset of {len(splits)} splits", f"give one: {source}/{splits[0]}")
    elif "state.json" in names:
        listed = json.loads(files.read_bytes(files.join(folder, "state.json")))["_data_files"]
        names = [files.safe_name(each["filename"], source) for each in listed]
    names = [name for name in names if name.endswith(KINDS)]
    splits = sorted({word for name in names for word in re.split(r"[-_./]", name) if word in SPLIT_NAMES})
    if len(splits) > 1:
        raise DataError(
            f"{source}: holds several splits: {', '.join(splits)}", f"give one, by a pattern: {folder}/**{splits[0]}*"
        )
    if not names:
        raise unknown_kind(source)
    return [files.join(folder, name) if folder != "." else name for name in names]


def require_source(key: str, source: str) -> None:
    """Raise unless a source is of a known kind and can be opened.

    Args:
        key: what the recipe calls it, for the message.

    Raises:
        DataError: it is missing, cannot be opened, or is no kind of data that can be read.
        StorageError: the object store does not answer or refuses.
    """
    try:
        if source.startswith("generated:"):
            next(_generated_rows(source, 1))
        else:
            open_input(source_files(source)[0]).close()
    except FathomError as error:
        raise type(error)(f"{key}: {error.message}", error.remedy) from error


def unknown_kind(source: str) -> DataError:
    """The error for a source that is neither a file that can be read nor a folder of such files nor generated."""
    return DataError(
        f"{source}: not a kind of data that can be read, or nothing is there",
        f"give a .jsonl, .parquet or .arrow file, a folder of them, or {GENERATED}[:heldout]",
    )


def source_sha256(source: str) -> str:
    """sha256 (hex) of a source's bytes; of several files, of their names and digests."""
    if source.startswith("generated:"):
        return hashlib.sha256(source.encode()).hexdigest()
    names = source_files(source)
    digests = [_file_sha256(name) for name in names]
    if names == [source]:
        return digests[0]
    listed = [f"{name.rpartition('/')[2]} {digest}" for name, digest in zip(names, digests, strict=True)]
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()


def _file_sha256(name: str) -> str:
    digest = hashlib.sha256()
    with open_input(name) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_rows(file: str, limit: int | None = None) -> Iterator[tuple[Any, str]]:
    """Rows of one file or generator, each with the place it stands at, ``file:row``.

    Args:
        file: one of those that :func:`source_files` gave.
        limit: no more rows will be asked for.

    Raises:
        DataError: the file is damaged, or a line is no JSON.
        StorageError: it cannot be opened.
    """
    if file.startswith("generated:"):
        return _generated_rows(file, limit)
    if file.endswith(".jsonl"):
        return _jsonl_rows(file)
    if file.endswith((".parquet", ".arrow")):
        return _column_rows(file)
    raise unknown_kind(file)


def _generated_rows(source: str, limit: int | None) -> Iterator[tuple[Any, str]]:
    split = source.removeprefix(GENERATED).removeprefix(":") or "train"
    if not source.startswith(GENERATED) or split not in SPLITS:
        raise DataError(f"{source}: no such generator", f"known: {', '.join(f'{GENERATED}:{name}' for name in SPLITS)}")
    for index in range(limit or GENERATED_ROWS[split]):
        yield word_problem(index, split), f"{source}:{index + 1}"


def _jsonl_rows(source: str) -> Iterator[tuple[Any, str]]:
    with open_input(source) as file:
        for line, raw in enumerate(file, start=1):
            where = f"{source}:{line}"
            try:
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
                if text.strip():
                    yield json.loads(text), where
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 text", "save the file as UTF-8") from error
            except (json.JSONDecodeError, RecursionError) as error:
                reason = (
                    f"{error.msg} at column {error.colno}" if isinstance(error, ValueError) else "nested too deeply"
                )
                raise DataError(f"{where}: invalid JSON: {reason}", "a line holds one JSON object") from error


def _column_rows(source: str) -> Iterator[tuple[Any, str]]:
    import pyarrow

    kind = "Parquet" if source.endswith(".parquet") else "Arrow"
    with open_input(source) as file:
        try:
            number = 0
            for batch in _parquet_batches(file) if kind == "Parquet" else _arrow_batches(file):
                for row in batch.to_pylist():
                    number += 1
                    yield _without_nulls(row), f"{source}:{number}"
        except pyarrow.ArrowException as error:
            raise DataError(f"{source}: not readable as {kind}: {error}", f"give an intact {kind} file") from error


def _parquet_batches(file: Any) -> Iterator[Any]:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024)


def _arrow_batches(file: Any) -> Iterator[Any]:
    """Record batches of either kind of Arrow file; ``datasets`` writes the streaming one."""
    import pyarrow.ipc

    magic = file.read(6)
    file.seek(0)
    if magic != b"ARROW1":
        yield from pyarrow.ipc.open_stream(file)
        return
    reader = pyarrow.ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _without_nulls(value: Any) -> Any:
    """Structs of columns give every row every key; absent ones come as nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
