"""What each rank runs in one optimizer step: a pure function of the recipe, the data and the step number."""

from typing import NamedTuple

import numpy as np

from fathom.config.schema import RunConfig
from fathom.data.mixture import epoch_draws, mixed_examples
from fathom.data.packing import plan_micro_batches
from fathom.data.prepared import Prepared
from fathom.data.sampler import step_examples


class StepPlan(NamedTuple):
    """One step as one rank sees it.

    Attributes:
        micro_batches: this rank's examples of each forward; as many forwards on every rank, some perhaps empty.
        tokens: of the whole step, over all ranks.
        supervised: targets of the whole step, over all ranks: what the summed loss is divided by.
    """

    micro_batches: list[list[int]]
    tokens: int
    supervised: int


def plan_step(cfg: RunConfig, prepared: Prepared, step: int, rank: int, world: int) -> StepPlan:
    """Draw a step's conversations and spread them over micro-batches and ranks.

    Which conversations a step holds does not depend on the number of ranks, only how they are spread.
    """
    examples = drawn_examples(cfg, prepared, step)
    lengths = [int(prepared.lengths[example]) for example in examples]
    cells = plan_micro_batches(lengths, cfg.train.micro_batch_tokens, world)
    return StepPlan(
        micro_batches=[[examples[place] for place in ranks[rank]] for ranks in cells],
        tokens=sum(lengths),
        supervised=sum(int(prepared.supervised_counts[example]) for example in examples),
    )


def drawn_examples(cfg: RunConfig, prepared: Prepared, step: int) -> list[int]:
    """The conversations of a step, of one source or of several in their shares."""
    if isinstance(cfg.data.train, str):
        return step_examples(cfg.seed, len(prepared), cfg.train.examples_per_step, step)
    weights = [each.weight for each in cfg.data.train]
    return mixed_examples(cfg.seed, prepared.sizes, weights, cfg.train.examples_per_step, step)


def mean_tokens(cfg: RunConfig, prepared: Prepared) -> float:
    """Tokens of a conversation as steps draw them, on average over an epoch; prompts too."""
    if isinstance(cfg.data.train, str):
        return float(prepared.lengths.mean())
    draws = epoch_draws(prepared.sizes, [each.weight for each in cfg.data.train])
    means = [part.mean() for part in np.split(prepared.lengths, np.cumsum(prepared.sizes)[:-1])]
    return float(np.average(means, weights=draws))
