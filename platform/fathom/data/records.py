"""Rows of a source become conversations: those with messages as they are, others as question and answer."""

import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from fathom.config.schema import DataConfig
from fathom.data.sources import file_rows, source_files
from fathom.errors import ConfigError, DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELD = re.compile(r"\{(\w+)\}")


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
        source: as in :func:`fathom.data.sources.source_files`.
        data_cfg: templates for question/answer rows, the pattern stripped from answers, the system prompt.
        limit: read at most so many rows.

    Raises:
        DataError: a row is not JSON, lacks its answer, or is neither kind; names the file and row.
        StorageError: the source cannot be opened.
    """
    maker = _Maker(data_cfg)
    rows = chain.from_iterable(file_rows(file, limit) for file in source_files(source))
    for row, where in islice(rows, limit):
        yield maker.conversation(row, where)


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
