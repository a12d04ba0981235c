"""Every method Fathom knows, as points in the five axes. The span of all of them is the whole stack.

| method | update | visibility | routing | readout | objective |
|---|---|---|---|---|---|
| standard | - | duo-causal (one depth) | one pass | last depth | language model |
| tah2 | updater | duo-causal | decider threshold | stop-mass mixture | depth supervised |
| tah2-fixed | updater | root + own depths | generating rows, all M | uniform mixture | language model |
"""

import difflib
from dataclasses import asdict, dataclass, replace
from typing import Any

from fathom.errors import ConfigError
from fathom.model.visibility import DUO_CAUSAL, ROOT_AND_OWN


@dataclass(frozen=True)
class Method:
    """A point in the axes with its two numbers: M (``max_depth``) and tau (``threshold``)."""

    name: str
    update: str | None
    visibility: str
    routing: str
    readout: str
    objective: str
    max_depth: int = 1
    threshold: float = 0.5


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("standard", None, DUO_CAUSAL, "one_pass", "last_depth", "language_model"),
        Method(
            "tah2",
            "updater",
            DUO_CAUSAL,
            "decider_threshold",
            "stop_mass",
            "depth_supervised",
        ),
        Method(
            "tah2-fixed",
            "updater",
            ROOT_AND_OWN,
            "generating_rows",
            "uniform",
            "language_model",
        ),
    )
}


def make_method(name: str, max_depth: int, threshold: float) -> Method:
    """A named method with its M and tau.

    Raises:
        ConfigError: no such method; names the nearest.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"method.preset: unknown method {name!r}",
            f"{hint}known methods: {', '.join(METHODS)}",
        )
    return replace(METHODS[name], max_depth=max_depth, threshold=threshold)


def method_to_dict(method: Method) -> dict[str, Any]:
    """The ``fathom`` section of a model folder's ``config.json``."""
    return asdict(method)


def method_from_dict(section: dict[str, Any], where: str) -> Method:
    """Read that section back.

    Raises:
        ConfigError: a field is missing or unknown; names ``where``.
    """
    try:
        return Method(**section)
    except TypeError as error:
        raise ConfigError(
            f"{where}: the fathom section cannot be read: {error}",
            "export the model again",
        ) from error
