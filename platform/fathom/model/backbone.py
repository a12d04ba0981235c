"""The pretrained decoder stack in three parts: prelude and coda run once per token, the body once per depth."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fathom.model.adapter import LowRankAdapters
from fathom.model.attention import StreamView
from fathom.model.config import BackboneConfig
from fathom.model.layers import DecoderLayer, RMSNorm, unadapted
from fathom.model.rotary import Rotary
from fathom.model.span import Span


class Backbone(nn.Module):
    """F_theta of methods 1.1: rows in, rows out; the final norm is called apart, since methods differ in where."""

    def __init__(self, config: BackboneConfig, span: Span) -> None:
        super().__init__()
        self.span = span
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def prelude(self, x: Tensor, positions: Tensor, view: StreamView, checkpointing: bool = False) -> Tensor:
        """The layers before the loop."""
        return self._run(range(self.span.prelude), x, positions, view, checkpointing)

    def body(
        self,
        u: Tensor,
        positions: Tensor,
        view: StreamView,
        checkpointing: bool = False,
        adapters: LowRankAdapters | None = None,
        adapted: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """The looped layers, once: their output, and the states after the layers ``taps``, all ``[rows, d]``.

        Args:
            u: ``[rows, d]``, what the rows enter with.
            positions: int64 ``[rows]``, token positions.
            view: the streams these rows attend to; receives their keys and values after each layer.
            checkpointing: recompute layers in the backward.
            adapters: low-rank changes of the projections.
            adapted: ``[rows, 1]``, 1 for the rows that they apply to.
            taps: layers, counted from the body's first.
        """
        first = self.span.prelude
        part = range(first, first + self.span.body)
        inner: list[Tensor] = []
        out = self._run(part, u, positions, view, checkpointing, adapters, adapted, inner if taps else None)
        return out, [inner[number] for number in taps]

    def coda(self, x: Tensor, positions: Tensor, view: StreamView, checkpointing: bool = False) -> Tensor:
        """The layers after the loop."""
        last = self.span.layers
        return self._run(range(last - self.span.coda, last), x, positions, view, checkpointing)

    def _run(
        self,
        part: range,
        x: Tensor,
        positions: Tensor,
        view: StreamView,
        checkpointing: bool,
        adapters: LowRankAdapters | None = None,
        adapted: Tensor | None = None,
        inner: list[Tensor] | None = None,
    ) -> Tensor:
        cos, sin = self.rotary(positions, x.dtype)
        for number in part:
            layer = self.layers[number]
            adapter = unadapted if adapters is None or adapted is None else adapters.of_layer(number, adapted)
            if checkpointing:
                # Non-reentrant only: reentrant checkpointing would cut the graph through earlier depths' keys.
                x, k, v = checkpoint(layer, x, cos, sin, view, number, adapter, use_reentrant=False)
            else:
                x, k, v = layer(x, cos, sin, view, number, adapter)
            view.commit(number, k, v)
            if inner is not None:
                inner.append(x)
        return x
