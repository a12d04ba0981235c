"""``fathom eval``: measures of a model on a recipe's held-out conversations, or on a task of its own."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fathom.config.schema import RunConfig

MEASURE_HELP = (
    "all, or names with commas: heldout, changes, calibration, kinds, convergence, attention, thresholds, accuracy, "
    "accuracy-curve, accuracy-thresholds; default heldout."
)


def evaluate(
    recipe: Annotated[Path, typer.Argument(help="Recipe whose held-out data is scored.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="models:/NAME@ALIAS, a folder or a URI; default the recipe's base model.",
            show_default=False,
        ),
    ] = None,
    step_zero: Annotated[
        bool,
        typer.Option(
            "--step-zero",
            help="Convert the model by the recipe's method first, as training starts.",
        ),
    ] = False,
    max_examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Conversations or questions to score; default the recipe's.",
            show_default=False,
        ),
    ] = None,
    max_depth: Annotated[
        int | None,
        typer.Option(min=1, help="Passes at most, also above the trained M; 1 reads depth 1.", show_default=False),
    ] = None,
    measures: Annotated[str | None, typer.Option(help=MEASURE_HELP, show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for each measure's JSON, PNG and SVG; default none.", show_default=False),
    ] = None,
    thresholds: Annotated[
        str | None,
        typer.Option(help="Of the measures named so; default 0.1 to 0.9.", show_default=False),
    ] = None,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Also generate answers and grade them by exact match.")
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(help="Questions and answers (.jsonl) to grade; default held-out data.", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers per question: avg@k and cons@k.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 takes the most probable token.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 256,
    match: Annotated[str, typer.Option(help="What must be equal: the last number, or the text.")] = "number",
    cutoffs: Annotated[
        str | None,
        typer.Option(help="Answer lengths of the curve; default eighths of --max-tokens.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value, may be repeated.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure a model on held-out conversations."""
    from fathom.cli.asked import asked_for
    from fathom.cli.bench import open_bench
    from fathom.cli.measures import check_out, run_measures
    from fathom.config.load import load_recipe

    chosen = list(overrides or [])
    if max_examples is not None:
        chosen.append(f"data.max_heldout_examples={max_examples}")
    config = load_recipe(recipe, chosen)
    asked = asked_for(measures, accuracy, thresholds, task, samples, temperature, max_tokens, match, cutoffs)
    check_out(out)
    reference = model or config.model.base
    more = measures is not None or accuracy
    with (
        open_bench(config, reference, step_zero, asked, max_depth) as loaded,
        tracked(config, reference, out, more) as (folder, log),
    ):
        results, files = run_measures(loaded, folder)
        log(results, files)
    if as_json:
        import json

        plain = {name: result.as_json() for name, result in results.items()}
        typer.echo(json.dumps(plain if more else plain["heldout"], indent=2, allow_nan=False))
    else:
        print_results(results)


@contextlib.contextmanager
def tracked(config: "RunConfig", reference: str, out: Path | None, more: bool) -> Iterator[tuple[Path | None, Any]]:
    """Where results are written, and what logs them to MLflow when they are there.

    Measures beyond the held-out table are logged when the recipe, the environment or the local stack has a server;
    without ``out`` their files live as long as it takes to log them.
    """
    from fathom.cli.measure_tracking import track_results
    from fathom.cli.measures import note
    from fathom.orchestrate.run import tracking_uri

    uri = tracking_uri(config) if more else None
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or (Path(scratch) if uri is not None else None)

        def log(results: dict[str, Any], files: list[Path]) -> None:
            if uri is not None and results:
                page = track_results(config, uri, reference, results, files)
                if page is not None:  # else the tracker has said how to send it later
                    note(f"tracked: {page}")

        yield folder, log


def print_results(results: dict[str, Any]) -> None:
    """A short table on stdout."""
    from rich.console import Console
    from rich.table import Table

    from fathom.cli.measures import MEASURES

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, result in results.items():
        for label, text in MEASURES[name].lines(result):
            table.add_row(label, text)
    Console().print(table)
