"""Model folders for tests of serving."""

from pathlib import Path

import torch

from fathom.config.schema import MethodConfig
from fathom.model.folder import load_model, save_model
from support.models import tiny_base_folder


def tah2_folder(root: Path) -> Path:
    """A tiny converted model whose decider is loud, so that depths are mixed."""
    base = tiny_base_folder(root / "base")
    model = load_model(base, MethodConfig(preset="tah2", max_depth=2))
    with torch.no_grad():
        model.decider.score.weight.mul_(200)
    save_model(model, root / "tiny", base)
    return root / "tiny"
