"""Recipes become a :class:`RunConfig`: a YAML file, at most one ``base:``, and overrides."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fathom.config.schema import ONE, SEVERAL, RunConfig, SourceConfig
from fathom.config.yaml12 import read_yaml
from fathom.errors import ConfigError


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, merge it over its base, apply overrides, validate.

    Args:
        path: a YAML file; its ``base:`` (relative to the file) is read first and may not have a base itself.
        overrides: ``section.key=value``, the value read as YAML; later ones win.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; names its place and the nearest
        name.
    """
    tree, places = _read_mapping(Path(path))
    if "base" in tree:
        tree, places = _with_base(Path(path), tree, places)
    for override in overrides:
        _apply_override(tree, places, override)
    return parse_config(tree, places)


def parse_config(tree: dict[str, Any], places: dict[str, str] | None = None) -> RunConfig:
    """Validate a tree of plain values.

    Args:
        tree: nested dictionaries, as from :func:`config_dict`.
        places: where each dotted key was written, for messages.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = [_explain(detail, places or {}) for detail in error.errors()]
        message = "\n".join(fault for fault, _ in faults)
        remedies = dict.fromkeys(remedy for _, remedy in faults if remedy)
        raise ConfigError(message, "; ".join(remedies)) from error


def config_dict(cfg: RunConfig) -> dict[str, Any]:
    """The resolved configuration, every default written out, as plain JSON values."""
    return cfg.model_dump(mode="json")


def config_digest(cfg: RunConfig) -> str:
    """sha256 (hex) of the resolved configuration as canonical JSON; every key takes part."""
    canonical = json.dumps(config_dict(cfg), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Dotted keys whose values differ, sorted; a key that only one side has counts as changed."""
    absent = object()
    before, after = dict(_flatten(old)), dict(_flatten(new))
    return sorted(key for key in before | after if before.get(key, absent) != after.get(key, absent))


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_mapping(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"cannot read recipe {path}: {reason}", "give the path of a recipe (YAML)") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", "give the path of a recipe (YAML)") from error
    tree, places = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a mapping of sections", "a recipe has keys like name, model, data, train")
    return tree, places


def _with_base(path: Path, tree: dict[str, Any], places: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The base's tree with this recipe's merged over it."""
    name = tree.pop("base")
    if not isinstance(name, str):
        raise ConfigError(f"{places['base']}: base must be the path of one recipe", "write base: other.yaml")
    base, base_places = _read_mapping(path.parent / name)
    if "base" in base:
        raise ConfigError(
            f"{base_places['base']}: {name} is the base of {path.name} and has a base itself",
            "a recipe has at most one level of base: merge the two lower ones",
        )
    return _merge(base, tree), base_places | places


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _apply_override(tree: dict[str, Any], places: dict[str, str], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    place = f"--set {override}"
    if not equals or not all(parts):
        raise ConfigError(f"{place}: not section.key=value", "for example --set optimizer.learning_rate=1e-4")
    value, _ = read_yaml(text, place)
    section = tree
    for depth, part in enumerate(parts[:-1], start=1):
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ConfigError(f"{place}: '{'.'.join(parts[:depth])}' is not a section", _nearest(key, _all_keys()))
    section[parts[-1]] = value
    places[".".join(parts)] = place


def _explain(detail: ErrorDetails, places: dict[str, str]) -> tuple[str, str]:
    """(what is wrong and where, what to do) for one of pydantic's findings."""
    path = [str(part) for part in detail["loc"] if part not in (ONE, SEVERAL)]
    key = ".".join(path)
    place = places.get(key)
    start = f"{place}: " if place else ""
    if detail["type"] == "extra_forbidden":
        listed = any(part.isdigit() for part in path)
        names = ", ".join(SourceConfig.model_fields)
        return f"{start}unknown key '{key}'", f"valid names: {names}" if listed else _nearest(key, _all_keys())
    if detail["type"] == "missing":
        return f"'{key}' is missing", f"set {key}"
    if detail["type"] == "value_error":
        return detail["msg"].removeprefix("Value error, "), ""
    value = detail["input"]
    found = f"{start}{key} is {json.dumps(value, default=str)}: {_plain(detail)}"
    if detail["type"] == "literal_error":
        choices = _choices(path)
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        return found, f"choose one of {', '.join(choices)}{hint}"
    return found, f"correct {key}"


def _plain(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Input ")
    if detail["type"] == "model_type":
        return "should be a section (key: value lines)"
    if detail["type"] == "tuple_type":
        return "should be a list"
    return message[0].lower() + message[1:]


def _nearest(key: str, names: list[str]) -> str:
    """A remedy naming the valid name closest to what was written."""
    section, _, leaf = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == section}
    anywhere = {name.rpartition(".")[2]: name for name in names}
    for candidates, cutoff in ((beside, 0.6), (anywhere, 0.75), (beside, 0.3)):
        found = difflib.get_close_matches(leaf, list(candidates), n=1, cutoff=cutoff)
        if found:
            return f"did you mean '{candidates[found[0]]}'?"
    return f"valid names{f' in {section}' if section else ''}: {', '.join(beside or anywhere)}"


def _all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _choices(path: list[str]) -> list[str]:
    """The values of the Literal field at a path."""
    model: Any = RunConfig
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    return [str(choice) for choice in model.model_fields[path[-1]].annotation.__args__]
