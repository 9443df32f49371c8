"""The progress bar of a list of prompts: samples done and tokens/s on stderr, or nothing."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """A context manager that counts.

    use_tqdm  whether to draw; None: if stderr is a terminal; or what makes a bar as tqdm does: it is called with
              `total` and `desc`, and its `update`, `set_postfix_str` and `close` are
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any] | None) -> None:
        self._tokens, self._started = 0, time.perf_counter()
        self._bar: Bar | None = None
        self._tqdm: Any = None
        if callable(use_tqdm):
            self._tqdm = use_tqdm(total=total, desc="Processed prompts")
        elif sys.stderr.isatty() if use_tqdm is None else use_tqdm:
            from rich.console import Console  # here: a third of what a start imports beside torch
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Drawn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Drawn(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        if self._tqdm is not None:
            self._tqdm.close()

    def add_tokens(self, count: int) -> None:
        self._tokens += count
        rate = f"{self._tokens / (time.perf_counter() - self._started):.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, description=rate)
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(rate, refresh=False)

    def add_sample(self) -> None:
        if self._bar:
            self._bar.advance(self._task)
        if self._tqdm is not None:
            self._tqdm.update(1)
