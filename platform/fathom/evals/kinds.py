"""Kinds of tokens by what they spell: digits, operators, first and later pieces of words, spaces, special tokens."""

from collections.abc import Callable, Sequence
from typing import Any

DIGIT = "digit"
OPERATOR = "operator or punctuation"
WORD = "first piece of a word"
CONTINUATION = "later piece of a word"
SPACE = "whitespace"
SPECIAL = "special"
KINDS = (DIGIT, OPERATOR, WORD, CONTINUATION, SPACE, SPECIAL)

INCOMPLETE = "\ufffd"
CONTEXT = 4
"""Tokens before a token that are decoded with it: its text can depend on its neighbours, by half characters and by
tokenizers that drop the first space."""


def token_kinds(ids: Sequence[int], decode: Callable[[list[int]], str], special: frozenset[int]) -> list[str]:
    """The kind of each token of one document, one of :data:`KINDS`.

    Args:
        ids: the document.
        decode: token ids to text, exactly as they spell it.
        special: ids of control tokens.
    """
    kinds: list[str] = []
    before = ""
    for place, token in enumerate(ids):
        if token in special:
            kinds.append(SPECIAL)
            before = ""
            continue
        start = place
        while start > 0 and place - start < CONTEXT and ids[start - 1] not in special:
            start -= 1
        context = decode(list(ids[start:place]))
        whole = decode(list(ids[start : place + 1]))
        # Half a character shows as a replacement until its other half completes it.
        piece = whole[len(context.rstrip(INCOMPLETE)) :]
        kinds.append(kind_of(piece, before))
        before = piece[-1:] or before
    return kinds


def kind_of(piece: str, before: str) -> str:
    """The kind of a token that spells ``piece`` after the character ``before`` ("" at the start)."""
    core = piece.strip()
    if not core:
        return SPACE
    if any(letter.isdigit() for letter in core) and all(letter.isdigit() or letter in ".," for letter in core):
        return DIGIT
    if not any(letter.isalnum() or letter == INCOMPLETE for letter in core):
        return OPERATOR
    inside = before.isalnum() or before == INCOMPLETE
    return CONTINUATION if inside and not piece[0].isspace() else WORD


def tokenizer_kinds(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """:func:`token_kinds` with a ``transformers`` tokenizer."""
    added = tokenizer.added_tokens_decoder
    special = frozenset(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return lambda ids: token_kinds(ids, decode, special)
