"""The ``fathom`` command: a table of commands, each imported when it is asked for.

Importing torch, Ray, MLflow or transformers costs seconds, so this module imports none of them and neither may a
command module at its top level. A command is a plain function with typer annotations; its module is named in
:data:`COMMANDS`. Exit codes: 0 done, 2 usage or configuration, 3 refused resume, 1 any other failure.
"""

import errno
import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from fathom import __version__
from fathom.errors import FathomError, StorageError


class Entry(NamedTuple):
    """Where a command lives and the line that ``fathom --help`` shows for it."""

    module: str
    function: str
    help: str


COMMANDS: dict[str, Entry] = {
    "prepare": Entry("fathom.cli.prepare", "prepare", "Turn a recipe's conversations into token shards."),
    "train": Entry("fathom.cli.train", "train", "Train a recipe here, on one process or on Ray workers."),
    "submit": Entry("fathom.cli.jobs", "submit", "Send a recipe to a Ray cluster as a job and follow its log."),
    "status": Entry("fathom.cli.jobs", "status", "List the jobs of a cluster, or show one."),
    "stop": Entry("fathom.cli.jobs", "stop", "Stop a submitted job."),
    "eval": Entry("fathom.cli.evaluate", "evaluate", "Measure a model on held-out conversations."),
    "claims": Entry("fathom.cli.claims", "claims", "Train small models and judge the papers' claims by every seed."),
    "export": Entry("fathom.cli.export", "export", "Write a trained model as a Hugging Face folder."),
    "models": Entry("fathom.cli.models", "models", "List the registered models and their versions."),
    "deploy": Entry("fathom.cli.deploy", "deploy", "Serve a model behind an OpenAI-compatible endpoint."),
    "chat": Entry("fathom.cli.chat", "chat", "Talk to an endpoint; tokens are tinted by their depth."),
    "generate": Entry("fathom.cli.generate", "generate", "Answer one prompt, without a server."),
    "up": Entry("fathom.cli.stack", "up", "Start the local stack: Ray, MLflow, a folder as object store."),
    "down": Entry("fathom.cli.stack", "down", "Stop what `fathom up` started."),
    "tracking sync": Entry("fathom.cli.tracking", "sync", "Send a run's spooled events to MLflow."),
    "config show": Entry("fathom.cli.config", "show", "Print a recipe with every default resolved."),
    "doctor": Entry("fathom.cli.doctor", "doctor", "Check this machine: versions, devices, services, space."),
}

GROUPS: dict[str, str] = {
    "tracking": "Work with the local spool of tracking events.",
    "config": "Look at recipes.",
}


class LazyCommand(TyperCommand):
    """Stands for a command until it is invoked: shows its help line, imports nothing."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.help)
        self.entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and let it parse its own arguments."""
        function = getattr(importlib.import_module(self.entry.module), self.entry.function)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(self.name)(function)
        return typer.main.get_command(single).make_context(info_name, args, parent=parent, **extra)


class CommandTable(TyperGroup):
    """The root group, filled from :data:`COMMANDS`; a key of two words is a command of a group."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for words, entry in COMMANDS.items():
            group, _, name = words.rpartition(" ")
            parent = self.subgroup(group) if group else self
            parent.add_command(LazyCommand(name, entry))

    def subgroup(self, name: str) -> TyperGroup:
        """The group of that name, made on first use."""
        if name not in self.commands:
            self.add_command(TyperGroup(name=name, help=GROUPS[name], no_args_is_help=True))
        group = self.commands[name]
        assert isinstance(group, TyperGroup)
        return group


def print_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        typer.echo(f"fathom {__version__}")
        raise typer.Exit()


app = typer.Typer(cls=CommandTable, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Post-train, track and serve language models that think deeper on hard tokens."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; never returns normally.

    A :class:`FathomError` becomes its message and remedy on stderr and its exit code. Any other exception is a
    defect and keeps its traceback.
    """
    try:
        typer.main.get_command(app)(args=list(sys.argv[1:] if argv is None else argv), prog_name="fathom")
    except FathomError as error:
        fail(error)
    except OSError as error:
        where = f" while writing {error.filename}" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fail(StorageError(f"no space left on the device{where}", "free some space and run the same command again"))
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not error.filename:
            raise
        fail(StorageError(f"{error.filename}: {error.strerror}", "choose a place that you may read and write"))


def fail(error: FathomError) -> None:
    """Print an error for a person and leave with its exit code."""
    red, plain = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)
