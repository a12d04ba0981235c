"""The options of ``fathom eval``, checked before a model is loaded."""

from collections.abc import Callable
from typing import TypeVar

from fathom.cli.bench import Asked
from fathom.cli.measures import ACCURACY_CURVE, ACCURACY_THRESHOLDS, GENERATING, THRESHOLDS, chosen_names
from fathom.errors import ConfigError

Number = TypeVar("Number", int, float)


def asked_for(
    measures: str | None,
    accuracy: bool,
    thresholds: str | None,
    task: str | None,
    samples: int,
    temperature: float,
    max_tokens: int,
    match: str,
    cutoffs: str | None,
) -> Asked:
    """What was asked, with defaults filled in.

    Raises:
        ConfigError: an unknown name, a list that is not numbers, or options that do not go together.
    """
    from fathom.evals.accuracy import MATCHES

    names, skips = chosen_names(measures, accuracy)
    names = names or (["heldout"] if measures is None else [])
    if not names:
        raise ConfigError("--measures names none", "give all, or names with commas")
    generates = any(name in GENERATING for name in names)
    given = {
        "--task": task is not None,
        "--samples": samples > 1,
        "--temperature": temperature > 0,
        "--cutoffs": cutoffs is not None,
    }
    for option, used in given.items():
        if used and not generates:
            raise ConfigError(f"{option} is about generated answers, and none are asked for", "add --accuracy")
    if thresholds is not None and not {"thresholds", ACCURACY_THRESHOLDS} & set(names):
        raise ConfigError("--thresholds is about a measure that is not asked for", "add --measures thresholds")
    if samples > 1 and temperature == 0:
        raise ConfigError(
            f"--samples {samples} at temperature 0 would be the same answer {samples} times",
            "give --temperature above 0, for example 0.6",
        )
    if match not in MATCHES:
        raise ConfigError(f"--match {match!r} is unknown", f"give one of: {', '.join(MATCHES)}")
    if ACCURACY_CURVE in names and max_tokens < 2:
        raise ConfigError("--max-tokens 1 leaves no two cutoffs for the curve", "raise it, or ask for accuracy alone")
    eighths = sorted({max(1, round(max_tokens * part / 8)) for part in range(1, 9)})
    chosen_cutoffs = numbers("--cutoffs", cutoffs, int, 1, max_tokens) if cutoffs is not None else eighths
    return Asked(
        names=names,
        skips=skips,
        task=task,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        match=match,
        cutoffs=chosen_cutoffs,
        thresholds=numbers("--thresholds", thresholds, float, 0, 1) if thresholds is not None else list(THRESHOLDS),
    )


def numbers(option: str, text: str, kind: Callable[[str], Number], least: float, most: float) -> list[Number]:
    """Distinct numbers with commas between them, at least two, sorted: a line needs two points.

    Raises:
        ConfigError: not numbers, outside the bounds, or fewer than two.
    """
    example = ", for example 64,128,256" if kind is int else ", for example 0.3,0.5,0.7"
    try:
        values = sorted({kind(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of numbers", f"write them with commas{example}") from None
    if len(values) < 2:
        raise ConfigError(f"{option} {text!r}: a curve needs two points", f"give at least two{example}")
    for value in values:
        if not least <= value <= most:
            raise ConfigError(f"{option}: {value:g} is not within {least:g} to {most:g}", f"change it{example}")
    return values
