"""Rows of a source become conversations: JSONL, Parquet or a generator; messages or question and answer."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from fathom.config.schema import DataConfig
from fathom.data.word_problems import SPLITS, word_problem
from fathom.errors import ConfigError, DataError, FathomError
from fathom.storage.files import open_input

KINDS = (".jsonl", ".parquet")
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELD = re.compile(r"\{(\w+)\}")
GENERATED = "generated:word-problems"
GENERATED_ROWS = {"train": 20_000, "heldout": 1_000}
"""Rows of a generated split when no limit is set."""


class Conversation(NamedTuple):
    """Messages (``role``, ``content``, perhaps ``tool_calls``), tools, and the place they were read from."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    where: str


class Dropped(NamedTuple):
    """A row that is well formed but teaches nothing."""

    reason: str
    where: str


def read_conversations(source: str, data_cfg: DataConfig, limit: int | None = None) -> Iterator[Conversation | Dropped]:
    """Read a source row by row.

    Args:
        source: ``.jsonl`` or ``.parquet`` as a path or URI, or ``generated:word-problems[:train|:heldout]``.
        data_cfg: templates for question/answer rows, the pattern stripped from answers, the system prompt.
        limit: read at most so many rows.

    Raises:
        DataError: a row is not JSON, lacks its answer, or is neither kind; names the file and line.
        StorageError: the source cannot be opened.
    """
    maker = _Maker(data_cfg)
    rows = _rows(source, limit)
    for number, (row, where) in enumerate(rows):
        if limit is not None and number >= limit:
            return
        yield maker.conversation(row, where)


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
        elif source.endswith(KINDS):
            open_input(source).close()
        else:
            raise unknown_kind(source)
    except FathomError as error:
        raise type(error)(f"{key}: {error.message}", error.remedy) from error


def unknown_kind(source: str) -> DataError:
    """The error for a source that is neither JSONL nor Parquet nor generated."""
    return DataError(
        f"{source}: not a kind of data that can be read",
        f"give a .jsonl or .parquet file, or {GENERATED}[:heldout]",
    )


def _rows(source: str, limit: int | None) -> Iterator[tuple[Any, str]]:
    if source.startswith("generated:"):
        return _generated_rows(source, limit)
    if source.endswith(".jsonl"):
        return _jsonl_rows(source)
    if source.endswith(".parquet"):
        return _parquet_rows(source)
    raise unknown_kind(source)


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


def _parquet_rows(source: str) -> Iterator[tuple[Any, str]]:
    import pyarrow
    import pyarrow.parquet

    with open_input(source) as file:
        try:
            number = 0
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield _without_nulls(row), f"{source}:{number}"
        except pyarrow.ArrowException as error:
            raise DataError(f"{source}: not readable as Parquet: {error}", "give an intact Parquet file") from error


def _without_nulls(value: Any) -> Any:
    """Parquet structs give every row every key; absent ones come as nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


class _Maker:
    """Turns one row into a conversation."""

    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg
        try:
            self.strip = re.compile(cfg.strip_pattern) if cfg.strip_pattern else None
        except re.error as error:
            raise ConfigError(
                f"data.strip_pattern {cfg.strip_pattern!r} is not a regular expression: {error}",
                "correct the pattern",
            ) from error

    def conversation(self, row: Any, where: str) -> Conversation | Dropped:
        """The row's conversation, or why it has none."""
        if not isinstance(row, dict):
            raise DataError(
                f"{where}: not an object with fields", "a row is {...} with messages, or question and answer"
            )
        if "messages" in row:
            messages = [
                self.check(message, number, where) for number, message in enumerate(_listed(row, "messages", where), 1)
            ]
        else:
            messages = self.exchange(row, where)
        if not any(message["role"] == "assistant" for message in messages):
            return Dropped("no_assistant_turn", where)
        if self.cfg.system_prompt and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.cfg.system_prompt}, *messages]
        tools = [_wrapped(tool, where) for tool in _listed(row, "tools", where)] if row.get("tools") else None
        return Conversation(messages, tools, where)

    def exchange(self, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """User and assistant message of a question/answer row."""
        question = fill(self.cfg.question_template, row, where, "question_template").strip()
        answer = fill(self.cfg.answer_template, row, where, "answer_template")
        answer = (self.strip.sub("", answer) if self.strip else answer).strip()
        for text, key in ((question, "question"), (answer, "answer")):
            if not text:
                raise DataError(
                    f"{where}: the row has no {key}: it is empty",
                    f"fill or remove the row, or set data.{key}_template",
                )
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def check(self, message: Any, number: int, where: str) -> dict[str, Any]:
        """A message with a known role and text content."""
        place = f"{where}: message {number}"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DataError(f"{place} has no known role", f"a message has a role ({', '.join(ROLES)}) and content")
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            raise DataError(f"{place} ({message['role']}) has no content", "give it a text, or remove it")
        if self.strip and message["role"] == "assistant" and isinstance(content, str):
            return {**message, "content": self.strip.sub("", content)}
        return message


def fill(template: str, row: dict[str, Any], where: str, key: str) -> str:
    """A template with each ``{field}`` replaced by the row's value; other braces stay as they are.

    Raises:
        DataError: the row has no such field, it is null, or it is neither text nor a number.
    """

    def value(found: re.Match[str]) -> str:
        field = row.get(found.group(1))
        if isinstance(field, str | int | float):
            return str(field)
        kind = "no" if field is None else "no text in"
        what = key.removesuffix("_template")
        raise DataError(
            f"{where}: the row has no {what}: there is {kind} field '{found.group(1)}'",
            f"set data.{key}; this row's fields are: {', '.join(map(str, row))}",
        )

    return FIELD.sub(value, template)


def _listed(row: dict[str, Any], key: str, where: str) -> list[Any]:
    """A list of the row; Parquet files often hold it as JSON text."""
    value = row[key]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{where}: '{key}' is text that is not JSON: {error}", f"write {key} as a list") from error
    if not isinstance(value, list):
        raise DataError(f"{where}: '{key}' is not a list", f"write {key} as a list of objects")
    return value


def _wrapped(tool: Any, where: str) -> dict[str, Any]:
    """A tool in the shape templates expect; a bare function description is wrapped."""
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        return tool
    if isinstance(tool, dict) and isinstance(tool.get("name"), str):
        return {"type": "function", "function": tool}
    raise DataError(f"{where}: a tool has no name", "a tool is {name, description, parameters}")
