"""Held-out negative log-likelihood, with the depths that produced it.

The model is run as it is trained and served: the decider chooses every token's depth and the mixture of
the executed depths is scored. Sums are kept in float64, so the result does not depend on how documents
are grouped into forwards beyond rounding.
"""

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fathom.evals.batches import Documents, batches, evaluating, nothing_supervised
from fathom.evals.forward import routed_trace
from fathom.model.rows import PackedRows

if TYPE_CHECKING:
    from fathom.model.looped import LoopedLM


class HeldoutReport(NamedTuple):
    """Scores over supervised tokens.

    Attributes:
        nll: mean of -log q of the mixture, nats per token.
        perplexity: exp(nll).
        mean_depth: mean depth executed by rows whose next token is supervised.
        prompt_mean_depth: the same for the other rows (0 where there are none).
        share_continuing: by depth m < M, share of the supervised rows at depth m that went on.
        nll_per_depth: by depth m, single-depth NLL of the supervised rows that executed m. The deeper
            entries are over fewer, harder tokens, so they are not comparable with each other.
        nll_depth_pairs: by depth m >= 2, (NLL at m-1, NLL at m) over the same rows, those that executed m.
        depth_counts: by executed depth, number of supervised rows.
        supervised_tokens: how many tokens were scored.
        documents: how many documents they came from.
        seconds: wall clock.
    """

    nll: float
    perplexity: float
    mean_depth: float
    prompt_mean_depth: float
    share_continuing: dict[int, float]
    nll_per_depth: dict[int, float]
    nll_depth_pairs: dict[int, tuple[float, float]]
    depth_counts: dict[int, int]
    supervised_tokens: int
    documents: int
    seconds: float

    def metrics(self, prefix: str = "heldout") -> dict[str, float]:
        """Flat names and numbers for the tracker."""
        flat = {
            f"{prefix}/nll": self.nll,
            f"{prefix}/perplexity": self.perplexity,
            f"{prefix}/mean_depth": self.mean_depth,
            f"{prefix}/prompt_mean_depth": self.prompt_mean_depth,
        }
        flat |= {f"{prefix}/share_continuing/depth_{depth}": share for depth, share in self.share_continuing.items()}
        return flat | {f"{prefix}/nll/depth_{depth}": nll for depth, nll in self.nll_per_depth.items()}

    def as_json(self) -> dict[str, object]:
        """The report with string keys throughout, for ``--json``."""
        return {
            name: {str(key): part for key, part in value.items()} if isinstance(value, dict) else value
            for name, value in self._asdict().items()
        }


class _Sums:
    """Running float64 sums over supervised rows."""

    def __init__(self) -> None:
        self.nll = 0.0
        self.tokens = 0
        self.prompt_rows = 0
        self.prompt_depths = 0
        self.depth_counts: dict[int, int] = {}
        self.rows_at: dict[int, int] = {}
        self.nll_at: dict[int, float] = {}
        self.nll_before: dict[int, float] = {}

    def add(self, model: "LoopedLM", rows: PackedRows, head_chunk_rows: int) -> None:
        trace = routed_trace(model, rows, head_chunk_rows)
        scored = rows.supervised
        self.nll -= float(trace.log_prob[scored].double().sum())
        self.tokens += int(scored.sum())
        self.prompt_rows += int((~scored).sum())
        self.prompt_depths += int(trace.executed[~scored].sum())
        for depth, count in zip(*torch.unique(trace.executed[scored], return_counts=True), strict=True):
            self.depth_counts[int(depth)] = self.depth_counts.get(int(depth), 0) + int(count)
        previous: Tensor | None = None
        for depth, level in enumerate(trace.depths, start=1):
            mine = scored[level.index]
            log_prob = torch.full((rows.count,), math.nan, dtype=torch.float64, device=scored.device)
            log_prob[level.index] = level.log_prob.double()
            here = level.index[mine]
            self.rows_at[depth] = self.rows_at.get(depth, 0) + here.numel()
            self.nll_at[depth] = self.nll_at.get(depth, 0.0) - float(log_prob[here].sum())
            if previous is not None:
                self.nll_before[depth] = self.nll_before.get(depth, 0.0) - float(previous[here].sum())
            previous = log_prob

    def report(self, max_depth: int, documents: int, seconds: float) -> HeldoutReport:
        nll = self.nll / self.tokens
        reached = {depth: rows for depth, rows in sorted(self.rows_at.items()) if rows}
        at = {depth: self.nll_at[depth] / rows for depth, rows in reached.items()}
        return HeldoutReport(
            nll=nll,
            perplexity=math.exp(min(nll, 700.0)),
            mean_depth=sum(depth * count for depth, count in self.depth_counts.items()) / self.tokens,
            prompt_mean_depth=self.prompt_depths / self.prompt_rows if self.prompt_rows else 0.0,
            share_continuing={m: self.rows_at.get(m + 1, 0) / reached[m] for m in reached if m < max_depth},
            nll_per_depth=at,
            nll_depth_pairs={m: (self.nll_before[m] / reached[m], at[m]) for m in reached if m > 1},
            depth_counts=dict(sorted(self.depth_counts.items())),
            supervised_tokens=self.tokens,
            documents=documents,
            seconds=seconds,
        )


def heldout_nll(
    model: "LoopedLM",
    prepared: Documents,
    tokens_per_forward: int = 4096,
    max_examples: int | None = None,
    head_chunk_rows: int = 1024,
) -> HeldoutReport:
    """Score documents that were not trained on.

    Args:
        model: run in evaluation mode, without gradient; its mode is put back afterwards.
        prepared: the documents; the first ``max_examples`` are scored, all if None.
        tokens_per_forward: rows of one forward at most (a longer document goes alone).
        head_chunk_rows: rows whose logits exist at once.

    Raises:
        DataError: no token is supervised.
    """
    count = len(prepared) if max_examples is None else min(max_examples, len(prepared))
    sums, started = _Sums(), time.perf_counter()
    with evaluating(model) as device:
        for batch in batches(prepared, tokens_per_forward, max_examples):
            sums.add(model, batch.rows.to(device), head_chunk_rows)
    if not sums.tokens:
        raise nothing_supervised(count)
    return sums.report(model.method.max_depth, count, time.perf_counter() - started)
