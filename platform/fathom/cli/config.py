"""``fathom config show``: a recipe with every default written out."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def show(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).", show_default=False)],
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, the value as YAML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print a recipe with its base, overrides and every default resolved; its digest goes to stderr."""
    import json

    import yaml

    from fathom.config.load import config_dict, config_digest, load_recipe
    from fathom.model.fit import checked_method

    cfg = load_recipe(recipe, override or [])
    checked_method(cfg.method)  # refuses an unknown name
    tree = config_dict(cfg)
    if as_json:
        print(json.dumps({"config": tree, "digest": config_digest(cfg)}, indent=1))
        return
    print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), end="")
    print(f"digest {config_digest(cfg)}", file=sys.stderr)
