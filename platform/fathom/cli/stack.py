"""``fathom up`` and ``fathom down``: the local stack."""

import json
import sys
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def up(
    ray_port: Annotated[int, typer.Option(help="Port of the Ray head; 0 takes a free one.")] = 6379,
    dashboard_port: Annotated[
        int, typer.Option(help="Port of the Ray dashboard and job API; 0 takes a free one.")
    ] = 8265,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow; 0 takes a free one.")] = 5000,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="Logical CPUs of the Ray head. Default: cores, at least 4.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start the local stack: a Ray head, an MLflow server and a folder as object store, all on 127.0.0.1.

    State is kept in .fathom/ of the current folder, or in $FATHOM_HOME. A stack that is up is left alone.
    """
    from fathom.orchestrate.stack import Ports, ray_environment, start_stack

    ports = Ports(ray_port, dashboard_port, mlflow_port)
    state = start_stack(ports, cpus=cpus, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        typer.echo(json.dumps(state, indent=1))
        return
    typer.echo(f"Ray      {state['ray_address']}  dashboard and jobs: {state['dashboard_url']}")
    typer.echo(f"MLflow   {state['mlflow_uri']}")
    typer.echo(f"store    {state['store']}")
    typer.echo(f"token    {state['token_path']} (the dashboard asks for it)")
    typer.echo("\nfathom commands in this folder find it by themselves. For your own Ray scripts:")
    for name, value in ray_environment(state).items():
        typer.echo(f"  export {name}={value}")
    typer.echo("\nstop it with: fathom down")


def down(as_json: JsonOption = False) -> None:
    """Stop what ``fathom up`` started in this folder; runs, models and checkpoints stay."""
    from fathom.orchestrate.stack import stop_stack

    stopped = stop_stack()
    if as_json:
        typer.echo(json.dumps({"stopped": stopped}))
    else:
        typer.echo(f"stopped {' and '.join(stopped)}" if stopped else "nothing was running")
