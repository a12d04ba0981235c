"""What a run knows about itself between steps, beside parameters and moments; JSON, kept in every checkpoint."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

DRAWN = ("nll", "learning_rate", "grad_norm", "mean_depth")
"""Metrics whose curves a checkpoint keeps (with every ``nll/depth_m``), so that a resumed run plots all of itself."""


@dataclass
class Progressed:
    """Counters and curves.

    Attributes:
        total: optimizer steps of the whole run.
        step: optimizer steps done, skipped ones included; the next step's number.
        updates: optimizer steps applied.
        empty_steps: steps without a supervised token, skipped.
        refused_steps: steps whose gradient was not finite, not applied.
        refused_in_a_row: the last ones of those.
        tokens: depth-1 rows trained on.
        supervised_tokens: targets among them.
        seconds: spent in steps.
        history: (step, value) points by metric.
        calibration: summed statistics of the last steps, for the plot of probability against gain.
        best_step: step of the best value of ``checkpoint.best_metric``, 0 before there is one.
        best_value: that value.
        evals_since_best: evaluations after it.
    """

    total: int = 0
    step: int = 0
    updates: int = 0
    empty_steps: int = 0
    refused_steps: int = 0
    refused_in_a_row: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    history: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    calibration: list[float] = field(default_factory=list)
    best_step: int = 0
    best_value: float | None = None
    evals_since_best: int = 0

    def judge(self, value: float) -> bool:
        """Take in what an evaluation at this step measured, lower being better; whether it is the best so far."""
        if math.isfinite(value) and (self.best_value is None or value < self.best_value):
            self.best_step, self.best_value, self.evals_since_best = self.step, value, 0
            return True
        self.evals_since_best += 1
        return False

    def remember(self, step: int, metrics: dict[str, float]) -> None:
        """Add a step's points to the curves that are kept."""
        for name, value in metrics.items():
            if name in DRAWN or name.startswith("nll/depth_"):
                self.history.setdefault(name, []).append((step, value))

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint's meta."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Progressed":
        """What :meth:`as_json` gave."""
        points = {name: [(int(step), value) for step, value in curve] for name, curve in fields["history"].items()}
        return cls(**{**fields, "history": points})
