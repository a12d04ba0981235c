"""What training needs from outside, fetched once per machine: the base model and the token shards."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fathom.config.load import config_dict
from fathom.config.schema import RunConfig
from fathom.data.mixture import epoch_draws
from fathom.data.prepared import Prepared, Split, prepare
from fathom.data.template import Renderer
from fathom.errors import ConfigError, DataError
from fathom.model.config import BackboneConfig
from fathom.model.folder import load_tokenizer, read_shape
from fathom.model.hub import resolve_base
from fathom.model.looped import LoopedLM
from fathom.model.methods import method_of
from fathom.objectives.table import check_objective, objective_of
from fathom.train.group import Group


class Inputs(NamedTuple):
    """On this machine's disk.

    Attributes:
        base: folder of the pretrained model.
        train: documents to learn from.
        heldout: documents to measure on, if the recipe names any.
    """

    base: Path
    train: Prepared
    heldout: Prepared | None


def fetch_inputs(cfg: RunConfig, group: Group, work: Path) -> Inputs:
    """Fetch the base model and prepare the data, one worker of each machine first.

    Raises:
        ModelError: no such base model, or it cannot be read.
        DataError: the data cannot be read or holds nothing to learn from.
        ConfigError: a conversation is longer than the model has positions.
    """

    def here() -> Inputs:
        base = resolve_base(cfg.model.base)
        shape = read_shape(base, cfg.method, cfg.model)
        refuse_unfit(cfg, base)
        renderer = Renderer(load_tokenizer(base), cfg.data.chat_format)
        train = prepare_here(cfg, "train", renderer, work / "data" / "train")
        refuse_undrawn(cfg, train)
        heldout = None
        if cfg.data.heldout is not None:
            heldout = prepare_here(cfg, "heldout", renderer, work / "data" / "heldout")
        for prepared in (train, heldout):
            if prepared is not None:
                refuse_beyond_positions(prepared, shape)
        return Inputs(base, train, heldout)

    return group.first_here(here)


def require_labels(cfg: RunConfig) -> None:
    """Raise ConfigError if the method learns from depth labels and the recipe names no model that makes them, or they
    would ask for other depths than the method has."""
    method = method_of(cfg.method)
    routed = (method.training_routing or method.routing) == "oracle"
    if not routed and "labels" not in objective_of(method, cfg.objective).needs:
        return
    if cfg.data.label_model is None:
        raise ConfigError(
            f"method.preset {cfg.method.preset!r} learns from depth labels, and data.label_model is not set",
            "set data.label_model to a model with the base's tokenizer, for example the base itself",
        )
    labelled = 2 if cfg.data.label_shares is None else len(cfg.data.label_shares)
    if method.max_depth != labelled:
        raise ConfigError(
            f"method.max_depth is {method.max_depth}, and the depth labels of the data go to {labelled}",
            f"set data.label_shares to the shares of depths 1 to {method.max_depth} (published for three: 0.88, 0.06, "
            f"0.06), or method.max_depth to {labelled}",
        )


def refuse_unfit(cfg: RunConfig, base: Path) -> None:
    """Raise ConfigError or ModelError if the recipe's method cannot be made of this base model, before any work.

    The model is made without memory for its weights.
    """
    if cfg.parallel.strategy == "zero" and objective_of(method_of(cfg.method), cfg.objective).alternates_gradient:
        raise ConfigError(
            "parallel.strategy zero: this objective has passes without a gradient between passes that have one, and "
            "ZeRO-3's gathers get out of step over them",
            "set parallel.strategy to fsdp or single",
        )
    method, (_, _, depth) = method_of(cfg.method), (cfg.checkpoint.best_metric or "").partition("/depth_")
    if depth and not 1 <= int(depth) <= method.max_depth:
        raise ConfigError(
            f"checkpoint.best_metric: no evaluation gives {cfg.checkpoint.best_metric}, since method {method.name!r} "
            f"has depths 1 to {method.max_depth}",
            "name one of these depths, or set heldout/nll",
        )
    with torch.device("meta"):
        check_objective(LoopedLM(read_shape(base, cfg.method, cfg.model), method), cfg.objective)


def refuse_beyond_positions(prepared: Prepared, shape: BackboneConfig) -> None:
    """Raise ConfigError if a conversation has positions that the base model was never trained on."""
    longest = int(prepared.lengths.max())
    if longest > shape.max_positions:
        raise ConfigError(
            f"{prepared.where(int(prepared.lengths.argmax()))}: the conversation has {longest:,} tokens, the model "
            f"has {shape.max_positions:,} positions",
            f"set data.context_tokens to {shape.max_positions} or less: longer conversations are then dropped",
        )


def refuse_undrawn(cfg: RunConfig, prepared: Prepared) -> None:
    """Raise DataError if a source of a mixture is so small a share that no draw of an epoch would fall on it."""
    if not isinstance(cfg.data.train, str):
        epoch_draws(prepared.sizes, [each.weight for each in cfg.data.train])


def prepare_here(cfg: RunConfig, split: Split, renderer: Renderer, folder: Path) -> Prepared:
    """Prepare into the run's own folder, anew if that holds what other data gave."""
    if folder.exists():
        try:
            return prepare(cfg.data, split, renderer, folder)
        except DataError:
            shutil.rmtree(folder)
    return prepare(cfg.data, split, renderer, folder)


def describe_inputs(cfg: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """Digests and counts of the data, for the tracker and the summary."""
    described: dict[str, Any] = {"base": cfg.model.base, "data": config_dict(cfg)["data"]}
    for name, prepared in (("train", inputs.train), ("heldout", inputs.heldout)):
        if prepared is not None:
            described[name] = {"digest": prepared.digest, "counts": prepared.counts}
    return described
