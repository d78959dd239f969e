"""What a person sees while a run goes on: phase, rate and time left."""

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """A bar for one stage; where there is no terminal, a line every few seconds."""

    def __init__(self, stage: str, *, total: int, done: int = 0, unit: str = "steps"):
        self._stage, self._total, self._unit = stage, total, unit
        self._start, self._first = time.monotonic(), done
        self._last_line = 0.0
        self._console = Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]:<10} {task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(
            stage, total=total, completed=done, phase="", rate="", figures=""
        )

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._bar.stop()

    def phase(self, name: str) -> None:
        self._bar.update(self._task, phase=name)

    def advance(self, done: int, **figures: float) -> None:
        """`done` units are done in all; `figures` are shown beside the bar."""
        seconds = time.monotonic() - self._start
        rate = (done - self._first) / max(seconds, 1e-9)
        shown = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
        self._bar.update(
            self._task,
            completed=done,
            rate=f"{rate:.2f} {self._unit}/s",
            figures=shown,
        )
        if self._console.is_terminal:
            return
        now = time.monotonic()
        if now - self._last_line > 10 or done == self._total:
            self._last_line = now
            left = (self._total - done) / max(rate, 1e-9)
            print(
                f"{self._stage}: {done}/{self._total} {self._unit}, {rate:.2f}/s, "
                f"{left:.0f} s left  {shown}",
                file=sys.stderr,
                flush=True,
            )
