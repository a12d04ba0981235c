"""What sampling parameters mean, in plain Python: slow, obvious, and without the engine's parts."""

import math
from collections.abc import Sequence
from typing import Any


def penalised(log_probs: Sequence[float], asked: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Scores after penalties and bias."""
    scores = []
    for token, score in enumerate(log_probs):
        if token in prompt or token in answer:
            score *= asked.repetition_penalty
        count = list(answer).count(token)
        score -= asked.frequency_penalty * count + (asked.presence_penalty if count else 0.0)
        scores.append(score + sum(bias for biased, bias in asked.logit_bias if biased == token))
    return scores


def distribution(
    log_probs: Sequence[float], asked: Any, prompt: Sequence[int], answer: Sequence[int]
) -> dict[int, float]:
    """The probabilities that a token is drawn with, of those that may be; no two scores may be equal."""
    scores = penalised(log_probs, asked, prompt, answer)
    best_first = sorted(range(len(scores)), key=lambda token: -scores[token])
    if asked.temperature == 0:
        return {best_first[0]: 1.0}
    kept = normal({token: math.exp(scores[token] / asked.temperature) for token in best_first})
    if asked.top_k:
        kept = normal(dict(list(kept.items())[: asked.top_k]))
    if asked.top_p < 1:
        # The first token that reaches the mass is the last that stays.
        reached, nucleus = 0.0, {}
        for token, probability in kept.items():
            if reached < asked.top_p:
                nucleus[token] = probability
            reached += probability
        kept = normal(nucleus)
    best = max(kept.values())
    return normal({token: probability for token, probability in kept.items() if probability >= asked.min_p * best})


def normal(weights: dict[int, float]) -> dict[int, float]:
    """The same, with sum 1."""
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}
