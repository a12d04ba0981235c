"""YAML as people mean it: ``1e-4`` is a number, ``no`` and ``2024-01-01`` are strings, a key occurs once.

PyYAML follows YAML 1.1, which reads ``1e-4`` as a string, ``on`` as true, ``010`` as 8 and ``1:30`` as 90.
The loader here is PyYAML's safe one with the scalars of YAML 1.2's core schema.
"""

import re
from typing import Any

import yaml

from fathom.errors import ConfigError

SCALARS = {
    "tag:yaml.org,2002:null": (r"null|Null|NULL|~|", "nN~"),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?((([0-9][0-9_]*)(\.[0-9_]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
}


class CoreLoader(yaml.SafeLoader):
    """The safe loader with YAML 1.2 scalars; knows no tags beyond the standard ones."""


CoreLoader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in SCALARS.items():
    _starts = [*_first, ""] if _tag.endswith("null") else list(_first)
    CoreLoader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _starts)


def read_yaml(text: str, where: str) -> tuple[Any, dict[str, str]]:
    """Parse one document.

    Args:
        text: the document.
        where: what to call it in messages, a path.

    Returns:
        The value, and for every key its dotted path mapped to ``where:line``.

    Raises:
        ConfigError: not YAML, or a key written twice.
    """
    loader = CoreLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[str, str] = {}
        _collect_lines(node, where, "", lines)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{place}: not valid YAML: {problem}", "correct the syntax at that line") from error
    finally:
        loader.dispose()


def _collect_lines(node: yaml.Node, where: str, prefix: str, lines: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        place = f"{where}:{key.start_mark.line + 1}"
        if name in lines:
            raise ConfigError(f"{place}: '{name}' is set twice, first at {lines[name]}", "keep one of the two")
        lines[name] = place
        _collect_lines(value, where, f"{name}.", lines)
