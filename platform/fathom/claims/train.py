"""A plain trainer of tiny models in one process: the package's model and objective, nothing of Ray.

AdamW (0.9, 0.95), weight decay 0.01, clipping at 1, 5 % warm-up, cosine to a tenth. Weights come from one seed, data
from another, so that methods trained from the same base see the same documents in the same order.
"""

import time
from typing import NamedTuple

import torch
from torch import nn

from fathom.claims.tasks import TRAIN, Task
from fathom.config.schema import ObjectiveConfig, ScheduleConfig
from fathom.model.looped import LoopedLM
from fathom.model.rows import PackedRows, pack_documents
from fathom.objectives.context import Draw
from fathom.objectives.root import TrainingRoot
from fathom.objectives.stats import summarise
from fathom.train.schedule import learning_rate

SCHEDULE = ScheduleConfig(warmup_ratio=0.05, min_ratio=0.1)
CURVE_POINTS = 20


class Plan(NamedTuple):
    """How long and how fast.

    Attributes:
        steps: optimizer steps.
        documents_per_step: documents of one step.
        peak_rate: largest learning rate.
        first_document: the training document that the first step begins with.
    """

    steps: int
    documents_per_step: int
    peak_rate: float
    first_document: int = 0

    @property
    def after(self) -> int:
        """The first document that this plan did not train on."""
        return self.first_document + self.steps * self.documents_per_step


class Fit(NamedTuple):
    """What a training run reports.

    Attributes:
        seconds: wall clock of the optimizer steps, evaluation and start excluded.
        curve: (step, training NLL, mean depth) averaged over a twentieth of the run each.
        looked_ahead: share of the stopped tokens whose gain was measured; 0 for methods that measure none.
    """

    seconds: float
    curve: list[tuple[int, float, float]]
    looked_ahead: float = 0.0


def training_rows(task: Task, seed: int, first: int, count: int) -> PackedRows:
    """Training documents ``first`` to ``first + count - 1``, packed."""
    numbers = range(first, first + count)
    documents = [task.document(TRAIN, seed, number) for number in numbers]
    return pack_documents([(document.ids, document.mask) for document in documents], numbers)


@torch.no_grad()
def ask_for_depth(rows: PackedRows, reference: LoopedLM, depth: int) -> PackedRows:
    """Ask for ``depth`` where the reference's most probable token is not the target, for 1 elsewhere (TaH's labels).

    Args:
        reference: a model of one depth.
    """
    top = reference.logits(reference(rows).depths[0].hidden).argmax(-1)
    return rows._replace(oracle=torch.where(top == rows.targets, 1, depth))


def fit(
    model: LoopedLM,
    task: Task,
    plan: Plan,
    seed: int,
    objective: ObjectiveConfig,
    reference: LoopedLM | None = None,
) -> Fit:
    """Train a model in place, on the device where it is.

    Args:
        seed: of the data order and of what methods draw.
        objective: constants of the method's loss.
        reference: the model whose mistakes ask for depth M, for methods that learn from such labels.

    Raises:
        FloatingPointError: the gradient is no longer a number.
    """
    root = TrainingRoot(model, objective, seed=seed)
    trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=plan.peak_rate, betas=(0.9, 0.95), weight_decay=0.01)
    device = next(model.parameters()).device
    model.train()
    curve: list[tuple[int, float, float]] = []
    every = max(plan.steps // CURVE_POINTS, 1)
    whole = torch.zeros(len(root.stat_names), dtype=torch.float64)
    summed = torch.zeros_like(whole)
    started = time.perf_counter()
    for step in range(plan.steps):
        first = plan.first_document + step * plan.documents_per_step
        rows = training_rows(task, seed, first, plan.documents_per_step).to(device)
        if reference is not None:
            rows = ask_for_depth(rows, reference, model.method.max_depth)
        loss, stats = root(*rows, draw=Draw(seed * 1_000_003 + first, step / plan.steps))
        (loss / rows.supervised.sum()).backward()
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {step + 1}: the gradient is not finite")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SCHEDULE, plan.peak_rate, step, plan.steps)
        optimizer.step()
        optimizer.zero_grad()
        summed += stats.cpu()
        whole += stats.cpu()
        if (step + 1) % every == 0:
            at = summarise(root.stat_names, summed)
            curve.append((step + 1, at["nll"], at["mean_depth"]))
            summed.zero_()
    seconds = time.perf_counter() - started
    model.requires_grad_(True).eval()
    return Fit(seconds, curve, summarise(root.stat_names, whole).get("lookahead_share", 0.0))
