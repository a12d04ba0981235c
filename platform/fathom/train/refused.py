"""What a step read whose gradient was not finite: kept in the run's storage for a person to look at."""

import json
import logging
import math
from typing import Any

from fathom.data.prepared import Prepared
from fathom.errors import StorageError
from fathom.storage import files
from fathom.train.plan import StepPlan

log = logging.getLogger(__name__)
MOST_SAVED = 20
"""Steps of one attempt that are kept: a run that refuses many would fill its storage with them."""


class RefusedSteps:
    """Writes ``step-00000012-rank-00000.json`` for each step that is not applied, on every rank for its own rows.

    Args:
        uri: folder in the run's storage.
        rank: of this worker.
        prepared: the training data.
    """

    def __init__(self, uri: str, rank: int, prepared: Prepared) -> None:
        self.uri = uri
        self.rank = rank
        self.prepared = prepared
        self.saved = 0

    def save(self, step: int, plan: StepPlan, losses: list[float], norm: float) -> None:
        """Keep one step; a store that does not take it is warned of, and the run goes on.

        Args:
            step: its number, counted from 1.
            plan: what this rank ran.
            losses: of its micro-batches, nats summed over their targets.
            norm: of the whole gradient.
        """
        if self.saved == MOST_SAVED:
            return
        self.saved += 1
        body = {
            "step": step,
            "rank": self.rank,
            "grad_norm": number(norm),
            "micro_batches": [
                {"loss": number(loss), "examples": [self.example(each) for each in examples]}
                for loss, examples in zip(losses, plan.micro_batches, strict=True)
            ],
        }
        where = files.join(self.uri, f"step-{step:08d}-rank-{self.rank:05d}.json")
        try:
            files.write_bytes(where, json.dumps(body, allow_nan=False).encode())
        except StorageError as error:
            log.warning(
                "step %d was not applied: gradient norm %s; what it read is lost: %s", step, norm, error.message
            )
            return
        log.warning("step %d was not applied: gradient norm %s; what it read is in %s", step, norm, where)

    def example(self, example: int) -> dict[str, Any]:
        """One conversation: its number, the row it was made from, token ids, and which of them are targets."""
        ids, supervised = self.prepared.document(example)
        return {
            "example": example,
            "row": self.prepared.where(example),
            "ids": ids,
            "supervised": [int(each) for each in supervised],
        }


def number(value: float) -> float | str:
    """For JSON, which has no NaN and no infinity: those as words."""
    return value if math.isfinite(value) else str(value)
