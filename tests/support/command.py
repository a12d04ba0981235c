"""The ``fathom`` command in this process, and a recipe for the commands that read one."""

from pathlib import Path

import pytest
import yaml

from fathom.cli.main import main


def fathom(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def write_eval_recipe(folder: Path, base: Path, heldout: int) -> Path:
    """A TaH2 recipe ``tiny.yaml`` on ``base`` that scores so many generated conversations."""
    tree = {
        "name": "tiny",
        "model": {"base": str(base)},
        "method": {"preset": "tah2", "max_depth": 2},
        "data": {
            "train": "generated:word-problems",
            "heldout": "generated:word-problems:heldout",
            "context_tokens": 1024,
            "max_heldout_examples": heldout,
        },
        "train": {"steps": 1},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
