"""What a claim is, what its runs give it, and what it says in the end."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from fathom.claims.budget import Budget, Run
from fathom.claims.measure import HeldoutDocuments, Scores
from fathom.claims.train import Fit
from fathom.claims.verdict import Comparison, Verdict, overall
from fathom.model.initial import match_embedding, reset_base
from fathom.model.looped import LoopedLM
from fathom.model.updater import reset_linears

Cell = str | float | int


class Models:
    """The trained models of one seed, in a folder.

    Args:
        folder: shared by the processes of a report.
    """

    def __init__(self, budget: Budget, seed: int, folder: Path) -> None:
        self.budget = budget
        self.seed = seed
        self.folder = folder

    def _file(self, run: Run) -> Path:
        return self.folder / f"{run.name.replace('/', '-')}.{self.seed}.safetensors"

    def save(self, run: Run, model: LoopedLM, scores: Scores) -> None:
        """Keep a run's weights and scores."""
        self._file(run).with_suffix(".json").write_text(json.dumps(scores.as_json()))
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}, self._file(run)
        )

    def load(self, run: Run) -> LoopedLM:
        """A run's trained model on the budget's device."""
        model = self._empty(run)
        model.load_state_dict(load_file(self._file(run)))
        return model.to(self.budget.device).eval()

    def scores(self, run: Run) -> Scores:
        """How a trained run scored."""
        return Scores(**json.loads(self._file(run).with_suffix(".json").read_text()))

    def new(self, run: Run) -> LoopedLM:
        """A run's model before its first step, on the budget's device."""
        model = self._empty(run)
        if run.scratch:
            reset_base(model, self.seed)
            # As the added parts, uniform within 1/sqrt(fan_in): from larger weights the chains are learned more slowly.
            reset_linears(model.backbone, torch.Generator().manual_seed(self.seed))
        else:
            state = load_file(self._file(run.start or self.budget.base_of(run)))
            unexpected = model.load_state_dict(state, strict=False).unexpected_keys
            if unexpected:
                raise ValueError(f"{run.name}: {unexpected[0]} of the weights it starts from has no place in the model")
        if run.start is None:
            model.reset_added(self.seed)
        if run.embedding_scale:
            match_embedding(model)
        return model.to(self.budget.device)

    def _empty(self, run: Run) -> LoopedLM:
        """A run's model without weights. With M = 2, going on with probability p gives a mean depth of 1 + p."""
        if run.share_of is not None:
            run = run._replace(axes=(*run.axes, ("threshold", self.scores(run.share_of).mean_depth - 1.0)))
        return self.budget.model(run)

    def documents(self, task: str) -> HeldoutDocuments:
        """The held-out documents of a task."""
        return HeldoutDocuments(self.budget.tasks[task], self.budget.heldout)


Measure = Callable[[Models], dict[str, Any]]


@dataclass(frozen=True)
class Results:
    """Numbers of all seeds; lists are in the order of ``seeds``.

    Attributes:
        scores, fits: by run name.
        measured: what the claim's own ``measure`` gave.
    """

    budget: Budget
    seeds: list[int]
    scores: Mapping[str, list[Scores]]
    fits: Mapping[str, list[Fit]]
    measured: list[dict[str, Any]]

    def differences(self, what: str, run: Run, other: Run) -> list[float]:
        """A score of one run minus that of another, by seed."""
        pairs = zip(self.scores[run.name], self.scores[other.name], strict=True)
        return [getattr(mine, what) - getattr(theirs, what) for mine, theirs in pairs]

    def table(self, runs: list[Run], reference: Run) -> list[dict[str, Cell]]:
        """A row for every seed of every run; FLOPs are relative to the reference of the same seed."""
        rows = []
        for place, seed in enumerate(self.seeds):
            unit = self.scores[reference.name][place].flops_per_token
            for run in runs:
                score, fit = self.scores[run.name][place], self.fits[run.name][place]
                row: dict[str, Cell] = {
                    "seed": seed,
                    "model": run.name,
                    "NLL": score.nll,
                    "NLL, hard tokens": score.hard_nll,
                }
                if not math.isnan(score.accuracy):
                    row["accuracy, hard tokens"] = score.accuracy
                row |= {
                    "mean depth": score.mean_depth,
                    "depth, hard tokens": score.hard_depth,
                    "depth, prompt": score.prompt_depth,
                    "decode FLOPs per token": score.flops_per_token / unit,
                    "training seconds": round(fit.seconds, 1),
                }
                rows.append(row)
        return rows


class Plot(NamedTuple):
    """An SVG for the page, with its caption."""

    caption: str
    svg: str


class Findings(NamedTuple):
    """What a claim's judge found.

    Attributes:
        comparisons: the questions, decisive and informing.
        table: every seed and its controls.
        plots: at least one.
        remarks: sentences a reader needs: limits, and why a result may differ from the paper's.
    """

    comparisons: list[Comparison]
    table: list[dict[str, Cell]]
    plots: list[Plot]
    remarks: list[str]


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        key: name for ``--only``.
        title: a question.
        paper: what the paper says, with its numbers.
        setting: what was done here, in words.
        runs: what must be trained for it.
        judge: from all seeds to findings.
        measure: what must be measured of one seed's models beyond their scores; a top-level function, run in a worker.
    """

    key: str
    title: str
    paper: str
    setting: Callable[[Budget], str]
    runs: Callable[[Budget], list[Run]]
    judge: Callable[[Results], Findings]
    measure: Measure | None = None


@dataclass(frozen=True)
class ClaimResult:
    """A judged claim, as the report shows it."""

    key: str
    title: str
    paper: str
    setting: str
    seeds: list[int]
    findings: Findings
    verdict: Verdict

    @property
    def why(self) -> list[str]:
        """A sentence per comparison."""
        return [
            f"{comparison.verdict}: {comparison.why()}{'' if comparison.decisive else ' (informs, does not decide)'}"
            for comparison in self.findings.comparisons
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values without the plots; an infinite end of an interval is null."""
        return {
            "key": self.key,
            "title": self.title,
            "paper": self.paper,
            "setting": self.setting,
            "seeds": self.seeds,
            "verdict": self.verdict,
            "comparisons": [
                {name: _finite(value) for name, value in comparison._asdict().items() if name != "claimed"}
                | {"claimed": comparison.claimed.words()}
                for comparison in self.findings.comparisons
            ],
            "table": [{name: _finite(value) for name, value in row.items()} for row in self.findings.table],
            "remarks": self.findings.remarks,
        }


def judge(claim: Claim, results: Results) -> ClaimResult:
    """Apply a claim's judge and the rule."""
    findings = claim.judge(results)
    return ClaimResult(
        claim.key,
        claim.title,
        claim.paper,
        claim.setting(results.budget),
        results.seeds,
        findings,
        overall(findings.comparisons),
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
