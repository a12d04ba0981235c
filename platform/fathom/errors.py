"""Errors that a person can act on: what was wrong, where, and what to do.

Everything raised on purpose derives from :class:`FathomError`. The command line prints the message and
the remedy without a traceback and exits with ``exit_code``; anything else is a defect and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: the nearest known one, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names)}"


class FathomError(Exception):
    """A fault with a remedy.

    Args:
        message: what was wrong and where (a file and line, a configuration key, an address).
        remedy: what to do about it, one sentence.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.remedy}" if self.remedy else self.message


class ConfigError(FathomError):
    """A recipe, an override or a command-line argument is wrong."""

    exit_code = 2


class DataError(FathomError):
    """A data set cannot be read, or holds nothing to learn from."""

    exit_code = 2


class ModelError(FathomError):
    """A model cannot be found, read, or is of an unknown architecture."""

    exit_code = 2


class StorageError(FathomError):
    """An object store or a disk refused: unreachable, no permission, no space."""

    exit_code = 2


class StorageUnavailable(StorageError):
    """An object store did not answer, or asked to come back later: the same request may succeed soon."""


class CheckpointError(FathomError):
    """A checkpoint is damaged: its bytes do not match its manifest."""

    exit_code = 2


class ServiceError(FathomError):
    """A service does not answer, or its port is taken: Ray, MLflow, an endpoint."""

    exit_code = 2


class ResumeRefused(FathomError):
    """A run may not continue from this checkpoint because its configuration changed."""

    exit_code = 3
