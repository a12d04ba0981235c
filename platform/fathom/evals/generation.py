"""What graded answers need of whoever generates them: an engine, an endpoint or a plain loop behind one callable."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Sampling(NamedTuple):
    """How answers are generated.

    Attributes:
        max_tokens: stop after so many.
        temperature: 0 takes the most probable token.
        top_p: keep the most probable tokens that together reach this mass.
        seed: of the noise.
        threshold: tau; None takes the model's.
        max_depth: M; None takes the model's.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    threshold: float | None = None
    max_depth: int | None = None


class Generation(NamedTuple):
    """One answer and what it ran.

    A row is counted once, as in the engine's usage: the last prompt token's row predicts the first answer token, so it
    counts with the answer.

    Attributes:
        text: the answer, special tokens left out.
        tokens: its ids, the end-of-turn token included.
        depths: per token, how many depths the row ran that predicted it.
        prompt_depths: the same for the prompt tokens before the last.
    """

    text: str
    tokens: list[int]
    depths: list[int]
    prompt_depths: list[int]


class Generate(Protocol):
    """Answers to prompts of token ids, in their order.

    A prompt's noise depends on (seed, its number in ``prompts``, position) alone: the same prompt given twice is
    sampled twice, and no two items share their noise.
    """

    def __call__(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]: ...
