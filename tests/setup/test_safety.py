"""Nothing in the product runs code from data, hands a string to a shell, or listens beyond loopback."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for top in ("platform", "serving", "jobs") for path in (ROOT / top).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"torch.load", "torch.save", "pandas.read_pickle", "eval", "exec", "os.system", "yaml.unsafe_load"}
PUBLIC = {"0.0.0.0", "::", "[::]"}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield str(node.module)
            yield from (alias.name for alias in node.names if f"{node.module}.{alias.name}" in CALLS)
        elif isinstance(node, ast.Call):
            if dotted(node.func) in CALLS:
                yield dotted(node.func)
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in ("shell", "allow_pickle") and value is not False:
                    yield str(keyword.arg)
        elif isinstance(node, ast.Constant) and node.value in PUBLIC:
            yield f"binds {node.value}"
        if isinstance(node, ast.keyword | ast.Constant) and "trust_remote_code" in (
            str(getattr(node, "arg", "")),
            getattr(node, "value", ""),
        ):
            yield "trust_remote_code"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_is_safe(path):
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x', weights_only=True)",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "serve.start(host='0.0.0.0')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "eval('1')",
    ],
)
def test_the_check_finds(source):
    assert list(faults(source))


@pytest.mark.parametrize("path", sorted((ROOT / "infra").rglob("*")), ids=lambda path: path.name)
def test_infrastructure_listens_on_no_public_address(path):
    if path.is_file():
        assert "0.0.0.0" not in path.read_text()
