"""First weights: of a model from scratch, of a model that keeps some of a pretrained one's layers, of added parts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fathom.errors import ConfigError, nearest
from fathom.model.config import OWN_VALUES, with_own_type
from fathom.model.layers import RMSNorm
from fathom.model.looped import LoopedLM
from fathom.model.updater import Updater

OPTIONAL_SIZES = ("head_dim", "num_key_value_heads", "tie_word_embeddings")
"""What a config.json may leave out."""


def reset_base(model: LoopedLM, seed: int) -> None:
    """Initialise everything from the seed: embeddings N(0, 1/d), linears N(0, 1/fan_in) and those that write to the
    residual stream smaller by sqrt(2 layers), norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    writers = ("o_proj", "down_proj")
    depth = (2 * model.config.layers) ** -0.5
    for table in (model.table.embedding, model.table.head):
        if table is not None:
            nn.init.normal_(table, std=table.shape[1] ** -0.5, generator=generator)
    for name, part in model.backbone.named_modules():
        if isinstance(part, nn.Linear):
            scale = depth if name.endswith(writers) else 1.0
            nn.init.normal_(part.weight, std=scale * part.in_features**-0.5, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, RMSNorm):
            nn.init.ones_(part.weight)


def match_embedding(model: LoopedLM) -> None:
    """Let depth 2 enter with the RMS of the embedding table instead of 1 (methods 1.8, an option).

    Raises:
        ConfigError: the method has no TaH2 updater.
    """
    if not isinstance(model.update, Updater):
        raise ConfigError(
            "method.updater_scale: this method has no updater whose scale could be set",
            "leave method.updater_scale out",
        )
    with torch.no_grad():
        scale = model.table.scale * model.table.embedding.float().square().mean().sqrt()
        nn.init.constant_(model.update.norm_out.weight, float(scale))


def changed_shape(
    source: dict[str, Any], shape: Mapping[str, int | float | bool | str], keep: Sequence[int] | None
) -> dict[str, Any]:
    """A ``config.json`` dictionary with other sizes (from scratch), or of which only some layers remain (retrofit,
    methods 6.1).

    Raises:
        ConfigError: a size that the base model's config.json does not name, a layer that it lacks, or layers out of
            order.
    """
    for key in shape:
        if key not in {*source, *OPTIONAL_SIZES, *OWN_VALUES}:
            sizes = sorted({*OWN_VALUES, *(name for name, value in source.items() if isinstance(value, int | float))})
            raise ConfigError(f"model.shape.{key}: the base model's config.json has no such value", nearest(key, sizes))
    changed = with_own_type(dict(source) | dict(shape))
    kinds, layers = changed.get("layer_types"), changed.get("num_hidden_layers", 0)
    if isinstance(kinds, list) and kinds and len(kinds) != layers:
        changed["layer_types"] = [kinds[number % len(kinds)] for number in range(layers)]
    return changed if keep is None else _kept(changed, keep)


def _kept(source: dict[str, Any], keep: Sequence[int]) -> dict[str, Any]:
    layers = source.get("num_hidden_layers", 0)
    if not keep or list(keep) != sorted(set(keep)) or not 0 <= keep[0] <= keep[-1] < layers:
        raise ConfigError(
            f"method.keep_layers: {list(keep)} are not layers of a model with {layers}, in order",
            f"name layers from 0 to {layers - 1}, each once, in increasing order",
        )
    kept = dict(source) | {"num_hidden_layers": len(keep)}
    if isinstance(source.get("layer_types"), list):
        kept["layer_types"] = [source["layer_types"][number] for number in keep]
    return kept
