"""``fathom models``: what is registered, where its bytes are, and which version is the champion."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fathom.tracking.registry import ModelSource


def models(
    name: Annotated[
        str | None,
        typer.Argument(help="Only this model; default all.", show_default=False),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(help="MLflow server; default the local stack's.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the registered models and their versions."""
    from fathom.errors import ModelError
    from fathom.tracking.registry import list_models

    known = list_models(tracking_uri)
    versions = [version for version in known if name in (None, version.name)]
    if name is not None and not versions:
        registered = ", ".join(sorted({version.name for version in known})) or "none"
        raise ModelError(f"no model is registered as {name!r}", f"registered models: {registered}")
    if as_json:
        import json

        typer.echo(json.dumps([version._asdict() for version in versions], indent=2))
        return
    _print_table(versions)


def _print_table(versions: list["ModelSource"]) -> None:
    """One line for each version; lines are as long as they must be, since a source may be copied."""
    from rich.console import Console
    from rich.table import Table

    if not versions:
        typer.echo("no model is registered; a run registers its model under tracking.register_as", err=True)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "version", "aliases", "digest", "source"):
        table.add_column(column, no_wrap=True)
    for each in versions:
        table.add_row(each.name, each.version, " ".join(each.aliases), each.digest[:12], each.source)
    Console(width=10_000).print(table, soft_wrap=True)  # it takes what it needs of that
