"""The progress bar of a list of prompts: samples done and tokens/s on stderr, or nothing."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """A context manager that counts; it draws only if `show`."""

    def __init__(self, total: int, show: bool) -> None:
        self._tokens, self._started = 0, time.perf_counter()
        self._bar = None
        if show:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def add_tokens(self, count: int) -> None:
        self._tokens += count
        if self._bar:
            rate = self._tokens / (time.perf_counter() - self._started)
            self._bar.update(self._task, description=f"{rate:.0f} tokens/s")

    def add_sample(self) -> None:
        if self._bar:
            self._bar.advance(self._task)
