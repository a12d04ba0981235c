"""Every method Fathom knows, as points in the five axes: span, update, visibility, routing (with its decider), readout.

Read :data:`METHODS` as the table it is. A recipe may change any axis of a preset (``method.readout: last_depth``); a
package may add parts and methods of its own (docs/methods.md).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fathom.config.schema import MethodConfig
from fathom.errors import ConfigError, nearest
from fathom.model.visibility import DUO_CAUSAL, LATEST, ROOT_AND_OWN, SAME_DEPTH, SHARED_FIRST

PLUGINS = "fathom.methods"
"""Entry point group of packages that add parts or methods; each entry is a function without arguments."""


@dataclass(frozen=True)
class Method:
    """A point in the axes with its two numbers.

    Attributes:
        span: a rule of :mod:`fathom.model.span`, or (prelude, body, coda) layers.
        update: what a row enters its next depth with.
        visibility: what a row sees of other depths.
        decider: the head that routing reads; None for none.
        routing: the exit rule.
        readout: how the depths become the next-token distribution.
        objective: the default objective (``fathom.objectives``); a recipe may name another.
        training_routing: the exit rule of training where it is another one.
        adapters: low-rank changes of the looped layers from depth 2 on.
        max_depth: M.
        threshold: tau.
    """

    name: str
    span: str | tuple[int, int, int]
    update: str
    visibility: str
    decider: str | None
    routing: str
    readout: str
    objective: str
    training_routing: str | None = None
    adapters: bool = False
    max_depth: int = 2
    threshold: float = 0.5


def _table() -> dict[str, Method]:
    """name, span, update, visibility, decider, routing, readout, objective."""
    tah2 = ("updater", DUO_CAUSAL, "tah2")
    rows = (
        Method("standard", "all", "none", DUO_CAUSAL, None, "one_pass", "last_depth", "language_model", max_depth=1),
        # TaH2 (methods 1), its fixed-depth form, and the controls of its claims.
        Method("tah2", "all", *tah2, "decider_threshold", "stop_mass", "depth_supervised"),
        Method(
            "tah2-fixed", "all", "updater", ROOT_AND_OWN, None, "generating_rows", "uniform", "language_model"
        ),
        Method("tah2-random", "all", *tah2, "random", "stop_mass", "depth_supervised"),
        Method("tah2-last", "all", *tah2, "decider_threshold", "last_depth", "depth_supervised"),
        # TaH (2): offline labels first, then the decider alone.
        Method(
            "tah", "all", "top_mix", DUO_CAUSAL, "blocks", "decider_threshold", "summed_logits", "language_model",
            training_routing="oracle", adapters=True, threshold=0.9,
        ),
        Method(
            "tah-decider", "all", "top_mix", DUO_CAUSAL, "blocks", "decider_threshold", "summed_logits",
            "oracle_labels", adapters=True, threshold=0.9,
        ),
        # Ouro (3): stage I at fixed depth, then the gate alone, which decoding reads.
        Method("ouro", "all", "normed", LATEST, "exit_gate", "every_row", "last_depth", "depth_mean", max_depth=4),
        Method(
            "ouro-adaptive", "all", "normed", LATEST, "detached_exit_gate", "survival_threshold", "last_depth",
            "gate_gain", training_routing="every_row", max_depth=4,
        ),
        # Huginn (4) and the TaH2 authors' post-training form of it (1.12); retrofitted recurrence (6).
        Method(
            "huginn", "quarters", "huginn_adapter", LATEST, None, "every_row", "last_depth", "language_model",
            max_depth=32,
        ),
        Method(
            "huginn-post", "quarters", "diagonal_injection", SAME_DEPTH, None, "every_row", "last_depth",
            "language_model", max_depth=3,
        ),
        Method(
            "retrofit", "quarters", "concat_adapter", SAME_DEPTH, None, "every_row", "last_depth", "language_model",
            max_depth=8,
        ),
        # AbbIE (5) and its baseline.
        Method("0pt", "thirds", "concat_adapter", SAME_DEPTH, None, "every_row", "last_depth", "language_model"),
        Method("abbie-c", "thirds", "replace", SAME_DEPTH, None, "every_row", "last_depth", "language_model"),
        Method("abbie-d", "thirds", "residual", SAME_DEPTH, None, "every_row", "last_depth", "language_model"),
        # Mixture-of-Recursions (7).
        Method(
            "mor-expert", "ends", "routed_residual", SAME_DEPTH, "expert_router", "decider_threshold", "last_depth",
            "router_auxiliary", training_routing="expert_choice", max_depth=3,
        ),
        Method(
            "mor-token", "ends", "planned_residual", SHARED_FIRST, "token_router", "planned", "last_depth",
            "router_balance", max_depth=3,
        ),
        # Halting (8).
        Method(
            "ponder", "all", "normed", LATEST, "exit_gate", "survival_threshold", "last_depth", "ponder",
            training_routing="every_row", max_depth=4,
        ),
        Method(
            "act", "all", "normed", LATEST, "act_gate", "survival_threshold", "weighted_states", "act",
            max_depth=4, threshold=0.01,
        ),
        # LoopUS (9): stop where the confidence is above 0.6.
        Method(
            "loopus", "loopus", "selective_gate", LATEST, "confidence", "decider_threshold", "last_depth",
            "random_depths", training_routing="every_row", max_depth=8, threshold=0.4,
        ),
    )  # fmt: skip
    return {method.name: method for method in rows}


METHODS: dict[str, Method] = _table()

Part = TypeVar("Part")


def find_part(table: Mapping[str, Part], name: str, what: str) -> Part:
    """A part of an axis by name.

    Raises:
        ConfigError: no such part, also after installed packages have added theirs; names the nearest.
    """
    if name not in table:
        for entry in entry_points(group=PLUGINS):
            entry.load()()
    if name not in table:
        section = "objective.kind" if what == "objective" else f"method.{what}"
        raise ConfigError(f"{section}: unknown {what} {name!r}", nearest(name, table))
    return table[name]


def make_method(name: str, max_depth: int | None = None, threshold: float | None = None, **axes: Any) -> Method:
    """A named method, with its M and tau and any axis changed; None keeps the preset's value.

    Raises:
        ConfigError: no such method or axis; names the nearest.
    """
    preset = find_part(METHODS, name, "preset")
    known = {field.name for field in fields(Method)} - {"name"}
    for axis in set(axes) - known:
        raise ConfigError(f"method.{axis}: no such axis", nearest(axis, sorted(known)))
    changes = axes | {"max_depth": max_depth, "threshold": threshold}
    return replace(preset, **{key: value for key, value in changes.items() if value is not None})


def method_of(config: MethodConfig) -> Method:
    """What a recipe's ``method`` section asks for.

    Raises:
        ConfigError: no such method; names the nearest.
    """
    return make_method(config.preset, config.max_depth, config.threshold, **config.axes())


def method_to_dict(method: Method) -> dict[str, Any]:
    """The ``fathom`` section of a model folder's ``config.json``."""
    return asdict(method)


def method_from_dict(section: dict[str, Any], where: str) -> Method:
    """Read that section back.

    Raises:
        ConfigError: a field is missing or unknown; names ``where``.
    """
    fields_read: dict[str, Any] = dict(section)
    if isinstance(section.get("span"), list):
        fields_read["span"] = tuple(section["span"])
    try:
        return Method(**fields_read)
    except TypeError as error:
        raise ConfigError(
            f"{where}: the fathom section cannot be read: {error}",
            "export the model again",
        ) from error
