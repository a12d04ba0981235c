"""Embedding and head as one module, and the vocabulary-sized work in chunks that the backward recomputes.

Logits ``[rows, V]`` never exist for more than ``chunk_rows`` rows: the forward keeps per row a target
log-probability, a log-sum-exp and the k largest probabilities, and the backward makes the logits again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class HeadOutput(NamedTuple):
    """What training needs of the next-token distribution, per row.

    Attributes:
        log_prob: ``[rows]``, log q[target].
        log_sum_exp: ``[rows]`` of the logits.
        top: ``[rows, k]``, the k largest probabilities of the full softmax, descending, zero-padded if V < k.
        top_ids: int64 ``[rows, k]``, whose they are; 0 in the padding.
        change: ``[rows]``, what the comparison found; 0 without one.
        memory: ``[rows, w]``, what it remembers for the next; nothing without one.
    """

    log_prob: Tensor
    log_sum_exp: Tensor
    top: Tensor
    top_ids: Tensor
    change: Tensor
    memory: Tensor


class Comparison(NamedTuple):
    """With what a distribution is compared.

    Attributes:
        compare: see :meth:`fathom.model.routing.Comparing.compare`; no gradient passes through it.
        memory: ``[rows, w]``, what it remembered of the pass before.
    """

    compare: Callable[[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]
    memory: Tensor


class TokenTable(nn.Module):
    """Token embeddings and output head, tied or not.

    It is called for both, so that a sharded, tied weight is gathered whichever way it is used. What it embeds, it
    multiplies by ``scale``.
    """

    def __init__(self, vocab_size: int, width: int, tied: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.embedding = nn.Parameter(torch.empty(vocab_size, width))
        self.head = None if tied else nn.Parameter(torch.empty(vocab_size, width))

    @property
    def head_weight(self) -> Tensor:
        """``[V, d]``."""
        return self.embedding if self.head is None else self.head

    def forward(
        self,
        ids: Tensor | None = None,
        head: tuple[Tensor, Tensor, int, int, Comparison | None] | None = None,
        mix: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Embed ``ids`` to ``[rows, d]``; or read out ``head``: the arguments of :func:`read_out` without the
        weight; or ``mix`` embeddings: ids and weights, both ``[rows, k]``, to ``[rows, d]``."""
        if ids is not None:
            return self._scaled(nn.functional.embedding(ids, self.embedding))
        if mix is not None:
            tokens, weights = mix
            with torch.autocast(self.embedding.device.type, enabled=False):
                weights = weights.to(self.embedding.dtype)
                return self._scaled(
                    nn.functional.embedding_bag(tokens, self.embedding, mode="sum", per_sample_weights=weights)
                )
        if head is None:
            raise ValueError("call with ids to embed, with head to read out, or with mix")
        hidden, targets, k, chunk_rows, comparison = head
        return read_out(hidden, self.head_weight, targets, k, chunk_rows, comparison)

    def _scaled(self, embedded: Tensor) -> Tensor:
        return embedded if self.scale == 1.0 else embedded * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Full logits ``[rows, V]`` in fp32 or wider, for the few rows that sample or gate in serving."""
        return _logits(hidden, self.head_weight, _compute_dtype(hidden))


def read_out(
    hidden: Tensor, weight: Tensor, targets: Tensor, k: int, chunk_rows: int, comparison: Comparison | None = None
) -> HeadOutput:
    """Target log-probability, log-sum-exp and top-k probabilities of ``softmax(hidden @ weight.T)``.

    Args:
        hidden: ``[rows, d]``.
        weight: ``[V, d]``.
        targets: int64 ``[rows]``.
        k: how many probabilities to keep, 0 for none.
        chunk_rows: rows whose logits exist at the same time.
        comparison: with the pass before, if an exit rule asks for it.
    """
    outputs = _ReadOut.apply(hidden, weight, targets, k, chunk_rows, _compute_dtype(hidden), comparison)
    return HeadOutput(*outputs)


def read_logits(logits: Tensor, k: int) -> HeadOutput:
    """What :func:`read_out` gives, from full logits ``[rows, V]`` that exist anyway; no target, no comparison."""
    kept = min(k, logits.shape[-1])
    log_sum_exp = logits.logsumexp(-1)
    best = logits.topk(kept, dim=-1)
    top = (best.values - log_sum_exp[:, None]).exp()
    padding = (0, k - kept)
    return HeadOutput(
        torch.full_like(log_sum_exp, torch.nan),
        log_sum_exp,
        nn.functional.pad(top, padding),
        nn.functional.pad(best.indices, padding),
        torch.zeros_like(log_sum_exp),
        log_sum_exp.new_zeros(log_sum_exp.shape[0], 0),
    )


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of the head's matrix products: autocast's where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(dtype) @ weight.to(dtype).T
    return logits if dtype == torch.float64 else logits.float()


class _ReadOut(torch.autograd.Function):
    """See :func:`read_out`. With p = softmax(z): d log q[y] = onehot(y) - p, d lse = p, d p_i = p_i (onehot(i) - p)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        k: int,
        chunk_rows: int,
        dtype: torch.dtype,
        comparison: Comparison | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows, kept = hidden.shape[0], min(k, weight.shape[0])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        log_prob = hidden.new_empty(rows, dtype=wide)
        log_sum_exp = hidden.new_empty(rows, dtype=wide)
        top = hidden.new_zeros(rows, k, dtype=wide)
        chosen = targets.new_empty(rows, kept)
        change = log_sum_exp.new_zeros(rows)
        memory = log_sum_exp.new_zeros(rows, 0) if comparison is None else torch.empty_like(comparison.memory)
        cast = weight.to(dtype)

        def head_of(states: Tensor) -> Tensor:
            return _logits(states, cast, dtype).log_softmax(-1)

        for part in _chunks(rows, chunk_rows):
            logits = _logits(hidden[part], cast, dtype)
            log_sum_exp[part] = logits.logsumexp(-1)
            log_prob[part] = logits.gather(1, targets[part, None])[:, 0] - log_sum_exp[part]
            if kept:
                values, chosen[part] = logits.topk(kept, dim=-1)
                top[part, :kept] = (values - log_sum_exp[part, None]).exp()
            if comparison is not None:
                log_probs, before = logits - log_sum_exp[part, None], comparison.memory[part]
                change[part], memory[part] = comparison.compare(log_probs, hidden[part], before, head_of)
        ctx.save_for_backward(hidden, weight, targets, log_sum_exp, chosen, top)
        ctx.chunk_rows, ctx.dtype = chunk_rows, dtype
        top_ids = nn.functional.pad(chosen, (0, k - kept))
        ctx.mark_non_differentiable(top_ids, change, memory)
        return log_prob, log_sum_exp, top, top_ids, change, memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_log_sum_exp, grad_top, *_ = grads
        hidden, weight, targets, log_sum_exp, chosen, top = ctx.saved_tensors
        kept, dtype = chosen.shape[1], ctx.dtype
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        cast = weight.to(dtype)
        pull = grad_top[:, :kept] * top[:, :kept]
        # Everything that multiplies -p: from log q[y], from the log-sum-exp (with the other sign) and from the top-k.
        mass = grad_log_sum_exp - grad_log_prob - pull.sum(-1)
        # Prompt rows teach nothing: their logits need not be made again.
        taught = ((mass != 0) | (grad_log_prob != 0) | (pull != 0).any(-1)).nonzero()[:, 0]
        for rows in taught.split(ctx.chunk_rows):
            states = hidden[rows].to(dtype)
            grad = _logits(states, cast, dtype).sub_(log_sum_exp[rows, None]).exp_()
            grad.mul_(mass[rows, None])
            grad.scatter_add_(1, targets[rows, None], grad_log_prob[rows, None])
            if kept:
                grad.scatter_add_(1, chosen[rows], pull[rows])
            grad = grad.to(dtype)
            grad_hidden[rows] = (grad @ cast).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad.T @ states
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunks(rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]
