"""Progress on stderr: a live line on a terminal, otherwise one line every few seconds."""

import sys
import time
from typing import Any

QUIET_S = 5.0
"""Without a terminal, seconds between lines at least."""


class Progress:
    """Shows steps as they finish; use as a context manager.

    Args:
        total: steps of the run.
        done: steps that were done before (a resumed run), for the estimate of what is left.
        enabled: False on all ranks but one.
    """

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        self.total = total
        self.first = done
        self.enabled = enabled
        self.began = time.monotonic()
        self.last_line = float("-inf")
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> "Progress":
        if self.enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self.bar = Bar(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=self.total, completed=self.first)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, done: int, metrics: dict[str, float], committed: int) -> None:
        """Report that ``done`` steps of the run are finished, and ``committed`` of them safe."""
        if not self.enabled:
            return
        said = f"{describe(metrics)}  saved {committed}"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=said)
            return
        now = time.monotonic()
        if now - self.last_line >= QUIET_S or done in (self.first + 1, self.total):
            self.last_line = now
            left = (now - self.began) / max(done - self.first, 1) * (self.total - done)
            line = f"step {done}/{self.total}  {said}  {duration(left)} left"
            print(line, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line of its own, between steps."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def describe(metrics: dict[str, float]) -> str:
    """The few metrics worth a glance."""
    forms = (
        ("nll", "nll {:.4f}"),
        ("mean_depth", "depth {:.2f}"),
        ("learning_rate", "lr {:.1e}"),
        ("grad_norm", "norm {:.2f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("mfu", "mfu {:.0%}"),
        ("peak_memory_bytes", "{:.1f} GB"),
    )
    in_units = metrics | {name: value / 1e9 for name, value in metrics.items() if name.endswith("_bytes")}
    return "  ".join(form.format(in_units[name]) for name, form in forms if name in metrics)


def duration(seconds: float) -> str:
    """Seconds as ``42 s``, ``7 min`` or ``1 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
