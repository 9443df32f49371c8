"""Tables on stdout: as wide as the terminal, and quiet when whoever reads them has enough."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table


class Output(Console):
    """A console on stdout."""

    def __init__(self, width: int) -> None:
        """`width` in characters, where stdout is no terminal."""
        super().__init__(width=None if sys.stdout.isatty() else width, highlight=False)

    def on_broken_pipe(self) -> None:
        """command.py ends the command; rich itself would exit with 1."""
        raise BrokenPipeError


def plain_table(title: str | None = None) -> Table:
    """No frame but a line under the head; the title at the left."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
