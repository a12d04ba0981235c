"""Accuracy by exact match of generated answers: avg@k, cons@k, and what the answers cost (methods 12).

Answers are generated once. Cutoffs truncate them afterwards and grade what is left, so every cutoff sees the same
answers.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from fathom.errors import ConfigError, DataError
from fathom.evals.curve import Curve, Measured, make_curve
from fathom.evals.generation import Generate, Generation, Sampling
from fathom.evals.grade import final_number
from fathom.evals.intervals import Estimate, share
from fathom.evals.items import Item
from fathom.evals.plain import plain

Key = Callable[[str], Hashable | None]
"""What of a text must be equal; None where it gives no answer."""

Flops = Callable[[list[int], list[int]], float]
"""Decode FLOPs of an answer from (prompt depths, depths): ``decode_flops`` of a model's shape and method."""


def whole_text(text: str) -> str | None:
    """The text with its whitespace evened out, or None if there is nothing else."""
    return " ".join(text.split()) or None


MATCHES: dict[str, Key] = {"number": final_number, "text": whole_text}
"""Exact match of the last number, or of the whole answer."""


class Responses(NamedTuple):
    """Answers ``[items][samples]`` and how they were made."""

    items: list[Item]
    answers: list[list[Generation]]
    sampling: Sampling

    @property
    def samples(self) -> int:
        """k, answers per item."""
        return len(self.answers[0])


class Answered(NamedTuple):
    """One item: its row, which samples were right, and whether the majority was."""

    where: str
    right: list[bool]
    majority_right: bool


class Accuracy(NamedTuple):
    """Graded answers.

    Attributes:
        average: avg@k, mean over items of the share of right samples; interval over items.
        consensus: cons@k, share of items whose majority vote is right; interval over items.
        samples: k.
        items: how many items.
        sampling: temperature, length limit and dials.
        match: what had to be equal.
        tokens_per_answer: mean.
        at_limit: share of answers as long as was allowed; most of them did not end.
        mean_depth: over answer tokens.
        prompt_mean_depth: over prompt tokens before the last; 0 where there are none.
        flops_per_answer: mean decode FLOPs, prefill excluded.
        answered: item by item.
    """

    average: Estimate
    consensus: Estimate
    samples: int
    items: int
    sampling: Sampling
    match: str
    tokens_per_answer: float
    at_limit: float
    mean_depth: float
    prompt_mean_depth: float
    flops_per_answer: float
    answered: list[Answered]

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return plain(self)


def respond(items: Sequence[Item], generate: Generate, sampling: Sampling, samples: int = 1) -> Responses:
    """Ask every item ``samples`` times, in one call.

    Raises:
        ConfigError: several samples without noise, or none.
        DataError: no items.
    """
    if samples < 1:
        raise ConfigError(f"{samples} samples per item", "ask for at least 1")
    if samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"{samples} samples at temperature 0 are the same answer {samples} times", "give a temperature above 0"
        )
    if not items:
        raise DataError("no items to answer", "give a task with question/answer rows")
    flat = generate([item.prompt for item in items for _ in range(samples)], sampling)
    answers = [flat[start : start + samples] for start in range(0, len(flat), samples)]
    return Responses(list(items), answers, sampling)


def truncate(responses: Responses, cutoff: int, decode: Callable[[list[int]], str]) -> Responses:
    """The same answers as if generation had stopped after ``cutoff`` tokens.

    Args:
        decode: token ids to text, special tokens left out.
    """
    cut = [
        [answer if len(answer.tokens) <= cutoff else _cut(answer, cutoff, decode) for answer in answers]
        for answers in responses.answers
    ]
    return Responses(responses.items, cut, responses.sampling._replace(max_tokens=cutoff))


def majority(keys: Sequence[Hashable | None]) -> Hashable | None:
    """The answer with most votes, the first given among equals; answers of None do not vote."""
    votes = Counter(key for key in keys if key is not None)
    return max(votes, key=lambda key: votes[key]) if votes else None


def grade_responses(responses: Responses, flops: Flops, match: str = "number") -> Accuracy:
    """Grade answers by exact match.

    Args:
        flops: decode FLOPs of one answer.
        match: a name of :data:`MATCHES`.

    Raises:
        ConfigError: no such match.
        DataError: a reference without an answer (no number, for ``number``).
    """
    answered = [_grade(item, answers, match) for item, answers in zip(*responses[:2], strict=True)]
    flat = [answer for answers in responses.answers for answer in answers]
    depths = [depth for answer in flat for depth in answer.depths]
    prompts = [depth for answer in flat for depth in answer.prompt_depths]
    return Accuracy(
        average=share([sum(item.right) / len(item.right) for item in answered], responses.samples),
        consensus=share([float(item.majority_right) for item in answered]),
        samples=responses.samples,
        items=len(answered),
        sampling=responses.sampling,
        match=match,
        tokens_per_answer=len(depths) / len(flat),
        at_limit=sum(len(answer.tokens) >= responses.sampling.max_tokens for answer in flat) / len(flat),
        mean_depth=sum(depths) / len(depths) if depths else 0.0,
        prompt_mean_depth=sum(prompts) / len(prompts) if prompts else 0.0,
        flops_per_answer=sum(flops(answer.prompt_depths, answer.depths) for answer in flat) / len(flat),
        answered=answered,
    )


def measured(setting: float, responses: Responses, flops: Flops, match: str = "number") -> Measured:
    """A point of a curve: per item, mean decode FLOPs of its answers and accuracy in points (0 to 100)."""
    k = responses.samples
    rights = [_grade(item, answers, match).right for item, answers in zip(*responses[:2], strict=True)]
    costs = [sum(flops(a.prompt_depths, a.depths) for a in answers) / k for answers in responses.answers]
    return Measured(setting, costs, [100.0 * sum(right) / k for right in rights], [1.0] * len(rights))


def cutoff_settings(
    responses: Responses,
    cutoffs: Sequence[int],
    decode: Callable[[list[int]], str],
    flops: Flops,
    match: str = "number",
) -> list[Measured]:
    """A point for each cutoff, from answers generated once.

    Raises:
        ConfigError: a cutoff below 1, or above what was generated.
    """
    longest = responses.sampling.max_tokens
    for cutoff in cutoffs:
        if not 1 <= cutoff <= longest:
            raise ConfigError(
                f"cutoff {cutoff} is not within the 1 to {longest} tokens that were generated", "change it"
            )
    return [measured(cutoff, truncate(responses, cutoff, decode), flops, match) for cutoff in cutoffs]


def threshold_settings(
    items: Sequence[Item],
    generate: Generate,
    sampling: Sampling,
    thresholds: Sequence[float],
    flops: Flops,
    match: str = "number",
    samples: int = 1,
) -> list[Measured]:
    """A point for each threshold; unlike cutoffs, every threshold is generated anew, with the same noise.

    Raises:
        ConfigError: a threshold is not within 0 to 1.
    """
    for threshold in thresholds:
        if not 0 <= threshold <= 1:
            raise ConfigError(f"threshold {threshold} is not a probability", "give values from 0 to 1")
    return [
        measured(tau, respond(items, generate, sampling._replace(threshold=tau), samples), flops, match)
        for tau in thresholds
    ]


def accuracy_curve(name: str, dial: str, settings: Sequence[Measured], seed: int = 0) -> Curve:
    """Accuracy in points against log2 of mean decode FLOPs per answer; the slope is points per doubling."""
    return make_curve(name, "accuracy (points)", "answer", dial, settings, seed)


def _grade(item: Item, answers: Sequence[Generation], match: str) -> Answered:
    if match not in MATCHES:
        raise ConfigError(f"match {match!r} is unknown", f"give one of: {', '.join(MATCHES)}")
    key = MATCHES[match]
    expected = key(item.reference)
    if expected is None:
        raise DataError(
            f"{item.where}: the reference has no {match} to match: {item.reference[:60]!r}",
            "match 'text' compares whole answers" if match == "number" else "fill or remove the row",
        )
    keys = [key(answer.text) for answer in answers]
    return Answered(item.where, [found == expected for found in keys], majority(keys) == expected)


def _cut(answer: Generation, cutoff: int, decode: Callable[[list[int]], str]) -> Generation:
    tokens = answer.tokens[:cutoff]
    return Generation(decode(tokens), tokens, answer.depths[:cutoff], answer.prompt_depths)
