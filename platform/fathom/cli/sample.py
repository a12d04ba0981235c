"""Prepared conversations for a person's eyes: what the model reads, and which of it it learns."""

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fathom.data.prepared import Prepared

OPEN, CLOSE = "[[", "]]"
"""Around what is supervised, where there is no colour."""


class Shown(NamedTuple):
    """A prepared conversation.

    Attributes:
        number: in the prepared data.
        where: the row it was made from, ``source:line``.
        tokens, supervised: how many.
        spans: its text, cut where supervision begins and ends: (text, supervised).
    """

    number: int
    where: str
    tokens: int
    supervised: int
    spans: list[tuple[str, bool]]


def sample(data: "Prepared", count: int, tokenizer: Any) -> list[Shown]:
    """So many conversations, evenly spread over the data, decoded from the ids that training reads."""
    shown = []
    for place in range(min(count, len(data))):
        number = place * len(data) // min(count, len(data))
        ids, supervised = data.document(number)
        spans = [
            (tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False), wanted)
            for wanted, run in groupby(zip(ids, supervised, strict=True), key=lambda pair: pair[1])
        ]
        shown.append(Shown(number, data.where(number), len(ids), sum(supervised), spans))
    return shown


def print_sample(shown: list[Shown]) -> None:
    """Supervised text in reverse green on a terminal, else between ``[[`` and ``]]``; on stdout."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for each in shown:
        console.print(Text(f"\n{each.where}: {each.tokens:,} tokens, {each.supervised:,} supervised", style="bold"))
        text = Text()
        for span, supervised in each.spans:
            marked = supervised and not console.is_terminal
            body = printable(span)
            text.append(f"{OPEN}{body}{CLOSE}" if marked else body, style="reverse green" if supervised else "")
        console.print(text)


def printable(text: str) -> str:
    """The text with control characters written out, so that data cannot steer the terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter).strip("'") for letter in text)
