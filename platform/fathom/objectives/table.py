"""Every objective by name."""

from fathom.objectives import methods
from fathom.objectives.context import Objective
from fathom.objectives.depth_draws import sampled_depth, supervised_depths
from fathom.objectives.depth_supervised import depth_supervised, exploration

OBJECTIVES: dict[str, Objective] = {
    "language_model": Objective(methods.language_model, sampled_depth),
    "depth_supervised": Objective(depth_supervised, exploration),
    "depth_mean": Objective(methods.depth_mean),
    "entropy_regularised": Objective(methods.entropy_regularised),
    "gate_gain": Objective(methods.gate_gain, trains="decider"),
    "ponder": Objective(methods.ponder),
    "act": Objective(methods.act),
    "oracle_labels": Objective(methods.oracle_labels, trains="decider"),
    "router_auxiliary": Objective(methods.router_auxiliary),
    "router_balance": Objective(methods.router_balance),
    "random_depths": Objective(methods.random_depths, supervised_depths),
}
"""A package may add its own (docs/methods.md)."""
