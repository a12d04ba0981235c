"""Slow and obvious: dense masks, one row at a time. The oracle of every fast path."""

import torch
from torch import Tensor

from fathom.model.looped import LoopedLM
from fathom.model.routing import Decision
from fathom.model.rows import PackedRows
from fathom.model.visibility import RowMeta, visible


class DenseStreams:
    """All keys of all depths in one list; every query sees what the predicate says."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.metas: list[RowMeta] = []
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def view(self, rows: RowMeta) -> "DenseView":
        return DenseView(self, rows)


class DenseView:
    def __init__(self, streams: DenseStreams, rows: RowMeta) -> None:
        self.streams = streams
        self.rows = rows
        self.earlier = list(streams.metas)
        streams.metas.append(rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = self.streams
        seen = torch.cat([visible(s.rule, self.rows, meta) for meta in [*self.earlier, self.rows]], dim=1)
        groups = q.shape[1] // k.shape[1]
        keys = torch.cat([*s.keys.get(layer, []), k]).repeat_interleave(groups, 1)
        values = torch.cat([*s.values.get(layer, []), v]).repeat_interleave(groups, 1)
        scores = torch.einsum("qhw,khw->hqk", q, keys) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen[None], -torch.inf).softmax(-1)
        return torch.einsum("hqk,khw->qhw", weights, values)

    def commit(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.streams.keys.setdefault(layer, []).append(k)
        self.streams.values.setdefault(layer, []).append(v)


def run_row(model: LoopedLM, streams: DenseStreams, u: Tensor, sequence: int, position: int, depth: int) -> Tensor:
    """Hidden state ``[1, d]`` of one row."""
    meta = RowMeta(*(torch.tensor([value]) for value in (sequence, position, depth)))
    return model.run_span(u, meta.position, streams.view(meta))


def decode(model: LoopedLM, rows: PackedRows, routes: Tensor | None = None) -> dict[str, Tensor]:
    """Token by token, each to its last depth before the next, with plain full-vocabulary arithmetic.

    Returns per row: mixture log-probability of the target, executed depth, per-depth log-probabilities ``[rows, M]``
    (NaN where not run) and continue probabilities ``[rows, M]``.
    """
    streams = DenseStreams(model.method.visibility)
    depths = model.method.max_depth
    mixed, executed = [], []
    single = torch.full((rows.count, depths), torch.nan, dtype=torch.float64)
    gates = torch.full((rows.count, depths), torch.nan, dtype=torch.float64)
    for t in range(rows.count):
        e = model.embed(rows.ids[t : t + 1])
        u, log_probs, taken, depth = e, [], [], 0
        while True:
            depth += 1
            h = run_row(model, streams, u, int(rows.sequence[t]), int(rows.positions[t]), depth)
            logits = model.logits(h)
            log_probs.append(logits.log_softmax(-1)[0])
            single[t, depth - 1] = log_probs[-1][rows.targets[t]]
            gate = None
            if model.decider is not None and depth < depths:
                gate = model.continue_logit(e, h, logits).sigmoid()
                gates[t, depth - 1] = gate
            if routes is not None:
                on = depth < min(int(routes[t]), depths)
            elif depth == depths:
                on = False
            else:
                supervised, threshold = rows.supervised[t : t + 1], model.method.threshold
                decision = Decision(gate, torch.tensor([depth]), supervised, depths, threshold)
                on = bool(model.routing.goes_on(decision))
            if not on:
                break
            taken += [gate] if gate is not None else []
            u = model.enter(e, h)
        mixed.append(model.mix(log_probs, [g[0] for g in taken])[rows.targets[t]])
        executed.append(depth)
    return {
        "log_prob": torch.stack(mixed),
        "executed": torch.tensor(executed),
        "single": single,
        "gates": gates,
    }
