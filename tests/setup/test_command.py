"""The ``fathom`` command: fast to start, and every mistake is one message with a remedy."""

import errno
import importlib
import resource
import subprocess
import sys

import pytest

from fathom.cli import main as command
from fathom.errors import ConfigError, ResumeRefused

HEAVY = "{'torch', 'ray', 'mlflow', 'transformers', 'deepspeed', 'matplotlib', 'pyarrow', 'fastapi'}"


def fathom(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fathom", *arguments], capture_output=True, text=True)


def test_help_costs_less_than_a_second():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        assert fathom("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 3 < 1.0


def test_no_command_imports_a_heavy_package_before_it_runs():
    modules = sorted({entry.module for entry in command.COMMANDS.values()})
    code = f"import sys, {', '.join(modules)}; print({HEAVY} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("words", sorted(command.COMMANDS))
def test_every_command_exists_and_explains_itself(words, capsys):
    entry = command.COMMANDS[words]
    assert callable(getattr(importlib.import_module(entry.module), entry.function))
    with pytest.raises(SystemExit) as stop:
        command.main([*words.split(), "--help"])
    assert stop.value.code == 0
    assert f"fathom {words}" in capsys.readouterr().out


def test_version():
    assert fathom("--version").stdout.startswith("fathom 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainn"], "Did you mean 'train'"),
        (["up", "--ray-prot", "1"], "Possible options: --ray-port"),
        (["up", "--ray-port", "many"], "Invalid value for '--ray-port'"),
        (["config", "sho"], "Did you mean 'show'"),
    ],
)
def test_a_usage_error_names_the_nearest_word(arguments, message):
    done = fathom(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def failing(monkeypatch, error: BaseException) -> None:
    """Make ``fathom down`` raise."""

    def down() -> None:
        raise error

    monkeypatch.setattr("fathom.cli.stack.down", down)


@pytest.mark.parametrize(("kind", "code"), [(ConfigError, 2), (ResumeRefused, 3)])
def test_a_fault_prints_message_and_remedy_and_exits_with_its_code(monkeypatch, capsys, kind, code):
    failing(monkeypatch, kind("it is broken", "mend it"))
    with pytest.raises(SystemExit) as stop:
        command.main(["down"])
    assert stop.value.code == code
    output = capsys.readouterr()
    assert output.err == "error: it is broken\n  fix: mend it\n"
    assert output.out == ""


def test_a_full_disk_is_a_fault_and_not_a_defect(monkeypatch, capsys):
    failing(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    with pytest.raises(SystemExit) as stop:
        command.main(["down"])
    assert stop.value.code == 2
    assert "no space left on the device while writing /data/x" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(monkeypatch):
    failing(monkeypatch, ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        command.main(["down"])
