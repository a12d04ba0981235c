"""Which parts of a method go together; what does not is refused before any weight is read."""

from typing import TYPE_CHECKING

from fathom.config.schema import MethodConfig
from fathom.errors import ConfigError, nearest
from fathom.model.deciders import DECIDERS
from fathom.model.methods import Method, find_part, method_of
from fathom.model.readout import READOUTS
from fathom.model.routing import ROUTINGS, Comparing
from fathom.model.updates import UPDATES
from fathom.model.visibility import LATEST, RULES, SAME_DEPTH

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM
    from fathom.model.routing import Routing


def checked_method(config: MethodConfig) -> Method:
    """What a recipe's ``method`` section asks for, its parts known to exist.

    Raises:
        ConfigError: no such method or part; names the nearest.
    """
    method = method_of(config)
    find_part(UPDATES, method.update, "update")
    find_part(READOUTS, method.readout, "readout")
    for name in (method.routing, method.training_routing or method.routing):
        find_part(ROUTINGS, name, "routing")
    if method.decider is not None:
        find_part(DECIDERS, method.decider, "decider")
    return method


def check_fit(model: "LoopedLM") -> None:
    """Refuse a model two of whose parts do not go together.

    Raises:
        ConfigError: says which two, and what to choose instead.
    """
    method = model.method
    if method.visibility not in RULES:
        raise ConfigError(
            f"method.visibility: unknown visibility {method.visibility!r}", nearest(method.visibility, RULES)
        )
    _check_reading(model)
    _check_routing(model, "routing", method.routing, model.routing)
    _check_routing(model, "training_routing", method.training_routing or method.routing, model.training_routing)
    head, rules = model.decider, (model.routing, model.training_routing)
    if model.update.needs_gate and not (head is not None and head.gives_gate):
        raise _unfit(model, "update", method.update, "weighs its passes by a router", "expert_router or token_router")
    if model.update.follows_plan and not all(rule.needs_plan for rule in rules):
        raise ConfigError(
            f"method {method.name!r}: method.update {method.update!r} gives the first input back at the planned depth, "
            "and its exit rules stop elsewhere",
            "set method.routing and method.training_routing to planned, or choose another method.update",
        )
    if model.readout.needs_decisions and not (head is not None and head.per_depth):
        raise _unfit(model, "readout", method.readout, "weighs the depths by continue probabilities", "tah2")
    if model.update.one_depth and method.max_depth > 1 and not all(rule.one_pass for rule in rules):
        raise ConfigError(
            f"method {method.name!r} has an update for one depth only ({method.update!r}) and up to {method.max_depth}",
            "choose another method.update, or set method.max_depth to 1",
        )


def _check_reading(model: "LoopedLM") -> None:
    """Parts that look at every depth's distribution need a span and a readout that give one."""
    method = model.method
    needs = model.readout.mixes_distributions or model.readout.sums_hidden or model.reads_tokens
    if needs and not model.reads_each_depth:
        raise ConfigError(
            f"method {method.name!r} reads a distribution at every depth, but its span {method.span!r} or readout "
            f"{method.readout!r} gives one only after the last",
            "loop all layers (method.span: all), or choose another readout, update or decider",
        )


def _check_routing(model: "LoopedLM", axis: str, name: str, rule: "Routing") -> None:
    head = model.decider
    if isinstance(rule, Comparing) and model.backbone.span.coda and model.method.visibility != LATEST:
        raise ConfigError(
            f"method {model.method.name!r}: method.{axis} {name!r} runs the coda in every pass, where visibility "
            f"{model.method.visibility!r} does not show one key of every earlier token",
            f"set method.visibility to {LATEST} (the same as {SAME_DEPTH} where every row runs all depths), or choose "
            f"another {axis}",
        )
    if rule.needs_decisions and not (head is not None and head.per_depth):
        raise _unfit(model, axis, name, "decides by continue probabilities at every depth", "tah2 or exit_gate")
    if rule.needs_plan and not (head is not None and head.gives_depth):
        raise _unfit(model, axis, name, "follows a depth planned at the start", "token_router")


def _unfit(model: "LoopedLM", axis: str, name: str, why: str, deciders: str) -> ConfigError:
    method = model.method
    found = "no decider" if method.decider is None else f"decider {method.decider!r}"
    return ConfigError(
        f"method {method.name!r}: method.{axis} {name!r} {why}, and it has {found}",
        f"set method.decider (for example {deciders}), or choose another {axis}",
    )
