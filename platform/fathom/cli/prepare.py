"""``fathom prepare``: conversations to token shards, with every dropped row accounted for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fathom.data.prepared import Prepared


def prepare(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Folder for the shards, one subfolder a split.")],
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, the value as YAML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Turn a recipe's conversations into token shards.

    A folder that already holds the same data is used as it is.
    """
    import json

    from fathom.config.load import load_recipe
    from fathom.data.prepared import prepare as prepare_split
    from fathom.data.template import Renderer
    from fathom.model.folder import load_tokenizer
    from fathom.model.hub import resolve_base

    cfg = load_recipe(recipe, override or [])
    renderer = Renderer(load_tokenizer(resolve_base(cfg.model.base)), cfg.data.chat_format)
    made = {"train": prepare_split(cfg.data, "train", renderer, out / "train")}
    if cfg.data.heldout is not None:
        made["heldout"] = prepare_split(cfg.data, "heldout", renderer, out / "heldout")
    if as_json:
        print(json.dumps({split: {**data.counts, "digest": data.digest} for split, data in made.items()}, indent=1))
        return
    for split, data in made.items():
        print(summary(split, data))


def summary(split: str, data: "Prepared") -> str:
    """What a split kept and dropped, in two or three lines."""
    counts = data.counts
    lines = [
        f"{split}: {counts['documents']:,} of {counts['rows']:,} conversations, {counts['tokens']:,} tokens "
        f"({counts['supervised_tokens']:,} supervised), longest {int(data.lengths.max()):,}",
        f"  {data.folder}  sha256 {data.digest[:16]}",
    ]
    if data.labelled:
        share = counts["deep_tokens"] / counts["supervised_tokens"]
        lines.append(f"  labelled: {counts['deep_tokens']:,} tokens go to depth 2 ({share:.1%} of the supervised ones)")
    if counts["dropped"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts["dropped"].items())
        lost = counts["dropped_supervised_tokens"]
        lines.append(f"  dropped: {reasons} ({lost:,} supervised tokens lost)")
    return "\n".join(lines)
