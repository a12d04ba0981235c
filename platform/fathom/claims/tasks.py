"""What the small models learn: chains of permutations, sums by characters, and text by characters.

A document is a pure function of (task, split, seed, number). Prompts are split by their own content, so a held-out
prompt is never a training prompt, whatever the seed.
"""

import itertools
import random
import zlib
from collections import Counter
from typing import NamedTuple, Protocol

from fathom.data.word_problems import word_problem
from fathom.errors import DataError

TRAIN, HELDOUT = "train", "heldout"
HELDOUT_SHARE = 8
"""One prompt in so many is held out."""

Group = list[tuple[int, ...]]


class Document(NamedTuple):
    """Token ids; which of them are targets; and what kind of token each is (``prompt`` where it is no target)."""

    ids: list[int]
    mask: list[bool]
    kinds: list[str]


class Task(Protocol):
    """A source of documents over a small vocabulary.

    Attributes:
        name: for the report.
        vocab_size: how many token ids there are.
        answers: ids among which a hard token is chosen, by which accuracy is measured; empty for text.
    """

    name: str
    vocab_size: int
    answers: list[int]

    def document(self, split: str, seed: int, number: int) -> Document:
        """Document ``number`` of a split, the same on every machine."""
        ...

    def is_hard(self, kind: str) -> bool:
        """Whether tokens of this kind need the computation that the task is about."""
        ...


def permutations_of(points: int) -> Group:
    """The symmetric group: S3 has 6 elements and does not commute, so the order of a chain matters."""
    return list(itertools.permutations(range(points)))


def rotations_of(points: int) -> Group:
    """The cyclic group, which commutes: the easy relative of :func:`permutations_of`."""
    return [tuple((start + step) % points for step in range(points)) for start in range(points)]


GROUPS: dict[str, Group] = {"S3": permutations_of(3), "C5": rotations_of(5)}


def compose(group: Group, chain: list[int]) -> int:
    """Number of the element that applies the chain's elements from left to right."""
    places = tuple(range(len(group[0])))
    for number in chain:
        places = tuple(group[number][place] for place in places)
    return group.index(places)


def split_of(prompt: str) -> str:
    """The split of a prompt, from its own text."""
    return HELDOUT if zlib.crc32(prompt.encode()) % HELDOUT_SHARE == 0 else TRAIN


class Chains:
    """``g1 .. gk = ANS r OK r ;``: the first r needs k - 1 compositions, everything else supervised is easy.

    Several problems make a document. Chains of one element are all in training, because holding one of a handful out
    would hide an element; the held-out split has the lengths from 2.

    Args:
        group: a name of :data:`GROUPS`.
        longest: k is uniform from 1 to this.
        context_tokens: a document has at most so many tokens.
    """

    def __init__(self, group: str, longest: int, context_tokens: int) -> None:
        self.name = f"chains of up to {longest} elements of {group}"
        self.group = GROUPS[group]
        self.longest = longest
        self.context_tokens = context_tokens
        elements = [chr(ord("a") + number) for number in range(len(self.group))]
        self.vocabulary = [*elements, "=", "ANS", "OK", ";"]
        self.vocab_size = len(self.vocabulary)
        self.answers = list(range(len(elements)))

    def document(self, split: str, seed: int, number: int) -> Document:
        chance = random.Random(f"chains/{split}/{seed}/{number}")
        out = Document([], [], [])
        while len(out.ids) + self.longest + 6 <= self.context_tokens:
            chain = self._chain(chance, split)
            result = compose(self.group, chain)
            equals, ans, ok, end = range(len(self.group), self.vocab_size)
            out.ids.extend([*chain, equals, ans, result, ok, result, end])
            out.mask.extend([False] * (len(chain) + 1) + [True] * 5)
            kinds = ["template", f"result {len(chain)}", "template", "copy", "template"]
            out.kinds.extend(["prompt"] * (len(chain) + 1) + kinds)
        return out

    def _chain(self, chance: random.Random, split: str) -> list[int]:
        while True:
            length = chance.randint(1, self.longest)
            chain = [chance.randrange(len(self.group)) for _ in range(length)]
            mine = TRAIN if length == 1 else split_of(" ".join(map(str, chain)))
            if mine == split:
                return chain

    def is_hard(self, kind: str) -> bool:
        return kind.startswith("result")


class Sums:
    """``27+85=211;``: addition by characters, the sum's least significant digit first, so that a digit needs one carry.

    Args:
        digits: each number has from 1 to so many.
        context_tokens: a document has at most so many tokens.
    """

    def __init__(self, digits: int, context_tokens: int) -> None:
        self.name = f"sums of up to {digits} digits"
        self.digits = digits
        self.context_tokens = context_tokens
        self.vocabulary = [*"0123456789+=;"]
        self.vocab_size = len(self.vocabulary)
        self.answers = list(range(10))

    def document(self, split: str, seed: int, number: int) -> Document:
        chance = random.Random(f"sums/{split}/{seed}/{number}")
        out = Document([], [], [])
        while len(out.ids) + 3 * self.digits + 4 <= self.context_tokens:
            prompt, total, carries = self._sum(chance, split)
            out.ids.extend(self.vocabulary.index(sign) for sign in f"{prompt}{total};")
            out.mask.extend([False] * len(prompt) + [True] * (len(total) + 1))
            kinds = ["digit with carry" if carry else "digit" for carry in carries]
            out.kinds.extend(["prompt"] * len(prompt) + kinds + ["template"])
        return out

    def _sum(self, chance: random.Random, split: str) -> tuple[str, str, list[bool]]:
        """Prompt, digits of the sum from the least significant, and for each whether a carry came in."""
        while True:
            a, b = (chance.randrange(10 ** chance.randint(1, self.digits)) for _ in range(2))
            prompt = f"{a}+{b}="
            if split_of(prompt) == split:
                total = str(a + b)[::-1]
                return prompt, total, [a % 10**place + b % 10**place >= 10**place for place in range(len(total))]

    def is_hard(self, kind: str) -> bool:
        return kind.startswith("digit")


class Text:
    """Text by characters, every character but the first a target: this package's word problems, or a file's text.

    Args:
        window: characters of a document.
        source: a file's text, of which the last eighth is held out; None for word problems.
    """

    def __init__(self, window: int, source: str | None = None) -> None:
        self.window = window
        self.name = "word problems by characters" if source is None else "your text by characters"
        self.answers: list[int] = []
        self.parts: dict[str, str] = {}
        if source is not None:
            border = len(source) - len(source) // HELDOUT_SHARE
            self.parts = {TRAIN: source[:border], HELDOUT: source[border:]}
            if len(self.parts[HELDOUT]) < 2 * window:
                raise DataError(
                    f"the text has {len(source)} characters: too few to hold out any",
                    f"give --data a file of at least {2 * window * HELDOUT_SHARE} characters",
                )
        seen = self.parts.get(TRAIN) or "".join(_problem(TRAIN, number) for number in range(300))
        # Number 0 stands for characters that are rare or were never seen.
        self.alphabet = {sign: rank + 1 for rank, (sign, _) in enumerate(Counter(seen).most_common(250))}
        self.vocab_size = len(self.alphabet) + 1

    def document(self, split: str, seed: int, number: int) -> Document:
        chance = random.Random(f"text/{split}/{seed}/{number}")
        text = self.parts[split] if self.parts else _problem(split, chance.randrange(1_000_000))
        start = chance.randrange(max(len(text) - self.window, 0) + 1)
        piece = text[start : start + self.window]
        kinds = [_kind(before, sign) for before, sign in zip(" " + piece, piece, strict=False)]
        return Document([self.alphabet.get(sign, 0) for sign in piece], [True] * len(piece), kinds)

    def is_hard(self, kind: str) -> bool:
        return kind in ("digit", "first letter")


def _problem(split: str, number: int) -> str:
    problem = word_problem(number, split)
    return f"{problem['question']}\n{problem['answer']}\n"


def _kind(before: str, sign: str) -> str:
    if sign.isdigit():
        return "digit"
    if sign.isalpha():
        return "later letter" if before.isalpha() else "first letter"
    return "space" if sign.isspace() else "sign"
