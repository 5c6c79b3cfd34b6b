"""Progress of long work on a stream, by default stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

INTERVAL = 5.0
"""Seconds between lines where the stream is not a terminal."""


class Reporter:
    """Called as `report(what, done, total)`: a live bar on a terminal, else a line at intervals.

    Use as a context manager: leaving it takes the bar down.
    """

    def __init__(self, stream: IO[str] | None = None, *, interval: float = INTERVAL) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.interval = interval
        self._last = time.monotonic() - interval
        self._bar: Progress | None = None
        if self.stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(file=self.stream),
                transient=True,
            )
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=what, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._last >= self.interval:
            self._last = now
            self.say(f"[{done}/{total}] {what}")

    def say(self, line: str) -> None:
        """One line, at once."""
        if self._bar is not None:
            self._bar.update(self._task, description=line)
        else:
            print(line, file=self.stream, flush=True)
