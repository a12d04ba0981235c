"""What a forward reports: sums and counts in one vector, additive over micro-batches and ranks, never means."""

import torch
from torch import Tensor

from fathom.model.levels import Trace
from fathom.model.looped import LoopedLM
from fathom.model.routing import DeciderThreshold
from fathom.model.rows import PackedRows
from fathom.model.visibility import RowMeta, row_meta, visible_count
from fathom.objectives.context import Loss
from fathom.objectives.labels import DepthLabels
from fathom.objectives.value_head import explained_variance, value_sums

CALIBRATION_BINS = 10
VALUE_SUMS = ("value_count", "value_gain", "value_square", "value_error")
"""Of :func:`fathom.objectives.value_head.value_sums`."""


def stat_names(max_depth: int) -> list[str]:
    """Names of the vector's entries for models of up to ``max_depth`` depths."""
    names = ["forwards", "rows", "supervised", "loss", "readout_loss", "decider_loss"]
    for m in range(1, max_depth + 1):
        names += [f"{what}/{m}" for what in ("rows", "executed", "read", "depth_loss", "pairs", "last_depth")]
    for m in range(1, max_depth):
        names += [
            f"{what}/{m}"
            for what in (
                "continued",
                "eligible",
                "labelled",
                "gain",
                "positive_gain",
                "cut",
                "cuts",
                "compared",
                "agreed",
                "lookahead_due",
                "looked_ahead",
                *VALUE_SUMS,
            )
        ]
    for kind in ("count", "gain", "probability"):
        names += [f"calibration_{kind}/{number}" for number in range(CALIBRATION_BINS)]
    return names


@torch.no_grad()
def collect(
    trace: Trace,
    rows: PackedRows,
    loss: Loss,
    model: LoopedLM,
) -> dict[str, float]:
    """The sums of one forward by name; names that are absent are 0."""
    labels, rule = loss.labels, model.method.visibility
    # How decoding will decide, where training decides by what decoding cannot see.
    by_threshold = model.exit_rule.reads_targets and isinstance(model.routing, DeciderThreshold)
    values = {
        "forwards": 1.0,
        "rows": float(rows.count),
        "supervised": float(rows.supervised.sum()),
        "loss": float(loss.total),
        "readout_loss": -float(trace.log_prob[rows.supervised].double().sum()),
        "decider_loss": float(loss.routing),
    }
    metas: list[RowMeta] = []
    for m, ran in enumerate(trace.depths, start=1):
        supervised = rows.supervised[ran.index]
        meta = row_meta(rows.sequence[ran.index], rows.positions[ran.index], m)
        metas.append(meta._replace(last=torch.where(ran.goes_on, meta.last, meta.depth)))
        values[f"rows/{m}"] = float(ran.index.shape[0])
        values[f"executed/{m}"] = float(supervised.sum())
        if ran.head is not None:
            values[f"depth_loss/{m}"] = -float(ran.head.log_prob[supervised].double().sum())
            values[f"read/{m}"] = float(supervised.sum())
        values[f"pairs/{m}"] = float(visible_count(rule, metas[-1], metas))
        values[f"last_depth/{m}"] = float((supervised & ~ran.goes_on).sum())
        values[f"continued/{m}"] = float((supervised & ran.goes_on).sum())
        if by_threshold and ran.continue_logit is not None:
            decided = ran.continue_logit.sigmoid() > model.method.threshold
            values[f"compared/{m}"] = float(decided.shape[0])
            values[f"agreed/{m}"] = float((decided == ran.goes_on).sum())
    for m, at in enumerate(labels, start=1):
        gain = at.gain[at.measured]
        values[f"eligible/{m}"] = float(at.measured.sum())
        values[f"labelled/{m}"] = float(at.label.sum())
        values[f"gain/{m}"] = float(gain.sum())
        values[f"positive_gain/{m}"] = float(gain.clamp_min(0.0).sum())
        values[f"cut/{m}"], values[f"cuts/{m}"] = at.cut, 1.0
        values |= _lookahead(trace, rows, loss, m)
    if labels:
        values |= _calibration(trace, labels[0])
    return values


def _lookahead(trace: Trace, rows: PackedRows, loss: Loss, m: int) -> dict[str, float]:
    """How many of the stopped rows whose gain was wanted were measured, and how well a value head foresaw it."""
    ran, at = trace.depths[m - 1], loss.labels[m - 1]
    due = at.eligible | (rows.supervised[ran.index] & ~at.supervised)
    ahead = at.measured & ~ran.goes_on
    values = {f"lookahead_due/{m}": float((due & ~ran.goes_on).sum()), f"looked_ahead/{m}": float(ahead.sum())}
    if loss.predicted:
        sums = value_sums(loss.predicted[m - 1][ahead], at.gain[ahead]).tolist()
        values |= {f"{name}/{m}": value for name, value in zip(VALUE_SUMS, sums, strict=True)}
    return values


def _calibration(trace: Trace, labels: DepthLabels) -> dict[str, float]:
    """First-depth continue probability against measured gain, in equal bins of probability."""
    logit = trace.depths[0].continue_logit
    if logit is None:
        return {}
    # a model that diverged says NaN, which is no bin; its step will be refused
    probability = logit.double().sigmoid().nan_to_num()[labels.measured]
    place = (probability * CALIBRATION_BINS).long().clamp_max(CALIBRATION_BINS - 1)
    values = {}
    for kind, weights in (
        ("count", torch.ones_like(probability)),
        ("gain", labels.gain[labels.measured]),
        ("probability", probability),
    ):
        sums = torch.zeros(CALIBRATION_BINS, dtype=torch.float64, device=place.device).index_add(0, place, weights)
        values |= {f"calibration_{kind}/{number}": value for number, value in enumerate(sums.tolist())}
    return values


def summarise(names: list[str], vector: Tensor) -> dict[str, float]:
    """Metrics by their MLflow names, from summed statistics. A mean over nothing is left out.

    ``nll`` is the readout's for every objective, what decoding samples from; ``loss`` is what is minimised.
    """
    at = dict(zip(names, vector.tolist(), strict=True))
    depths = sum(name.startswith("executed/") for name in names)
    out: dict[str, float] = {
        "tokens": at["rows"],
        "supervised_tokens": at["supervised"],
    }

    def mean(name: str, total: float, count: float) -> None:
        if count:
            out[name] = total / count

    mean("loss", at["loss"], at["supervised"])
    mean("nll", at["readout_loss"], at["supervised"])
    mean("decider_loss", at["decider_loss"], at["supervised"])
    mean(
        "mean_depth",
        sum(at[f"executed/{m}"] for m in range(1, depths + 1)),
        at["supervised"],
    )
    mean(
        "mean_depth_all_rows",
        sum(at[f"rows/{m}"] for m in range(1, depths + 1)),
        at["rows"],
    )
    for m in range(1, depths + 1):
        mean(f"nll/depth_{m}", at[f"depth_loss/{m}"], at[f"read/{m}"])
        mean(f"share_stopping/depth_{m}", at[f"last_depth/{m}"], at["supervised"])
    for m in range(1, depths):
        mean(f"share_continuing/depth_{m}", at[f"continued/{m}"], at[f"executed/{m}"])
        mean(f"share_labelled/depth_{m}", at[f"labelled/{m}"], at[f"executed/{m}"])
        mean(f"gain/mean_depth_{m}", at[f"gain/{m}"], at[f"eligible/{m}"])
        mean(f"gain/positive_depth_{m}", at[f"positive_gain/{m}"], at[f"eligible/{m}"])
        mean(f"gain/cut_depth_{m}", at[f"cut/{m}"], at[f"cuts/{m}"])
        mean(f"router_agreement/depth_{m}", at[f"agreed/{m}"], at[f"compared/{m}"])
        mean(f"lookahead_share/depth_{m}", at[f"looked_ahead/{m}"], at[f"lookahead_due/{m}"])
        if at[f"value_count/{m}"]:
            sums = torch.tensor([at[f"{name}/{m}"] for name in VALUE_SUMS], dtype=torch.float64)
            out[f"value_explained/depth_{m}"] = explained_variance(sums)
    for name, part, whole in (
        ("router_agreement", "agreed", "compared"),
        ("lookahead_share", "looked_ahead", "lookahead_due"),
    ):
        mean(name, *(sum(at[f"{what}/{m}"] for m in range(1, depths)) for what in (part, whole)))
    return out


def calibration(names: list[str], vector: Tensor) -> list[tuple[float, float, float]]:
    """(mean continue probability, mean measured gain, tokens) of each bin that holds tokens."""
    at = dict(zip(names, vector.tolist(), strict=True))
    points = []
    for number in range(CALIBRATION_BINS):
        count = at[f"calibration_count/{number}"]
        if count:
            points.append(
                (
                    at[f"calibration_probability/{number}"] / count,
                    at[f"calibration_gain/{number}"] / count,
                    count,
                )
            )
    return points
