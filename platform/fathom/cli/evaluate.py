"""``fathom eval``: measures of a model on a recipe's held-out conversations, or on a task of its own."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fathom.cli.measures import Asked, Bench
    from fathom.config.schema import RunConfig

MEASURE_HELP = (
    "all, or names with commas: heldout, changes, calibration, kinds, convergence, attention, thresholds, accuracy, "
    "accuracy-curve; default heldout."
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
            help="Conversations to score; default the recipe's.",
            show_default=False,
        ),
    ] = None,
    measures: Annotated[str | None, typer.Option(help=MEASURE_HELP, show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for each measure's JSON, PNG and SVG; default none.", show_default=False),
    ] = None,
    thresholds: Annotated[
        str | None,
        typer.Option(help="Of the measure thresholds; default 0.1 to 0.9.", show_default=False),
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
    with bench(config, reference, step_zero, asked) as loaded, tracked(config, reference, out, more) as (folder, log):
        results = run_measures(loaded, folder)
        log(results)
    if as_json:
        import json

        plain = {name: result.as_json() for name, result in results.items()}
        typer.echo(json.dumps(plain if more else plain["heldout"], indent=2, allow_nan=False))
    else:
        print_results(results)


@contextlib.contextmanager
def bench(config: "RunConfig", reference: str, step_zero: bool, asked: "Asked") -> "Iterator[Bench]":
    """Load a model and prepare a recipe's held-out data.

    Args:
        config: its ``data`` says what is scored; with ``step_zero``, its ``method`` and ``seed`` convert the model.
        reference: what ``fathom deploy`` takes, or a recipe's ``model.base``.
        asked: the measures.

    Raises:
        ConfigError: the recipe has no held-out data.
    """
    import tempfile

    from fathom.cli.measures import Bench
    from fathom.data.prepared import prepare
    from fathom.data.records import require_source
    from fathom.data.template import Renderer
    from fathom.errors import ConfigError
    from fathom.model.folder import load_model, load_tokenizer
    from fathom_serve.deploy.source import local_folder, resolve

    if config.data.heldout is None:
        raise ConfigError(
            "data.heldout is not set: there is nothing to score on",
            "name held-out data in the recipe",
        )
    if asked.task is not None:
        require_source("--task", asked.task)
    folder = local_folder(resolve(reference, config.tracking.uri))
    model = load_model(folder, config.method if step_zero else None, seed=config.seed)
    with tempfile.TemporaryDirectory() as work:
        prepared = prepare(
            config.data,
            "heldout",
            Renderer(load_tokenizer(folder)),
            Path(work) / "heldout",
        )
        yield Bench(config, model, folder, prepared, asked)


@contextlib.contextmanager
def tracked(config: "RunConfig", reference: str, out: Path | None, more: bool) -> Iterator[tuple[Path | None, Any]]:
    """Where results are written, and what logs them to MLflow when they are there.

    Measures beyond the held-out table are logged when the recipe, the environment or the local stack has a server;
    without ``out`` their files live as long as it takes to log them.
    """
    import tempfile

    from fathom.cli.measure_tracking import track_results
    from fathom.cli.measures import note
    from fathom.orchestrate.run import tracking_uri

    uri = tracking_uri(config) if more else None
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or (Path(scratch) if uri is not None else None)

        def log(results: dict[str, Any]) -> None:
            if uri is not None and folder is not None and results:
                page = track_results(config, uri, reference, results, folder)
                note(f"tracked: {page}" if page else f"MLflow at {uri} has not received the results")

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
