"""Text to token ids such that what a message says can never become a control token."""

import re
from typing import Any

# Unicode noncharacters: never valid in text that is interchanged, so free for marking.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARKED = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")


class Encoder:
    """A tokenizer that knows which special tokens a template wrote and which a message merely mentions.

    A message that contains ``<|im_end|>`` would otherwise end its own turn: the rendered text does not say
    who wrote it. :meth:`guard` marks such places before rendering, :meth:`encode` turns them into ordinary
    tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self.specials = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        longest_first = sorted((text for text in self.specials if text), key=lambda text: (-len(text), text))
        names = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._mention = re.compile(names)
        self._control = re.compile(f"(?<!{OPEN})(?:{names})")

    def guard(self, value: Any) -> Any:
        """The same value, nested or not, with every special token in its strings marked as plain text."""
        if isinstance(value, str):
            clean = value.replace(OPEN, "\ufffd").replace(CLOSE, "\ufffd")
            return self._mention.sub(lambda found: f"{OPEN}{found.group()}{CLOSE}", clean)
        if isinstance(value, dict):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.guard(item) for item in value]
        return value

    def last_control(self, text: str) -> re.Match[str] | None:
        """The last special token in a rendered text that the template wrote itself."""
        found = list(self._control.finditer(text))
        return found[-1] if found else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text. Adds no token of its own: the template writes the BOS, once."""
        if OPEN not in text:
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for number, piece in enumerate(MARKED.split(text)):
            if piece:  # odd pieces are the marked ones
                ids += self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=number % 2 == 1)
        return ids

    def spells(self, ids: list[int], text: str) -> bool:
        """Whether ids decode to exactly this rendered text."""
        plain = MARKED.sub(lambda found: found.group(1), text)
        kept = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return kept == plain
