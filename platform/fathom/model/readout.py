"""Readouts: how what a token's executed depths made becomes its next-token distribution."""

from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST_WEIGHT = 1e-10


class Readout:
    """A mixture of the depths' probabilities; this one is the last executed depth alone.

    Attributes:
        mixes_states: the states are mixed, not the distributions; the head sees their sum once, after the last depth.
        mixes_distributions: more than one depth's distribution has a weight.
        needs_decisions: the weights follow from continue probabilities.
        sums_hidden: each depth's head sees the sum of the normed states so far.
    """

    mixes_states = False
    mixes_distributions = False
    needs_decisions = False
    sums_hidden = False

    def weight(self, mass: Tensor, survival: Tensor | None, goes_on: Tensor, executed: Tensor) -> Tensor:
        """Weight ``[rows]`` of a depth.

        Args:
            mass: ``[rows]``, what shallower depths left.
            survival: ``[rows]``, what this depth leaves to deeper ones; None where nothing decides.
            goes_on: bool ``[rows]``, whether this is not the last executed depth.
            executed: int64 ``[rows]``, how many depths the token executes in all.
        """
        return torch.where(goes_on, torch.zeros_like(mass), torch.ones_like(mass))


class StopMass(Readout):
    """omega^(m) = (1 - g^(m)) prod_{j<m} g^(j), and all remaining mass for the last executed depth (Eq. 4).

    The last depth takes all remaining mass even where its own g is below tau: g at the stopping depth never enters.
    """

    mixes_distributions = True
    needs_decisions = True

    def weight(self, mass: Tensor, survival: Tensor | None, goes_on: Tensor, executed: Tensor) -> Tensor:
        return mass if survival is None else torch.where(goes_on, mass - survival, mass)


class WeightedStates(StopMass):
    """The same weights on the states themselves (ACT, methods 8)."""

    mixes_states = True
    mixes_distributions = False


class Uniform(Readout):
    """1 / m_t for each executed depth (TaH2-fixed)."""

    mixes_distributions = True

    def weight(self, mass: Tensor, survival: Tensor | None, goes_on: Tensor, executed: Tensor) -> Tensor:
        return executed.to(mass.dtype).reciprocal()


class SummedLogits(Readout):
    """Logits are summed over depths (TaH, methods 2.1); the head is linear, so it sees the sum of the states."""

    sums_hidden = True


READOUTS: dict[str, Readout] = {
    "last_depth": Readout(),
    "stop_mass": StopMass(),
    "uniform": Uniform(),
    "weighted_states": WeightedStates(),
    "summed_logits": SummedLogits(),
}
"""By name; a package may add its own (docs/methods.md)."""


def log_weight(weight: Tensor) -> Tensor:
    """Logarithm with the floor that keeps a vanishing weight from producing infinities."""
    return weight.clamp_min(SMALLEST_WEIGHT).log()


def mix(
    readout: Readout,
    log_probs: list[Tensor],
    gates: list[Tensor],
    survive: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> Tensor:
    """Log-probabilities ``[V]`` (or any shape) of one token's mixture.

    Args:
        readout: the rule.
        log_probs: per executed depth, the log-probabilities of that depth alone.
        gates: g of every executed depth but the last; empty for methods without a decider.
        survive: the decider's rule: mass left to deeper depths, from the mass so far and g.
    """
    if len(log_probs) == 1 or not readout.mixes_distributions:
        return log_probs[-1]
    one = log_probs[0].new_ones(())
    executed = torch.tensor(len(log_probs), device=one.device)
    remaining, mixture = one, torch.full_like(log_probs[0], -torch.inf)
    for number, term in enumerate(log_probs):
        on = number + 1 < len(log_probs)
        survival = survive(remaining, gates[number].to(one)) if on and gates else None
        weight = readout.weight(remaining, survival, torch.tensor(on, device=one.device), executed)
        mixture = torch.logaddexp(mixture, log_weight(weight) + term)
        remaining = remaining if survival is None else survival
    return mixture
