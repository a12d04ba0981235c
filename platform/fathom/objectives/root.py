"""The module that is wrapped, sharded and called: one forward gives the loss of a micro-batch and its statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import LOCAL, Collectives
from fathom.model.looped import LoopedLM, Trace
from fathom.model.rows import PackedRows
from fathom.objectives.labels import DepthLabels, depth_labels
from fathom.objectives.stats import collect, stat_names


class TrainingRoot(nn.Module):
    """Main pass, look-ahead, labels and loss in one root forward, so that every sharding strategy sees one.

    Args:
        model: the looped model.
        objective: constants of the depth supervision; unused by methods that only model language.
        collectives: the ranks that share each micro-batch's coverage cut and class balance.
        precision: ``bf16`` runs matrix products under autocast; parameters stay fp32.
        head_chunk_rows: rows whose logits exist at once.
        checkpointing: recompute layers in the backward.
    """

    def __init__(
        self,
        model: LoopedLM,
        objective: ObjectiveConfig,
        collectives: Collectives = LOCAL,
        precision: str = "fp32",
        head_chunk_rows: int = 1024,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.collectives = collectives
        self.precision = precision
        self.head_chunk_rows = head_chunk_rows
        self.checkpointing = checkpointing
        self.stat_names = stat_names(model.method.max_depth)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        sequence: Tensor,
        targets: Tensor,
        supervised: Tensor,
        routes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss and statistics of one micro-batch; the arguments are the fields of :class:`PackedRows`, each ``[rows]``.

        Every rank must call this the same number of times; ``[0]`` rows are fine.

        Returns:
            The un-normalised loss, a scalar SUM over supervised tokens with its graph (the caller divides by the
            supervised count of the whole step), and fp64 statistics named by ``stat_names``.
        """
        rows = PackedRows(ids, positions, sequence, targets, supervised)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            trace = self.model(rows, self.collectives, self.head_chunk_rows, self.checkpointing, routes)
            labels: list[DepthLabels] = []
            if self.model.method.objective == "depth_supervised":
                labels = depth_labels(
                    self.model,
                    trace,
                    rows,
                    self.objective,
                    self.collectives,
                    self.head_chunk_rows,
                )
        lm_loss = -trace.log_prob[rows.supervised].sum()
        decider_loss = decision_loss(trace, labels)
        loss = lm_loss + self.objective.decider_weight * decider_loss + trace.keep_alive
        values = collect(
            trace,
            rows,
            labels,
            lm_loss.detach(),
            decider_loss.detach(),
            self.model.method.visibility,
        )
        stats = torch.tensor(
            [values.get(name, 0.0) for name in self.stat_names],
            dtype=torch.float64,
            device=ids.device,
        )
        return loss, stats


def decision_loss(trace: Trace, labels: list[DepthLabels]) -> Tensor:
    """Sum over depths and supervised rows of w * BCE, the continue class times beta (Eq. 25, 26); a scalar."""
    total = trace.log_prob.new_zeros(())
    for ran, at in zip(trace.depths, labels, strict=False):
        if ran.continue_logit is None:
            continue
        logit, keep = ran.continue_logit, at.supervised
        total = total + F.binary_cross_entropy_with_logits(
            logit[keep],
            at.label[keep].to(logit.dtype),
            weight=at.cost[keep].to(logit.dtype),
            pos_weight=logit.new_tensor(at.balance),
            reduction="sum",
        )
    return total
