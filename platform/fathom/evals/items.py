"""Items of a task: a prompt, and the reference that an answer is graded against."""

from typing import NamedTuple

from fathom.config.schema import DataConfig
from fathom.data.records import Dropped, read_conversations
from fathom.data.template import Renderer
from fathom.errors import DataError


class Item(NamedTuple):
    """One question.

    Attributes:
        prompt: token ids, generation prompt included.
        reference: the right answer, perhaps a whole worked solution.
        where: the row it was read from, ``source:line``.
    """

    prompt: list[int]
    reference: str
    where: str


def read_items(source: str, data_cfg: DataConfig, renderer: Renderer, limit: int | None = None) -> list[Item]:
    """Rows of a task as items; the last assistant turn of a row is its reference.

    Args:
        source: as in :func:`fathom.data.records.read_conversations`.
        data_cfg: templates for question/answer rows and the system prompt.
        renderer: of the model that answers.
        limit: read at most so many rows.

    Raises:
        DataError: a row that cannot be read, or no row with an answer; names the file and line.
    """
    items: list[Item] = []
    for row in read_conversations(source, data_cfg, limit):
        if isinstance(row, Dropped):
            continue
        last = max(number for number, message in enumerate(row.messages) if message["role"] == "assistant")
        reference = row.messages[last].get("content")
        if last == 0 or not isinstance(reference, str):
            what = "no question before its answer" if last == 0 else "an answer that is not text"
            raise DataError(f"{row.where}: the row has {what}", "an item is a question and the right answer as text")
        try:
            prompt = renderer.prompt(row.messages[:last], row.tools)
        except DataError as error:
            raise DataError(f"{row.where}: {error.message}", error.remedy) from error
        items.append(Item(prompt, reference, row.where))
    if not items:
        raise DataError(f"{source}: no row has an answer to grade against", "give question/answer rows")
    return items
