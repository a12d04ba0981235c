"""``fathom tracking sync``: send what MLflow did not receive while it was away."""

from pathlib import Path
from typing import Annotated

import typer


def sync(
    spool: Annotated[Path, typer.Argument(help="Folder of a run's tracking events (holds events.jsonl).")],
    tracking_uri: Annotated[
        str | None,
        typer.Option(help="MLflow server; default the local stack's.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send a run's spooled events to MLflow; repeating it changes nothing."""
    import json

    from fathom.errors import ServiceError
    from fathom.tracking.server import default_uri
    from fathom.tracking.tracker import sync_spool

    uri = default_uri(tracking_uri)
    if uri is None:
        raise ServiceError(
            "no tracking server is known", "start the local stack with `fathom up`, or set MLFLOW_TRACKING_URI"
        )
    synced = sync_spool(spool, uri)
    if as_json:
        typer.echo(json.dumps({"uri": uri, **synced._asdict()}))
        return
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(synced.events.items()))
    typer.echo(f"run {synced.run_id} at {uri}: " + (f"sent {counts}" if counts else "nothing was missing"))
