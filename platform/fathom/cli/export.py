"""``fathom export``: a registered, published or base model as a Hugging Face folder of your own."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    model: Annotated[
        str,
        typer.Argument(help="models:/NAME@ALIAS, a folder, a URI, or a base model."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    base_only: Annotated[
        bool,
        typer.Option(
            "--base-only",
            help="Leave the added parts out: a plain model that only knows depth 1.",
        ),
    ] = False,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            help="MLflow server for models:/; default the local stack's.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a trained model as a Hugging Face folder."""
    from fathom.config.schema import MethodConfig
    from fathom.errors import ConfigError
    from fathom.model.config import is_own
    from fathom.model.folder import load_model, read_shape, save_model
    from fathom_serve.deploy.source import local_folder, resolve

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} exists and is not an empty folder",
            "choose another folder; export overwrites nothing",
        )
    folder = local_folder(resolve(model, tracking_uri))
    own = is_own(read_shape(folder).source)
    if own and base_only:
        raise ConfigError(
            f"--base-only: the layers of {model} have norms or an embedding scale that no plain model has",
            "export without --base-only; Fathom serves that folder, transformers cannot load it",
        )
    plain = MethodConfig(preset="standard", max_depth=1) if base_only else None
    loaded = load_model(folder, plain)
    save_model(loaded, out, folder)
    typer.echo(str(out))
    typer.echo(
        f"{loaded.method.name}, {loaded.method.max_depth} depth(s), from {folder}"
        + ("; transformers refuses it: its layers are Fathom's own" if own else ""),
        err=True,
    )
