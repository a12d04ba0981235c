"""``fathom eval``: held-out likelihood and depths of a model on a recipe's held-out conversations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fathom.config.schema import RunConfig
    from fathom.evals.heldout import HeldoutReport


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
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value, may be repeated.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure a model on held-out conversations."""
    from fathom.config.load import load_recipe

    chosen = list(overrides or [])
    if max_examples is not None:
        chosen.append(f"data.max_heldout_examples={max_examples}")
    config = load_recipe(recipe, chosen)
    report = score(config, model or config.model.base, step_zero)
    if as_json:
        import json

        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        print_report(report)


def score(config: "RunConfig", reference: str, step_zero: bool = False) -> "HeldoutReport":
    """Score a model on a recipe's held-out data.

    Args:
        config: its ``data`` says what is scored; with ``step_zero``, its ``method`` and ``seed`` convert the model.
        reference: what ``fathom deploy`` takes, or a recipe's ``model.base``.

    Raises:
        ConfigError: the recipe has no held-out data.
    """
    import tempfile

    from fathom.data.prepared import prepare
    from fathom.data.template import Renderer
    from fathom.errors import ConfigError
    from fathom.evals.heldout import heldout_nll
    from fathom.model.folder import load_model, load_tokenizer
    from fathom_serve.deploy.source import local_folder, resolve

    if config.data.heldout is None:
        raise ConfigError(
            "data.heldout is not set: there is nothing to score on",
            "name held-out data in the recipe",
        )
    folder = local_folder(resolve(reference, config.tracking.uri))
    model = load_model(folder, config.method if step_zero else None, seed=config.seed)
    with tempfile.TemporaryDirectory() as work:
        prepared = prepare(
            config.data,
            "heldout",
            Renderer(load_tokenizer(folder)),
            Path(work) / "heldout",
        )
        return heldout_nll(
            model,
            prepared,
            tokens_per_forward=config.train.micro_batch_tokens,
            head_chunk_rows=config.train.head_chunk_rows,
        )


def print_report(report: "HeldoutReport") -> None:
    """A short table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row(
        "held-out NLL",
        f"{report.nll:.4f} nats per token (perplexity {report.perplexity:.2f})",
    )
    table.add_row("mean depth", f"{report.mean_depth:.3f} (prompt {report.prompt_mean_depth:.3f})")
    for depth, share in report.share_continuing.items():
        table.add_row(f"continuing at depth {depth}", f"{share:.1%}")
    for depth, (before, after) in report.nll_depth_pairs.items():
        table.add_row(
            f"tokens that ran depth {depth}",
            f"NLL {before:.4f} at depth {depth - 1}, {after:.4f} at depth {depth}",
        )
    rate = report.supervised_tokens / report.seconds if report.seconds else 0.0
    table.add_row(
        "scored",
        f"{report.supervised_tokens:,} tokens of {report.documents:,} conversations, {rate:,.0f} tokens/s",
    )
    Console().print(table)
