"""What ``fathom eval`` says of each measure on a terminal: pairs of a label and a text."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fathom.evals.accuracy import Accuracy
    from fathom.evals.attention_mass import AttentionMass
    from fathom.evals.calibration import Calibration
    from fathom.evals.changes import DepthChanges
    from fathom.evals.convergence import Convergence
    from fathom.evals.curve import Curve
    from fathom.evals.depth_by_kind import DepthByKind
    from fathom.evals.heldout import HeldoutReport
    from fathom.evals.intervals import Estimate

Lines = list[tuple[str, str]]


def heldout(report: "HeldoutReport") -> Lines:
    """Likelihood, depths, and what the deeper depths brought."""
    lines = [
        ("held-out NLL", f"{report.nll:.4f} nats per token (perplexity {report.perplexity:.2f})"),
        ("mean depth", f"{report.mean_depth:.3f} (prompt {report.prompt_mean_depth:.3f})"),
    ]
    lines += [(f"continuing at depth {depth}", f"{share:.1%}") for depth, share in report.share_continuing.items()]
    for depth, (before, after) in report.nll_depth_pairs.items():
        pair = f"NLL {before:.4f} at depth {depth - 1}, {after:.4f} at depth {depth}"
        lines.append((f"tokens that ran depth {depth}", pair))
    rate = report.supervised_tokens / report.seconds if report.seconds else 0.0
    counts = f"{report.supervised_tokens:,} tokens of {report.documents:,} conversations, {rate:,.0f} tokens/s"
    return [*lines, ("scored", counts)]


def changes(result: "DepthChanges") -> Lines:
    """Shares of unchanged and worsened tokens, first depth to last."""
    whole = result.whole
    text = f"{whole.unchanged:.1%} unchanged, {whole.worse_beyond:.1%} worse, {whole.better_beyond:.1%} better"
    return [(f"depth {whole.from_depth} to {whole.to_depth}, all forced", text)]


def calibration(result: "Calibration") -> Lines:
    """The gain at both ends, and where it crosses zero."""
    first, last = result.bins[0], result.bins[-1]
    ends = f"{first.gain:+.4f} nats at g {first.probability:.2f}, {last.gain:+.4f} at g {last.probability:.2f}"
    crossed = ", ".join(f"{at:.2f}" for at in result.crossings) or "nowhere"
    return [("gain of one more depth", f"{ends}; zero at g: {crossed}")]


def kinds(result: "DepthByKind") -> Lines:
    """Mean depth by kind of token, deepest first."""
    return [("depth by kind", ", ".join(f"{row.kind} {row.mean_depth:.2f}" for row in result.kinds))]


def convergence(result: "Convergence") -> Lines:
    """How far the last iteration moved the state."""
    last = result.iterations[-1]
    if last.relative_change is None or last.direction_change is None:
        return []
    moved = f"median {last.relative_change.median:.4f}, 1 - cos {last.direction_change.median:.4f}"
    return [(f"state moved at depth {last.depth}", moved)]


def attention(result: "AttentionMass") -> Lines:
    """Mean mass of the deepest queries by depth of the key."""
    if not result.mass:
        return []
    shares = []
    for depth, layers in enumerate(result.mass[-1], start=1):
        heads = [mass for layer in layers for mass in layer]
        shares.append(f"{sum(heads) / len(heads):.1%} on depth {depth}")
    return [(f"attention of depth {len(result.mass)}", ", ".join(shares))]


def curve(result: "Curve") -> Lines:
    """The slope per doubling of decode FLOPs."""
    label = f"{result.y_name} by {result.dial}"
    if math.isnan(result.slope.value):
        return [(label, "no slope: every setting cost the same")]
    r_squared = "" if math.isnan(result.r_squared) else f", R² {result.r_squared:.3f}"
    return [(label, f"slope {_range(result.slope, '.3f')} per doubling{r_squared}")]


def accuracy(result: "Accuracy") -> Lines:
    """avg@k, cons@k, and what an answer costs."""
    k = result.samples
    lines = [(f"avg@{k}", f"{_range(result.average, '.1%')} over {result.items:,} items")]
    if k > 1:
        lines.append((f"cons@{k}", _range(result.consensus, ".1%")))
    cost = f"{result.tokens_per_answer:.0f} tokens, {result.flops_per_answer:.3g} decode FLOPs"
    return [*lines, ("an answer", f"{cost}, mean depth {result.mean_depth:.2f}, {result.at_limit:.0%} at the limit")]


def _range(estimate: "Estimate", form: str) -> str:
    """A value, with its interval where there is one."""
    if math.isnan(estimate.low):
        return format(estimate.value, form)
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"
