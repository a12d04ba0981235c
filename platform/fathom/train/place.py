"""Where a run keeps its files, and how it is asked to stop."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fathom.errors import StorageError
from fathom.storage import files

CHECKPOINTS, REFUSED, STOP = "checkpoints", "refused", "STOP"
LOOK_EVERY_S = 1.0
"""Between two looks for the object ``STOP``; a thread looks, so that a store that is away does not hold up steps."""


class Place(NamedTuple):
    """Where a run keeps its files.

    Attributes:
        uri: in storage, the same for all workers: checkpoints, results; an object ``STOP`` asks the run to stop.
        work: on this machine's disk; nothing in it is needed to resume.
        allow_change: configuration keys in which a checkpoint to resume from may differ.
    """

    uri: str
    work: Path
    allow_change: list[str]


@contextlib.contextmanager
def stop_requests(place: Place, rank: int) -> Iterator[Callable[[], bool]]:
    """A function that says whether this worker was asked to stop: by ctrl-C, SIGTERM, or the object ``STOP``.

    The first signal lets the step finish and commits a checkpoint; the second one ends the process at once.
    """
    asked = threading.Event()
    before: dict[int, Any] = {}

    def ask(number: int, _: object) -> None:
        asked.set()
        signal.signal(number, before[number])
        print("finishing this step, then committing; once more to end at once", file=sys.stderr, flush=True)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    note, over = files.join(place.uri, STOP), threading.Event()

    def look() -> None:
        with contextlib.suppress(StorageError):  # a hiccup of the store must not end a run that is well
            if files.exists(note):
                asked.set()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            look()

    if rank == 0:
        look()
        threading.Thread(target=watch, name="stop", daemon=True).start()
    try:
        yield asked.is_set
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
