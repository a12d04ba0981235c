"""``fathom claims``: train small models, and say of each claim of the papers whether it holds here."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fathom.claims.budget import Budget


def claims(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller models: under 10 minutes on two cores.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for claims.html and claims.json.")] = Path("claims"),
    data: Annotated[
        Path | None,
        typer.Option(help="Text file for the claims about text; default generated word problems.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    scale: Annotated[int, typer.Option(min=1, max=64, help="Models so many times as wide, steps as large.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="A claim by its name, may be repeated.", show_default=False)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=50, help="Seeds; default 3 if quick, else 5.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Train small models and judge the papers' claims by every seed.

    Writes a page that needs no other file, and its numbers as JSON. Without --quick it takes up to an hour on two
    cores.
    """
    import json
    import sys
    import tempfile
    import time

    from fathom.claims.catalogue import choose
    from fathom.claims.lab import run_claims
    from fathom.claims.report import write_report

    chosen = choose(only or [], quick)
    budget = make_budget(quick, data, device, scale, seeds)
    refuse_unwritable(out)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fathom-claims-") as work:
        results = run_claims(budget, chosen, Path(work), lambda line: print(line, file=sys.stderr, flush=True))
    seconds = time.perf_counter() - started
    page, numbers = write_report(results, describe(budget, data, seconds), out)
    if as_json:
        typer.echo(json.dumps({result.key: result.verdict for result in results} | {"report": str(numbers)}, indent=1))
        return
    for result in results:
        typer.echo(f"{result.verdict:<22}{result.title}")
    typer.echo(f"\n{page} ({seconds / 60:.1f} minutes)")


def make_budget(quick: bool, data: Path | None, device: str, scale: int, seeds: int | None) -> "Budget":
    """The budget of the options.

    Raises:
        ConfigError: a device that is none of ``cpu`` and ``cuda``, or not there.
        DataError: the text cannot be read, or is too short to hold any of it out.
    """
    from dataclasses import replace

    import torch

    from fathom.claims.budget import FULL, QUICK
    from fathom.errors import ConfigError, DataError

    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device: {device!r} is no device", "use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU", "use --device cpu, or install torch for your GPU")
    budget = (QUICK if quick else FULL).scaled(scale)
    source = None
    if data is not None:
        try:
            source = data.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--data {data}: {error}", "give a text file in UTF-8") from error
    budget = replace(budget, device=device, source=source, seeds=seeds or budget.seeds)
    assert budget.tasks  # made here, so that a text that is too short is refused before anything is trained
    return budget


def refuse_unwritable(out: Path) -> None:
    """Make the report's folder, before an hour of training whose numbers would have no place.

    Raises:
        StorageError: it is a file, or nobody may write there.
    """
    import tempfile

    from fathom.storage.local import refusals

    with refusals(str(out)):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()


def describe(budget: "Budget", data: Path | None, seconds: float) -> dict[str, str | int | float]:
    """What the report says about itself."""
    import os
    import platform

    import torch

    return {
        "budget": budget.name,
        "seeds": budget.seeds,
        "models": f"{budget.layers} layers of width {budget.width}; {budget.text_layers} layers for text",
        "tasks": f"{budget.tasks['chains'].name}; {budget.tasks['text'].name}",
        "text": str(data) if data is not None else "generated",
        "minutes": round(seconds / 60, 1),
        "machine": torch.cuda.get_device_name() if budget.device == "cuda" else f"{os.cpu_count()} cores",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
