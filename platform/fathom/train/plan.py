"""What each rank runs in one optimizer step: a pure function of the recipe, the data and the step number."""

from typing import NamedTuple

from fathom.config.schema import RunConfig
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
    examples = step_examples(cfg.seed, len(prepared), cfg.train.examples_per_step, step)
    lengths = [int(prepared.lengths[example]) for example in examples]
    cells = plan_micro_batches(lengths, cfg.train.micro_batch_tokens, world)
    return StepPlan(
        micro_batches=[[examples[place] for place in ranks[rank]] for ranks in cells],
        tokens=sum(lengths),
        supervised=sum(int(prepared.supervised_counts[example]) for example in examples),
    )
