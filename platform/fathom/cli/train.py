"""``fathom train``: a recipe, from base model to registered version."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, as section.key=value.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what an earlier run of this name left, and start over.")
    ] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Resume although this key differs from the checkpoint's."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a recipe here: in this process, or on Ray workers if it asks for more than one.

    An interrupted run goes on from its last checkpoint when the same command is given again. Ctrl-C finishes the
    step, commits a checkpoint and ends.
    """
    from fathom.config.load import load_recipe
    from fathom.orchestrate.run import run_recipe

    result = run_recipe(load_recipe(recipe, overrides or []), fresh, allow_change or []).as_json()
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    for line in summary(result):
        typer.echo(line)


def summary(result: dict[str, Any]) -> list[str]:
    """The result of a run in a few lines."""
    lines = [
        f"run        {result['name']}: {'finished' if result['finished'] else 'stopped'} at step {result['steps']}"
    ]
    speed = (
        f"{result['tokens']:,} tokens in {result['train_seconds'] / 60:.1f} min, {result['tokens_per_second']:,.0f}/s"
    )
    lines.append(f"trained    {speed}")
    for name, report in result["heldout"].items():
        scores = (
            f"nll {report['nll']:.4f}, perplexity {report['perplexity']:.2f}, mean depth {report['mean_depth']:.2f}"
        )
        lines.append(f"held out   {name:9} {scores}")
    if result["model_uri"]:
        lines.append(f"model      {result['model_uri']}")
    if result["version"]:
        name = result["registered_as"]
        lines.append(f"registered models:/{name}/{result['version']}  (fathom deploy models:/{name}@champion)")
    if result["run_url"]:
        lines.append(f"tracked    {result['run_url']}")
    if not result["finished"]:
        lines.append("the same command goes on from the last checkpoint")
    return lines
