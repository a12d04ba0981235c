"""Exit rules: which rows go on to the next depth. Decisions are constants; no gradient passes through them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Asked(NamedTuple):
    """What training or serving says about rows that an exit rule decides on; the fields of :class:`Decision` that do
    not follow from the model."""

    generates: Tensor
    max_depth: Tensor | int
    threshold: Tensor | float
    oracle: Tensor
    sequence: Tensor
    length: Tensor
    narrowed: float = 1.0


class Decision(NamedTuple):
    """What an exit rule may look at, about rows that have just run a depth.

    Attributes:
        continue_prob: g ``[rows]`` at this depth, None for methods without a decider.
        depth: int64 ``[rows]``, the depth just run.
        generates: bool ``[rows]``, rows whose next token is a training target or will be sampled.
        max_depth: M, one for all or per row.
        threshold: tau, one for all or per row.
        survival: ``[rows]``, share of the distribution that depths up to this one leave to deeper ones.
        planned: int64 ``[rows]``, the depth that a router chose at the start.
        oracle: int64 ``[rows]``, the depth that the data asks for, 0 where it asks for none.
        sequence: int64 ``[rows]``, which document or request.
        length: int64 ``[rows]``, how many rows that has in all; 0 in decoding, which does not know.
        draw: fp64 ``[rows]``, uniform numbers keyed by (seed, example, position, depth).
        change: ``[rows]``, what the pass changed, as the rule measures it: |x - u| / |x| for rules that read the state,
            else what :meth:`Comparing.compare` gives.
        narrowed: how much of what a router's capacities take off is taken off by now, 0 to 1.
    """

    continue_prob: Tensor | None
    depth: Tensor
    generates: Tensor
    max_depth: Tensor | int
    threshold: Tensor | float
    survival: Tensor
    planned: Tensor
    oracle: Tensor
    sequence: Tensor
    length: Tensor
    draw: Tensor
    change: Tensor
    narrowed: float = 1.0


class Routing:
    """An exit rule.

    Attributes:
        reads_targets: whether it looks at a whole sequence or at data that only training has, so that it cannot
            decode token by token.
        reads_generates: whether it looks at ``generates``, so that a token's depths depend on its part in a request.
        draws: whether it looks at ``draw``.
        reads_change: whether it looks at ``change`` of the state.
        dial: whether tau decides.
        needs_decisions: whether it looks at continue probabilities, or the mass that follows from them.
        needs_plan: whether it looks at a router's plan.
        one_pass: whether nobody ever goes on.
        every_row: whether every row runs all depths.
    """

    reads_targets = False
    reads_generates = False
    draws = False
    reads_change = False
    dial = False
    needs_decisions = False
    needs_plan = False
    one_pass = False
    every_row = False

    def goes_on(self, rows: Decision) -> Tensor:
        """Bool ``[rows]``: continue to the next depth. The loop never goes beyond M, whatever this says."""
        raise NotImplementedError


class EveryRow(Routing):
    """Every row runs all M depths."""

    every_row = True

    def goes_on(self, rows: Decision) -> Tensor:
        return torch.ones_like(rows.generates)


class OnePass(Routing):
    """Nobody goes on: the base model."""

    one_pass = True

    def goes_on(self, rows: Decision) -> Tensor:
        return torch.zeros_like(rows.generates)


class GeneratingRows(Routing):
    """All M depths for rows that generate, one for other prompt tokens (TaH2-fixed, methods 1.12)."""

    reads_generates = True

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.generates


class DeciderThreshold(Routing):
    """Continue iff g > tau, strictly (methods 1.1)."""

    dial = needs_decisions = True

    def goes_on(self, rows: Decision) -> Tensor:
        return _asked(rows) > rows.threshold


class SampledDecisions(Routing):
    """Continue with probability g: an ablation of TaH2 (Table 4)."""

    draws = needs_decisions = True

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.draw < _asked(rows)


class RandomDecisions(Routing):
    """Continue with probability tau, whatever the row: the control at a given mean depth."""

    draws = dial = True

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.draw < rows.threshold


class SurvivalThreshold(Routing):
    """Continue iff the mass left to deeper depths is above tau: exit at the first m with CDF(m) >= 1 - tau.

    Ouro's Q-exit with q = 1 - tau (methods 3.4), PonderNet's (8), and ACT's halting with eps = tau.
    """

    dial = needs_decisions = True

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.survival > rows.threshold


class Oracle(Routing):
    """As deep as the data asks (TaH's first stage, methods 2.3); rows of which it says nothing stop at depth 1."""

    reads_targets = True

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.depth < rows.oracle


class Planned(Routing):
    """As deep as the router chose at the start (MoR's token choice, methods 7.3)."""

    needs_plan = True

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.depth < rows.planned


class ExpertChoice(Routing):
    """Of each sequence the rows with the largest g, among those that ran this depth (MoR, methods 7.2).

    Capacities are N/N, (N-1)/N, ..., 1/N of the sequence for recursions 1..N, rounded down, at least one row (as
    released); while they warm up, less is taken off. Of equal g the earlier row wins. It looks at the whole sequence:
    decoding uses the threshold that the auxiliary loss trains.
    """

    reads_targets = needs_decisions = True

    def goes_on(self, rows: Decision) -> Tensor:
        g = _asked(rows)
        if not isinstance(rows.max_depth, int) or not g.shape[0]:
            return torch.zeros_like(rows.generates)
        left = rows.max_depth - rows.narrowed * rows.depth
        capacity = (rows.length * left / rows.max_depth + 1e-6).floor().clamp_min(1)
        _, place, sizes = torch.unique(rows.sequence, return_inverse=True, return_counts=True)
        order = torch.argsort(g, descending=True, stable=True)
        order = order[torch.argsort(place[order], stable=True)]
        starts = sizes.cumsum(0) - sizes
        rank = torch.empty_like(order)
        rank[order] = torch.arange(order.shape[0], device=order.device) - starts[place[order]]
        return rank < capacity


class StateChange(Routing):
    """Continue iff the state still moves: |x - u| / |x| > tau (Huginn's latent-diff, methods 4.4)."""

    reads_change = dial = True

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.change > rows.threshold


class Comparing(Routing):
    """Continue iff the pass changed the distribution that stopping would give by more than tau (methods 4.4).

    Before the first pass the distribution is uniform. Every pass then ends in the coda and the head.

    Attributes:
        further_heads: how many heads a comparison takes besides the one of its own pass.
    """

    dial = True
    further_heads = 0

    def memory_width(self, width: int) -> int:
        """How many numbers of a pass it remembers for the next; ``width`` is d."""
        raise NotImplementedError

    def compare(
        self, log_probs: Tensor, read: Tensor, memory: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The change ``[rows]``, and the memory for the next pass, ``[rows, memory_width]``.

        Args:
            log_probs: ``[rows, V]``, of this pass.
            read: ``[rows, d]``, the states that they are the head's distributions of.
            memory: of the pass before; zeros before the first.
            head: gives the log-probabilities of states ``[rows, d]``.
        """
        raise NotImplementedError

    def goes_on(self, rows: Decision) -> Tensor:
        return rows.change > rows.threshold


class Divergence(Comparing):
    """KL(p_{m-1} || p_m). What it remembers is the state, since that is narrower than a distribution: the head gives it
    again, and the uniform one of a state of zeros."""

    further_heads = 1

    def memory_width(self, width: int) -> int:
        return width

    def compare(
        self, log_probs: Tensor, read: Tensor, memory: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        before = head(memory.to(read.dtype))
        return (before.exp() * (before - log_probs)).sum(-1), read.to(memory.dtype)


class EntropyChange(Comparing):
    """|H_m - H_{m-1}| in nats. What it remembers is how far below log V the entropy is."""

    def memory_width(self, width: int) -> int:
        return 1

    def compare(
        self, log_probs: Tensor, read: Tensor, memory: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        below = math.log(log_probs.shape[-1]) + (log_probs.exp() * log_probs).sum(-1)
        return (below - memory[:, 0]).abs(), below[:, None]


class LikeliestToken(Comparing):
    """1 / (1 + n), where n passes in a row have left the likeliest token as it was: tau of 0.17 stops at five.

    What it remembers is that token, counted from 1, and n.
    """

    def memory_width(self, width: int) -> int:
        return 2

    def compare(
        self, log_probs: Tensor, read: Tensor, memory: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        token = (log_probs.argmax(-1) + 1).to(memory.dtype)
        unchanged = torch.where(token == memory[:, 0], memory[:, 1] + 1, 0.0)
        return 1 / (1 + unchanged), torch.stack((token, unchanged), dim=-1)


def _asked(rows: Decision) -> Tensor:
    if rows.continue_prob is None:
        raise ValueError("this exit rule needs continue probabilities: give the method a decider")
    return rows.continue_prob


ROUTINGS: dict[str, Routing] = {
    "every_row": EveryRow(),
    "one_pass": OnePass(),
    "generating_rows": GeneratingRows(),
    "decider_threshold": DeciderThreshold(),
    "sampled_decisions": SampledDecisions(),
    "random": RandomDecisions(),
    "survival_threshold": SurvivalThreshold(),
    "oracle": Oracle(),
    "planned": Planned(),
    "expert_choice": ExpertChoice(),
    "state_change": StateChange(),
    "divergence": Divergence(),
    "entropy_change": EntropyChange(),
    "likeliest_token": LikeliestToken(),
}
"""By name; a package may add its own (docs/methods.md)."""
