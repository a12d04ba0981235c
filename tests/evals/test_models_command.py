"""``fathom models``: what the registry lists, as a table and as JSON."""

import json

import pytest

from fathom.tracking.registry import ModelSource
from support.command import fathom

VERSIONS = [
    ModelSource("smol", "2", "s3://b/models/smol/2", "ab" * 32, ("champion",), "r2"),
    ModelSource("smol", "1", "s3://b/models/smol/1", "cd" * 32),
    ModelSource("other", "1", "/store/other", "ef" * 32),
]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathom.tracking.registry.list_models", lambda tracking_uri=None: VERSIONS)


def test_a_line_for_each_version_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, text, _ = fathom(capsys, "models")
    assert code == 0 and len(text.splitlines()) == 4
    assert "smol   2        champion  abababababab  s3://b/models/smol/2" in text


def test_one_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = fathom(capsys, "models", "smol", "--json")
    assert [(entry["name"], entry["version"], entry["aliases"]) for entry in json.loads(text)] == [
        ("smol", "2", ["champion"]),
        ("smol", "1", []),
    ]


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, errors = fathom(capsys, "models", "smoll")
    assert (code, text) == (2, "") and "other, smol" in errors and "Traceback" not in errors


def test_an_empty_registry_says_how_to_fill_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fathom.tracking.registry.list_models", lambda tracking_uri=None: [])
    code, text, errors = fathom(capsys, "models")
    assert (code, text) == (0, "") and "tracking.register_as" in errors
    assert fathom(capsys, "models", "--json")[1].strip() == "[]"
