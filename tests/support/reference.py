"""Slow and obvious: dense masks, one row at a time. The oracle of every fast path."""

import torch
from torch import Tensor

from fathom.model.looped import LoopedLM
from fathom.model.routing import Asked, Comparing
from fathom.model.rows import PackedRows
from fathom.model.state import RowKeys
from fathom.model.visibility import LATEST, SAME_DEPTH, RowMeta, row_meta, visible
from fathom.model.vocabulary import read_logits


class DenseStreams:
    """All keys of all depths in one list; every query sees what the predicate says."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.metas: list[RowMeta] = []
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def view(self, rows: RowMeta) -> "DenseView":
        return DenseView(self, rows)

    def settle(self, passes: int, last: int) -> None:
        """The newest ``passes`` rows belong to a token whose final depth is ``last``."""
        for number in range(len(self.metas) - passes, len(self.metas)):
            meta = self.metas[number]
            self.metas[number] = meta._replace(last=torch.full_like(meta.last, last))


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


def one_row(rows: PackedRows, t: int) -> PackedRows:
    return PackedRows(*(field[t : t + 1] for field in rows))


def plain_change(model: LoopedLM, log_probs: list[Tensor], u: Tensor, x: Tensor) -> Tensor:
    """What the last pass from u to x changed, as the rule has it, from all distributions so far ``[V]``."""
    if model.exit_rule.reads_change:
        return ((x - u).square().sum() / x.square().sum()).sqrt()
    if model.method.routing == "likeliest_token":
        likeliest = [int(each.argmax()) for each in log_probs]
        alike = [token == likeliest[-1] for token in likeliest[::-1]]
        return torch.tensor(1 / (alike.index(False) if False in alike else len(alike)))
    q = log_probs[-1].exp()
    p = log_probs[-2].exp() if len(log_probs) > 1 else torch.full_like(q, 1 / len(q))
    if model.method.routing == "entropy_change":
        return ((p * p.log()).sum() - (q * q.log()).sum()).abs()
    assert model.method.routing == "divergence"
    return (p * (p / q).log()).sum()


def decode(model: LoopedLM, rows: PackedRows, routes: Tensor | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Token by token, each to its last depth and through the coda before the next, with plain arithmetic.

    Returns per row: log-probability of the target under the readout, executed depth, per-depth log-probabilities
    ``[rows, M]`` (NaN where not run or not read) and continue probabilities ``[rows, M]``.
    """
    before, body, after = (DenseStreams(rule) for rule in (SAME_DEPTH, model.method.visibility, LATEST))
    depths, rule = model.method.max_depth, model.exit_rule
    mixed, executed = [], []
    single = torch.full((rows.count, depths), torch.nan, dtype=torch.float64)
    gates = torch.full((rows.count, depths), torch.nan, dtype=torch.float64)
    for t in range(rows.count):
        row = one_row(rows, t)
        meta = row_meta(row.sequence, row.positions, 1)
        keys = RowKeys(seed, row.example, row.positions)
        state, _ = model.start(row.ids, row.positions, before.view(meta), keys)
        if routes is not None and int(state.planned):
            state = state._replace(planned=routes[t : t + 1])
        log_probs, taken, depth, mass, kept = [], [], 0, torch.ones(1, dtype=torch.float64), torch.zeros_like(state.u)
        while True:
            depth += 1
            here = torch.tensor([depth])
            ran = model.run(state, here, row.positions, body.view(row_meta(row.sequence, row.positions, depth)))
            _, x, h, _ = ran
            summed = model.kept(state, x, h)
            head = None
            if model.reads_every_pass:
                stopping = kept + mass * x if model.readout.mixes_states else summed
                coda = after.view(row_meta(row.sequence, row.positions, depth))
                logits = model.logits(model.finish(stopping, row.positions, coda))
                head = read_logits(logits, model.top_k())
                log_probs.append(logits.log_softmax(-1)[0])
                single[t, depth - 1] = log_probs[-1][rows.targets[t]]
            passed = model.pass_of(state, here, ran, head)
            logit = model.continue_logit(passed) if depth < depths else None
            gate = None if logit is None else logit.sigmoid()
            if gate is not None:
                gates[t, depth - 1] = gate[0]
            survival = model.survival(mass, gate)
            if routes is not None:
                on = depth < min(int(routes[t]), depths)
            elif rule.reads_change or isinstance(rule, Comparing):
                change = plain_change(model, log_probs, state.u, x)
                on = depth < depths and bool(change > model.method.threshold)
            else:
                asked = Asked(
                    row.supervised, depths, model.method.threshold, row.oracle, row.sequence, torch.tensor([rows.count])
                )
                on = depth < depths and bool(model.goes_on(passed, gate, survival, keys, asked))
            share = mass - survival if on else mass
            kept = kept + share * x if model.readout.mixes_states else summed
            if not on:
                break
            taken += [] if gate is None else [gate[0]]
            state, mass = model.enter(passed, kept, logit, survival), survival
        body.settle(depth, depth)
        if model.reads_every_pass:
            after.settle(depth, depth)
            mixed.append(model.mix(log_probs, taken)[rows.targets[t]])
        else:
            hidden = model.finish(kept, row.positions, after.view(meta))
            mixed.append(model.logits(hidden).log_softmax(-1)[0, rows.targets[t]])
        executed.append(depth)
    return {
        "log_prob": torch.stack(mixed),
        "executed": torch.tensor(executed),
        "single": single,
        "gates": gates,
    }
