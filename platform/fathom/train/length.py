"""How long a run is: optimizer steps, or tokens per parameter, as papers that train from scratch say it."""

import math
from typing import Any

import torch

from fathom.config.schema import RunConfig
from fathom.model.folder import read_shape
from fathom.model.looped import LoopedLM
from fathom.model.methods import method_of
from fathom.train.inputs import Inputs
from fathom.train.plan import mean_tokens

FOLLOWS_FROM = ("tokens_per_parameter", "examples_per_step")
"""What of the ``train`` section a run's length follows from, where it does not name its steps."""


def run_length(cfg: RunConfig, inputs: Inputs, earlier: dict[str, Any] | None = None) -> int:
    """Optimizer steps of the whole run.

    T tokens per parameter are ceil(T P / s) steps, at least one. P: all parameters of the model, tied ones once, added
    parts too. s, the mean tokens of a step: ``train.examples_per_step`` times the mean length of a conversation, as
    they are drawn over an epoch; tokens are counted at depth 1, prompts too (as ``tokens_seen`` is).

    Args:
        cfg: the recipe.
        inputs: base model and prepared data.
        earlier: meta of the checkpoint that the run goes on from; its number stands, whatever became of the data.
    """
    train = cfg.train
    if train.steps is not None:
        return train.steps
    assert train.tokens_per_parameter is not None, "RunConfig.check wants one of the two"
    if earlier is not None and all(earlier["config"]["train"].get(key) == getattr(train, key) for key in FOLLOWS_FROM):
        return earlier["progressed"]["total"]
    tokens_per_step = train.examples_per_step * mean_tokens(cfg, inputs.train)
    return max(1, math.ceil(train.tokens_per_parameter * count_parameters(cfg, inputs) / tokens_per_step))


def count_parameters(cfg: RunConfig, inputs: Inputs) -> int:
    """Parameters of the model that is trained, made without memory for them."""
    with torch.device("meta"):
        model = LoopedLM(read_shape(inputs.base, cfg.method, cfg.model), method_of(cfg.method))
    return sum(parameter.numel() for parameter in model.parameters())
