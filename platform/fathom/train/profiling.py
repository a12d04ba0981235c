"""A trace of some steps by torch's profiler, for chrome://tracing or Perfetto."""

import sys
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from fathom.errors import FathomError
from fathom.storage import files
from fathom.train.place import Place

PROFILE = "profile"
"""Folder of the run's storage for traces."""


def profiler(place: Place, rank: int, window: tuple[int, int] | None, done: int) -> Callable[[int], None]:
    """A function to call with the number of each finished step, which profiles those of the window.

    The trace goes to ``profile/`` in the run's storage. A run that resumes inside the window leaves it out.

    Args:
        place: the run's.
        rank: of this worker; each leaves a trace of its own.
        window: first and last step, from 1; None profiles nothing.
        done: steps that were done before.
    """
    if window is None:
        return lambda step: None
    first, last = window
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    tracing: list[profile] = []

    def finished(step: int) -> None:
        if step == first - 1:
            tracing.append(profile(activities=activities))
            tracing[0].start()
        if step == last and tracing:
            trace = tracing.pop()
            trace.stop()
            path = place.work / PROFILE / f"steps-{first}-{last}-rank-{rank:05d}.json.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
            try:
                files.write_bytes(files.join(place.uri, PROFILE, path.name), path.read_bytes())
            except FathomError as error:  # no reason to end a run that is well
                print(f"the trace is only in {path}: {error.message}", file=sys.stderr, flush=True)

    finished(done)
    return finished
