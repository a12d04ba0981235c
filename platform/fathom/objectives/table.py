"""Every objective by name."""

from fathom.config.schema import ObjectiveConfig
from fathom.errors import ConfigError
from fathom.model.looped import LoopedLM
from fathom.model.methods import Method, find_part
from fathom.objectives import methods
from fathom.objectives.context import Objective
from fathom.objectives.depth_draws import capacity_warmup, sampled_depth, supervised_depths
from fathom.objectives.depth_supervised import depth_supervised, exploration
from fathom.objectives.pool import measure_gains
from fathom.objectives.value_head import value_head

OBJECTIVES: dict[str, Objective] = {
    "language_model": Objective(methods.language_model, sampled_depth),
    "depth_supervised": Objective(
        depth_supervised, exploration, measure_gains, value_head, needs=("decider", "each_depth")
    ),
    "depth_mean": Objective(methods.depth_mean, needs=("each_depth", "every_row")),
    "entropy_regularised": Objective(methods.entropy_regularised, needs=("decider", "each_depth", "every_row")),
    "gate_gain": Objective(methods.gate_gain, trains="decider", needs=("decider", "each_depth", "every_row")),
    "ponder": Objective(methods.ponder, needs=("decider", "each_depth", "every_row")),
    "act": Objective(methods.act, needs=("decider",)),
    "oracle_labels": Objective(methods.oracle_labels, trains="decider", needs=("decider", "labels")),
    "router_auxiliary": Objective(methods.router_auxiliary, capacity_warmup, needs=("decider",)),
    "router_balance": Objective(methods.router_balance, needs=("plan",)),
    "random_depths": Objective(
        methods.random_depths, supervised_depths, needs=("every_row",), alternates_gradient=True
    ),
}
"""A package may add its own (docs/methods.md)."""

REMEDIES = {
    "decider": "a decider that is asked at every depth: set method.decider",
    "plan": "a router that plans before the first pass: set method.decider, for example to token_router",
    "each_depth": "a distribution at every depth: loop all layers (method.span: all)",
    "every_row": "every row at all depths: set method.training_routing to every_row",
}


def objective_of(method: Method, config: ObjectiveConfig) -> Objective:
    """The recipe's objective, else the method's own.

    Raises:
        ConfigError: no such objective.
    """
    return find_part(OBJECTIVES, config.kind or method.objective, "objective")


def check_objective(model: LoopedLM, config: ObjectiveConfig) -> Objective:
    """The objective, refused where the model lacks what it looks at.

    Raises:
        ConfigError: no such objective, or the model cannot learn by it.
    """
    objective, head = objective_of(model.method, config), model.decider
    has = {
        "decider": head is not None and head.per_depth,
        "plan": head is not None and head.gives_depth,
        "each_depth": model.reads_each_depth,
        "every_row": model.training_routing.every_row,
    }
    for need in objective.needs:
        if not has.get(need, True):
            name = config.kind or model.method.objective
            raise ConfigError(
                f"objective.kind: {name!r} cannot teach method {model.method.name!r}", f"it needs {REMEDIES[need]}"
            )
    if config.pool == "step" and objective.measure is None:
        raise ConfigError(
            f"objective.pool: {config.kind or model.method.objective!r} makes no labels that a step could share",
            "set objective.pool to micro_batch",
        )
    return objective
