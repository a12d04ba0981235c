"""``fathom submit``, ``status`` and ``stop``: recipes as jobs on a Ray cluster."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Address = Annotated[
    str | None,
    typer.Option(help="Ray dashboard, http://host:8265. Default: $RAY_API_SERVER_ADDRESS, else the local stack."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def submit(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
    address: Address = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, as section.key=value.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Show the job's log until it ends.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of resuming.")] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Resume although this key differs from the checkpoint's."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a recipe to a Ray cluster as a job. Ctrl-C ends the following, not the job."""
    from fathom.config.load import load_recipe
    from fathom.orchestrate.jobs import Jobs

    cfg = load_recipe(recipe, overrides or [])
    jobs = Jobs(address)
    job_id = jobs.submit(cfg, fresh, allow_change or [])
    print(f"job {job_id} at {jobs.address}", file=sys.stderr, flush=True)
    job = jobs.get(job_id)
    if follow:
        try:
            job = jobs.follow(job_id, lambda text: print(text, end="", file=sys.stderr, flush=True))
        except KeyboardInterrupt:
            print(f"\nthe job goes on: fathom status {job_id}; fathom stop {job_id}", file=sys.stderr)
    show([job], as_json)
    if job.status == "FAILED":
        raise typer.Exit(1)


def status(
    job_id: Annotated[str | None, typer.Argument(help="A job; default all.")] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs of a cluster, or show one."""
    from fathom.orchestrate.jobs import Jobs

    jobs = Jobs(address)
    show([jobs.get(job_id)] if job_id else jobs.list(), as_json)


def stop(
    job_id: Annotated[str, typer.Argument(help="The job.")],
    address: Address = None,
    grace_seconds: Annotated[
        float, typer.Option(min=0.0, help="How long it may take to finish its step and commit a checkpoint.")
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Stop a job: it finishes its step and commits a checkpoint; submitted again, it goes on from there."""
    from fathom.orchestrate.jobs import Jobs

    show([Jobs(address).stop(job_id, grace_seconds)], as_json)
    print("submitted again, its recipe goes on from the last committed checkpoint", file=sys.stderr)


def show(jobs: list[Any], as_json: bool) -> None:
    """Print jobs, one a line."""
    if as_json:
        typer.echo(json.dumps([job._asdict() for job in jobs], indent=1))
        return
    for job in jobs:
        typer.echo(f"{job.status:9}  {job.seconds / 60:6.1f} min  {job.id}  {job.run_uri}")
    if not jobs:
        typer.echo("no jobs")
