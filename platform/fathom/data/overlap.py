"""Which conversations share text with an evaluation file: runs of n words that are in both."""

import json
import re
from collections.abc import Iterator
from typing import Any

from fathom.config.schema import DataConfig
from fathom.data.records import Conversation, read_conversations
from fathom.errors import DataError

WORD = re.compile(r"\w+")


class Overlap:
    """The n-grams of an evaluation file's questions and answers.

    Words are compared without case and punctuation, so that a copy with another layout is still one. System prompts are
    left out on both sides: they are shared by design. A message shorter than n words is no evidence and never matches.

    Args:
        data_cfg: ``decontaminate_against`` is the file, read with the same templates as the data itself;
            ``decontaminate_words`` is n.

    Attributes:
        counts: rows of the file, distinct n-grams, and messages that are too short to match.

    Raises:
        DataError: the file cannot be read, or all of it is too short to match.
    """

    def __init__(self, data_cfg: DataConfig) -> None:
        source, self.words = str(data_cfg.decontaminate_against), data_cfg.decontaminate_words
        self._ngrams: set[str] = set()
        rows = short = 0
        for row in read_conversations(source, data_cfg):
            rows += 1
            if isinstance(row, Conversation):
                for text in _texts(row.messages):
                    found = set(ngrams(text, self.words))
                    short += not found
                    self._ngrams |= found
        if not self._ngrams:
            raise DataError(
                f"data.decontaminate_against: no message of {source} has {self.words} words: nothing could match",
                "lower data.decontaminate_words",
            )
        self.counts = {"rows": rows, "ngrams": len(self._ngrams), "short_messages": short}

    def touches(self, messages: list[dict[str, Any]]) -> bool:
        """Whether a question or answer of a conversation shares n words in a row with the file."""
        return any(gram in self._ngrams for text in _texts(messages) for gram in ngrams(text, self.words))


def ngrams(text: str, words: int) -> Iterator[str]:
    """Every run of so many words, lower case, without punctuation; of a shorter text none."""
    found = WORD.findall(text.casefold())
    for start in range(len(found) - words + 1):
        yield " ".join(found[start : start + words])


def _texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    """What users and assistants say, and what assistants think and ask of tools: all that can be learned."""
    for message in messages:
        if message["role"] not in ("user", "assistant"):
            continue
        content = message.get("content")
        if content:
            yield content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)
        if message.get("reasoning_content"):
            yield str(message["reasoning_content"])
        for call in message.get("tool_calls") or ():
            yield json.dumps(call, ensure_ascii=False)
