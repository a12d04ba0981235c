"""What a row carries from one depth to the next, in training and in serving alike."""

from typing import NamedTuple

from torch import Tensor


class RowKeys(NamedTuple):
    """What keys the randomness of rows: the run's seed, and int64 ``[rows]`` each. Serving, where rows have seeds of
    their own, has 0 for the run's and puts a request's seed in the place of the example."""

    seed: int
    example: Tensor
    position: Tensor


class RowState(NamedTuple):
    """Rows about to run a depth; every field is ``[rows, ...]``.

    Attributes:
        e: ``[rows, d]``, the original token embeddings.
        z: ``[rows, d]``, what the prelude made of them (e where there is no prelude).
        u: ``[rows, d]``, what they enter the next pass with.
        kept: ``[rows, d]``, what the readout has accumulated over the depths run so far.
        mass: ``[rows]``, fp32 or wider, share of the next-token distribution that no shallower depth took.
        gate: ``[rows]``, fp32 or wider, a router's weight of the next pass; 1 for methods without a router.
        planned: int64 ``[rows]``, the depth that a router chose at the start; 0 for methods without one.
        memory: ``[rows, w]``, fp32 or wider, what the exit rule remembers of the passes before; zeros at first.
    """

    e: Tensor
    z: Tensor
    u: Tensor
    kept: Tensor
    mass: Tensor
    gate: Tensor
    planned: Tensor
    memory: Tensor

    def at(self, index: Tensor | slice) -> "RowState":
        """Some of the rows."""
        return RowState(*(field[index] for field in self))


class Passed(NamedTuple):
    """Rows that have just run a depth.

    Attributes:
        depth: int64 ``[rows]``.
        state: as they entered.
        y: ``[rows, d]``, the body's output, without the final norm.
        x: ``[rows, d]``, the state that they leave with.
        h: ``[rows, d]``, the final norm of x.
        taps: ``[rows, d]`` each, inner states that the decider asked for.
        top: ``[rows, k]``, the largest probabilities of this depth's softmax, descending; k as the parts ask.
        top_logits: ``[rows, k]``, their logits.
        top_embedding: ``[rows, d]``, the mean of their embeddings under the softmax over these k alone.
        change: ``[rows]``, what the pass changed of the distribution, for rules that compare; 0 for others.
        memory: ``[rows, w]``, what the exit rule remembers of it.
    """

    depth: Tensor
    state: RowState
    y: Tensor
    x: Tensor
    h: Tensor
    taps: list[Tensor]
    top: Tensor
    top_logits: Tensor
    top_embedding: Tensor | None
    change: Tensor
    memory: Tensor

    def at(self, index: Tensor | slice) -> "Passed":
        """Some of the rows."""
        return Passed(
            self.depth[index],
            self.state.at(index),
            self.y[index],
            self.x[index],
            self.h[index],
            [tap[index] for tap in self.taps],
            self.top[index],
            self.top_logits[index],
            None if self.top_embedding is None else self.top_embedding[index],
            self.change[index],
            self.memory[index],
        )


def zero_row(like: Tensor) -> Tensor:
    """One row of zeros with the width and dtype of ``like``, which may be empty."""
    return like.new_zeros(1, *like.shape[1:])


def ghost_pass(like: Passed) -> Passed:
    """What a row of zeros might have left, with the fields' widths and dtypes of ``like``, which may be empty."""
    return Passed(
        zero_row(like.depth) + 1,
        RowState(*(zero_row(field) for field in like.state)),
        zero_row(like.y),
        zero_row(like.x),
        zero_row(like.h),
        [zero_row(tap) for tap in like.taps],
        zero_row(like.top),
        zero_row(like.top_logits),
        None if like.top_embedding is None else zero_row(like.top_embedding),
        zero_row(like.change),
        zero_row(like.memory),
    )
