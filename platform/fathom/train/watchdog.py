"""A worker that hangs says where it stands, then ends, so that the run is tried again.

Nothing else would end it: a collective that another worker never enters waits for its group's timeout, half an hour.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from fathom.errors import FathomError
from fathom.storage import files
from fathom.train.place import Place

HANGS = "hangs"
"""Folder of the run's storage for what hanging workers said."""
STORE_S = 30.0
"""How long a worker tries to store it: the store may be what it hangs on."""


@contextlib.contextmanager
def watched(place: Place, rank: int, timeout_s: float) -> Iterator[Callable[[], None]]:
    """A function to call whenever something is finished; too long a silence ends the process.

    The stacks of all threads go to stderr and to ``hangs/`` in the run's storage before.

    Args:
        place: the run's.
        rank: of this worker.
        timeout_s: longest silence; 0 watches nothing.
    """
    heard, over = [time.monotonic()], threading.Event()

    def alive() -> None:
        heard[0] = time.monotonic()

    def watch() -> None:
        while not over.wait(min(timeout_s / 4, 1.0)):
            if time.monotonic() - heard[0] > timeout_s:
                report(place, rank, timeout_s)
                os._exit(1)  # no exception reaches a thread that waits in a collective

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    if timeout_s:
        thread.start()
    try:
        yield alive
    finally:
        over.set()
        if timeout_s:
            thread.join()  # it may be reporting already


def report(place: Place, rank: int, timeout_s: float) -> None:
    """Write all threads' stacks to stderr and to the run's storage."""
    folder = place.work / HANGS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-rank-{rank:05d}.txt"
    with open(path, "w", encoding="utf-8") as file:
        print(
            f"worker {rank} hangs: no step, checkpoint or evaluation was finished in {timeout_s:g} s "
            "(train.hang_timeout_s). Its threads, innermost call first:",
            file=file,
            flush=True,
        )
        faulthandler.dump_traceback(file, all_threads=True)
    said = path.read_bytes()
    print(said.decode(errors="replace"), file=sys.stderr, flush=True)

    def store() -> None:
        where = files.join(place.uri, HANGS, path.name)
        try:
            files.write_bytes(where, said)
        except FathomError as error:
            print(f"it is only in {path}: {error.message}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=store, daemon=True)
    thread.start()
    thread.join(STORE_S)
