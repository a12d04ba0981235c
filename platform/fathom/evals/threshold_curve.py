"""NLL against decode FLOPs while the threshold moves: the same documents, teacher-forced, scored again at each tau."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom.errors import ConfigError
from fathom.evals.batches import SIZES, Documents, Sizes, batches, evaluating, nothing_supervised
from fathom.evals.curve import Curve, Measured, make_curve
from fathom.evals.forward import NotForThisMethod, dial, require_depths, routed_trace
from fathom.model.flops import decode_flops

if TYPE_CHECKING:
    from fathom.model.config import BackboneConfig
    from fathom.model.looped import LoopedLM
    from fathom.model.methods import Method


def answer_flops(config: "BackboneConfig", method: "Method", executed: Sequence[int], scored: Sequence[bool]) -> float:
    """Decode FLOPs of a document's answers, had they been generated: every run of scored rows is an answer, and all
    rows before it are its prompt.

    Args:
        executed: depth of each row of one document.
        scored: whether its next token belongs to an answer.
    """
    total, start = 0.0, 0
    while start < len(scored):
        if not scored[start]:
            start += 1
            continue
        stop = start
        while stop < len(scored) and scored[stop]:
            stop += 1
        total += decode_flops(config, method, list(executed[:start]), list(executed[start:stop]))
        start = stop
    return total


def require_dial(model: "LoopedLM") -> None:
    """Raise unless there is a threshold to move.

    Raises:
        NotForThisMethod: the exit rule of decoding does not look at it, or there is one depth.
    """
    if not model.routing.dial:
        raise NotForThisMethod(
            f"method {model.method.name!r} decodes with {model.method.routing!r}, which has no threshold to move",
            "measure a method whose exit rule has one, for example decider_threshold",
        )
    require_depths(model, "a curve over thresholds")


def nll_settings(
    model: "LoopedLM",
    documents: Documents,
    thresholds: Sequence[float],
    sizes: Sizes = SIZES,
) -> list[Measured]:
    """A point for each threshold; items are documents, units are supervised tokens.

    Raises:
        NotForThisMethod: the exit rule of decoding has no threshold, or there is one depth.
        ConfigError: a threshold is not within 0 to 1.
        DataError: no token is supervised.
    """
    require_dial(model)
    for threshold in thresholds:
        if not 0 <= threshold <= 1:
            raise ConfigError(f"threshold {threshold} is not a probability", "give values from 0 to 1")
    settings = []
    for threshold in thresholds:
        with dial(model, threshold):
            settings.append(_score(model, documents, threshold, sizes))
    return settings


def threshold_curve(name: str, settings: Sequence[Measured], seed: int = 0) -> Curve:
    """NLL against log2 of mean decode FLOPs per token; the slope is nats per doubling."""
    return make_curve(name, "NLL (nats per token)", "token", "threshold", settings, seed)


def _score(model: "LoopedLM", documents: Documents, threshold: float, sizes: Sizes) -> Measured:
    flops: list[float] = []
    totals: list[float] = []
    units: list[float] = []
    with evaluating(model) as device:
        for batch in batches(documents, sizes.tokens_per_forward):
            rows = batch.rows.to(device)
            trace = routed_trace(model, rows, sizes.head_chunk_rows)
            for number in range(len(batch.documents)):
                mine = rows.sequence == number
                scored = rows.supervised & mine
                if not bool(scored.any()):
                    continue
                executed, answers = trace.executed[mine].tolist(), rows.supervised[mine].tolist()
                flops.append(answer_flops(model.config, model.method, executed, answers))
                totals.append(-float(trace.log_prob[scored].double().sum()))
                units.append(float(scored.sum()))
    if not units:
        raise nothing_supervised(len(documents))
    return Measured(threshold, flops, totals, units)
