"""Readouts: how the distributions of a token's executed depths become its next-token distribution."""

from typing import Protocol

import torch
from torch import Tensor

SMALLEST_WEIGHT = 1e-10


class Readout(Protocol):
    """A mixture of probabilities over executed depths, given as a weight per depth."""

    def weight(
        self,
        remaining: Tensor,
        continue_prob: Tensor | None,
        goes_on: Tensor,
        executed: Tensor,
    ) -> Tensor:
        """Weight ``[rows]`` of a depth.

        Args:
            remaining: ``[rows]``, mass not given to shallower depths: the product of their continue probabilities.
            continue_prob: g ``[rows]`` of this depth.
            goes_on: bool ``[rows]``, whether this is not the last executed depth.
            executed: int64 ``[rows]``, how many depths the token executes in all.
        """
        ...


class StopMass:
    """omega^(m) = (1 - g^(m)) prod_{j<m} g^(j), and all remaining mass for the last executed depth (Eq. 4).

    The last depth takes all remaining mass even where its own g is below tau: g at the stopping depth never enters.
    """

    def weight(self, remaining: Tensor, continue_prob: Tensor | None, goes_on: Tensor, executed: Tensor) -> Tensor:
        if continue_prob is None:
            return remaining
        return torch.where(goes_on, remaining * (1 - continue_prob), remaining)


class Uniform:
    """1 / m_t for each executed depth (TaH2-fixed)."""

    def weight(self, remaining: Tensor, continue_prob: Tensor | None, goes_on: Tensor, executed: Tensor) -> Tensor:
        return executed.to(remaining.dtype).reciprocal()


class LastDepth:
    """The last executed depth alone."""

    def weight(self, remaining: Tensor, continue_prob: Tensor | None, goes_on: Tensor, executed: Tensor) -> Tensor:
        return torch.where(goes_on, torch.zeros_like(remaining), torch.ones_like(remaining))


READOUTS: dict[str, Readout] = {
    "stop_mass": StopMass(),
    "uniform": Uniform(),
    "last_depth": LastDepth(),
}


def log_weight(weight: Tensor) -> Tensor:
    """Logarithm with the floor that keeps a vanishing weight from producing infinities."""
    return weight.clamp_min(SMALLEST_WEIGHT).log()


def mix(readout: Readout, log_probs: list[Tensor], gates: list[Tensor]) -> Tensor:
    """Log-probabilities ``[V]`` (or any shape) of one token's mixture.

    Args:
        readout: the rule.
        log_probs: per executed depth, the log-probabilities of that depth alone.
        gates: g of every executed depth but the last; empty for methods without a decider.
    """
    if len(log_probs) == 1:
        return log_probs[0]
    one = log_probs[0].new_ones(())
    executed = torch.tensor(len(log_probs), device=one.device)
    remaining, mixture = one, torch.full_like(log_probs[0], -torch.inf)
    for number, term in enumerate(log_probs):
        on = number + 1 < len(log_probs)
        gate = gates[number].to(one) if on and gates else None
        weight = readout.weight(remaining, gate, torch.tensor(on, device=one.device), executed)
        mixture = torch.logaddexp(mixture, log_weight(weight) + term)
        remaining = remaining * gate if gate is not None else remaining
    return mixture
