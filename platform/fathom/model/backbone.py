"""The looped span: the whole pretrained decoder stack and its final norm, run once per depth with the same weights."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fathom.model.attention import StreamView
from fathom.model.config import BackboneConfig
from fathom.model.layers import DecoderLayer, RMSNorm
from fathom.model.rotary import Rotary


class Backbone(nn.Module):
    """F_theta of methods 1.1: rows in, hidden states after the final norm out."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        u: Tensor,
        positions: Tensor,
        view: StreamView,
        checkpointing: bool = False,
    ) -> Tensor:
        """Run all layers once.

        Args:
            u: ``[rows, d]``, what the rows enter with.
            positions: int64 ``[rows]``, token positions.
            view: the streams these rows attend to; receives their keys and values after each layer.
            checkpointing: recompute layers in the backward.
        """
        cos, sin = self.rotary(positions, u.dtype)
        x = u
        for number, layer in enumerate(self.layers):
            if checkpointing:
                # Non-reentrant only: reentrant checkpointing would cut the graph through earlier depths' keys.
                x, k, v = checkpoint(layer, x, cos, sin, view, number, use_reentrant=False)
            else:
                x, k, v = layer(x, cos, sin, view, number)
            view.commit(number, k, v)
        return self.norm(x)
