"""Tables on stdout: as wide as the terminal, and quiet when whoever reads them has enough."""

import sys
from collections.abc import Sequence

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


def plain_table(names: Sequence[str], title: str | None = None, wrap: bool = False) -> Table:
    """No frame but a line under the head; title and first column at the left, the other columns at the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=not wrap)
    return table
