"""The module that is wrapped, sharded and called: one forward gives the loss of a micro-batch and its statistics."""

import torch
from torch import Tensor, nn

from fathom.config.schema import ObjectiveConfig
from fathom.model.collectives import LOCAL, Collectives
from fathom.model.levels import LoopOptions
from fathom.model.looped import LoopedLM
from fathom.model.rows import PackedRows
from fathom.objectives.context import Context, Draw
from fathom.objectives.labels import DepthGains, DepthLabels
from fathom.objectives.stats import collect, stat_names
from fathom.objectives.table import check_objective


class TrainingRoot(nn.Module):
    """Main pass, look-ahead, labels and loss in one root forward, so that every sharding strategy sees one.

    What is trained is ``model``, and ``helper`` where the objective has one.

    Args:
        model: the looped model. Parameters that the objective does not train lose their ``requires_grad``.
        objective: which, and its constants.
        collectives: the ranks that share each micro-batch's coverage cut and class balance.
        precision: ``bf16`` runs matrix products under autocast; parameters stay fp32.
        head_chunk_rows: rows whose logits exist at once.
        checkpointing: recompute layers in the backward.
        seed: keys the randomness of rows.

    Raises:
        ConfigError: no such objective, or one that this model cannot learn by.
    """

    def __init__(
        self,
        model: LoopedLM,
        objective: ObjectiveConfig,
        collectives: Collectives = LOCAL,
        precision: str = "fp32",
        head_chunk_rows: int = 1024,
        checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = check_objective(model, objective)
        self.config = objective
        make_helper = self.objective.helper
        self.helper = None if make_helper is None else make_helper(model, objective, seed)
        self.collectives = collectives
        self.precision = precision
        self.options = LoopOptions(head_chunk_rows, checkpointing, seed=seed)
        self.stat_names = stat_names(model.method.max_depth)
        if self.objective.trains == "decider":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("decider."))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        sequence: Tensor,
        targets: Tensor,
        supervised: Tensor,
        example: Tensor,
        oracle: Tensor,
        routes: Tensor | None = None,
        draw: tuple[int, float] = Draw(),
        labels: list[DepthLabels] | None = None,
        measure: bool = False,
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, list[DepthGains]]:
        """Loss and statistics of one micro-batch; the arguments are the fields of :class:`PackedRows`, each ``[rows]``,
        scripted routes, what the forward may depend on besides (:class:`fathom.objectives.context.Draw`), and labels
        that were decided beforehand.

        Every rank must call this the same number of times; ``[0]`` rows are fine.

        Returns:
            The un-normalised loss, a scalar SUM over supervised tokens with its graph (the caller divides by the
            supervised count of the whole step), and fp64 statistics named by ``stat_names``. With ``measure``, the
            depths that each row ran, and the gains from which :func:`fathom.objectives.pool.decide_step` makes labels.
        """
        rows = PackedRows(ids, positions, sequence, targets, supervised, example, oracle)
        options = self.options._replace(routes=routes)
        if self.objective.options is not None:
            options = self.objective.options(options, self.model, self.config, Draw(*draw))
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            trace = self.model(rows, self.collectives, options)
            context = Context(
                self.model,
                trace,
                rows,
                self.config,
                self.collectives,
                options.head_chunk_rows,
                Draw(*draw),
                labels,
                self.helper,
            )
            if measure:
                assert self.objective.measure is not None, "check_objective refuses objective.pool step otherwise"
                return trace.executed, self.objective.measure(context)
            loss = self.objective.loss(context)
        values = collect(trace, rows, loss, self.model)
        stats = torch.tensor(
            [values.get(name, 0.0) for name in self.stat_names],
            dtype=torch.float64,
            device=ids.device,
        )
        return loss.total + trace.keep_alive, stats
