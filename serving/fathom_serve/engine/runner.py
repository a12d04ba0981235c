"""One forward for all rows of a tick, whatever their request and depth, and their decisions."""

from typing import NamedTuple

import torch
from torch import Tensor

from fathom.model.looped import LoopedLM
from fathom.model.routing import Decision
from fathom_serve.engine.flight import Piece, PieceOutcome
from fathom_serve.kv.pool import PagePool
from fathom_serve.kv.view import PagedStreams, Run


class _Rows(NamedTuple):
    """The tick's rows, all ``[rows]``."""

    ids: Tensor
    positions: Tensor
    depth: Tensor
    max_depth: Tensor
    threshold: Tensor
    generates: Tensor
    predicts: Tensor


class Runner:
    """Runs ticks of a model.

    Args:
        model: in the dtype and on the device it serves with.
        pool: pages of keys and values.
        head_rows: rows whose logits exist at once, beside those that predict.
    """

    def __init__(self, model: LoopedLM, pool: PagePool, head_rows: int) -> None:
        self.model = model
        self.pool = pool
        self.head_rows = head_rows
        self.forwards = 0
        self.rows_run = 0

    @torch.inference_mode()
    def execute(self, pieces: list[Piece]) -> list[PieceOutcome]:
        """Run the pieces in one backbone call; at most one piece per request, since its rows may need each other."""
        rows = self._rows(pieces)
        embedding = self.model.embed(rows.ids)
        entered = self._enter(pieces, embedding, rows.depth)
        runs = [Run(piece.flight.streams, piece.depth, piece.positions) for piece in pieces]
        view = PagedStreams(self.model.method.visibility, self.pool, runs)
        hidden = self.model.backbone(entered, rows.positions, view)
        self.forwards += 1
        self.rows_run += len(rows.ids)
        gates, log_probs = self._heads(rows, embedding, hidden)
        goes_on = self._goes_on(rows, gates)
        return _split(pieces, hidden, goes_on, gates, log_probs)

    def _rows(self, pieces: list[Piece]) -> _Rows:
        device = self.pool.keys.device
        counts = torch.tensor([len(piece.positions) for piece in pieces])

        def spread(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

        positions = torch.tensor([position for piece in pieces for position in piece.positions], device=device)
        predicts = torch.zeros_like(positions, dtype=torch.bool)
        ends = counts.cumsum(0) - 1
        predicts[ends.to(device)] = torch.tensor([piece.predicts for piece in pieces], device=device)
        return _Rows(
            torch.tensor([token for piece in pieces for token in piece.ids], device=device),
            positions,
            spread([piece.depth for piece in pieces], torch.int64),
            spread([piece.flight.max_depth for piece in pieces], torch.int64),
            spread([piece.flight.threshold for piece in pieces], torch.float64),
            positions >= spread([piece.flight.prompt_tokens - 1 for piece in pieces], torch.int64),
            predicts,
        )

    def _enter(self, pieces: list[Piece], embedding: Tensor, depth: Tensor) -> Tensor:
        """Embeddings for rows at depth 1; the update of the last hidden state for deeper ones."""
        states = [piece.hidden for piece in pieces if piece.hidden is not None]
        if not states:
            return embedding
        deep = (depth > 1).nonzero()[:, 0]
        return embedding.index_copy(0, deep, self.model.enter(embedding[deep], torch.cat(states)).to(embedding.dtype))

    def _heads(self, rows: _Rows, embedding: Tensor, hidden: Tensor) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Continue probabilities ``[rows]`` (NaN where none is asked for) and the log-probabilities of predicting rows.

        Logits are made only for rows that sample or gate, a tile at a time.
        """
        decides = self.model.decider is not None
        gated = rows.depth < rows.max_depth if decides else torch.zeros_like(rows.predicts)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        gates = torch.full(rows.depth.shape, torch.nan, dtype=wide, device=hidden.device) if decides else None
        log_probs: dict[int, Tensor] = {}
        for tile in (gated | rows.predicts).nonzero()[:, 0].split(self.head_rows):
            logits = self.model.logits(hidden[tile])
            if gates is not None:
                local = gated[tile].nonzero()[:, 0]
                asked = tile[local]
                logit = self.model.continue_logit(embedding[asked], hidden[asked], logits[local])
                gates[asked] = logit.to(wide).sigmoid()
            for local in rows.predicts[tile].nonzero()[:, 0].tolist():
                log_probs[int(tile[local])] = logits[local].log_softmax(-1)
        return gates, log_probs

    def _goes_on(self, rows: _Rows, gates: Tensor | None) -> list[bool]:
        """The exit rule, with each request's own M and tau; at a row's last depth nothing is asked."""
        may = (rows.depth < rows.max_depth).nonzero()[:, 0]
        goes_on = torch.zeros_like(rows.predicts)
        decision = Decision(
            None if gates is None else gates[may],
            rows.depth[may],
            rows.generates[may],
            rows.max_depth[may],
            rows.threshold[may] if gates is None else rows.threshold[may].to(gates.dtype),
        )
        goes_on[may] = self.model.routing.goes_on(decision)
        return goes_on.tolist()


def _split(
    pieces: list[Piece],
    hidden: Tensor,
    goes_on: list[bool],
    gates: Tensor | None,
    log_probs: dict[int, Tensor],
) -> list[PieceOutcome]:
    outcomes, start = [], 0
    for piece in pieces:
        stop = start + len(piece.positions)
        last = stop - 1
        gate = gates[last] if gates is not None and piece.predicts and goes_on[last] else None
        outcomes.append(PieceOutcome(goes_on[start:stop], hidden[start:stop], log_probs.get(last), gate))
        start = stop
    return outcomes
