"""``fathom prepare``: conversations to token shards, with every dropped row accounted for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fathom.cli.sample import print_sample, sample

if TYPE_CHECKING:
    from fathom.data.prepared import Prepared


def prepare(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Folder for the shards, one subfolder a split.")],
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, the value as YAML.")] = None,
    show: Annotated[
        int, typer.Option(min=0, help="Print so many conversations as they are trained on, supervised tokens marked.")
    ] = 0,
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Work on files side by side on a Ray cluster whose machines all see --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Turn a recipe's conversations into token shards.

    A folder that already holds the same data is used as it is.
    """
    import json

    from fathom.config.load import load_recipe
    from fathom.data.prepared import Split
    from fathom.data.prepared import prepare as prepare_split
    from fathom.data.template import Renderer
    from fathom.model.folder import load_tokenizer
    from fathom.model.hub import resolve_base
    from fathom.orchestrate.prepare_job import each_on_ray

    cfg = load_recipe(recipe, override or [])
    renderer = Renderer(load_tokenizer(resolve_base(cfg.model.base)), cfg.data.chat_format)
    splits: list[Split] = ["train", "heldout"] if cfg.data.heldout is not None else ["train"]
    each = each_on_ray if on_ray else map
    made = {split: prepare_split(cfg.data, split, renderer, out / split, each) for split in splits}
    shown = {split: sample(data, show, renderer.tokenizer) for split, data in made.items()}
    if as_json:
        report = {split: {**data.counts, "digest": data.digest} for split, data in made.items()}
        for split, documents in shown.items():
            report[split] |= {"shown": [each._asdict() for each in documents]} if show else {}
        print(json.dumps(report, indent=1))
        return
    for split, data in made.items():
        print(summary(split, data))
        print_sample(shown[split])


def summary(split: str, data: "Prepared") -> str:
    """What a split kept and dropped, in two or three lines."""
    counts = data.counts
    lines = [
        f"{split}: {counts['documents']:,} of {counts['rows']:,} conversations, {counts['tokens']:,} tokens "
        f"({counts['supervised_tokens']:,} supervised), longest {int(data.lengths.max()):,}",
        f"  {data.folder}  sha256 {data.digest[:16]}",
    ]
    for each in counts.get("sources", []):
        lines.append(f"  {each['source']}: {each['documents']:,} conversations, {each['tokens']:,} tokens")
    if data.labelled:
        share = counts["deep_tokens"] / counts["supervised_tokens"]
        lines.append(f"  labelled: {counts['deep_tokens']:,} tokens go deeper ({share:.1%} of the supervised ones)")
    if counts["dropped"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts["dropped"].items())
        lost = counts["dropped_supervised_tokens"]
        lines.append(f"  dropped: {reasons} ({lost:,} supervised tokens lost)")
    if "evaluation" in counts:
        seen = counts["evaluation"]
        short = f", {seen['short_messages']:,} of its messages too short to match" if seen["short_messages"] else ""
        lines.append(f"  compared with {seen['ngrams']:,} runs of words in {seen['rows']:,} evaluation rows{short}")
    return "\n".join(lines)
