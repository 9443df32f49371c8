"""Tables on stdout: whole at every width, and quiet when whoever reads them has enough."""

import os
import sys
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kog_triton.errors import printable

UNBOUNDED = 100_000  # characters a line, where nobody says how many there are


class Output(Console):
    """A console on stdout, as wide as the terminal or COLUMNS say; a file or a pipe gets lines of any length."""

    def __init__(self) -> None:
        said = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
        super().__init__(width=None if said else UNBOUNDED, highlight=False)

    def on_broken_pipe(self) -> None:
        """command.py ends the command; rich itself would exit with 1."""
        raise BrokenPipeError

    def write_line(self, text: str) -> None:
        """One line; the terminal itself wraps it."""
        self.print(Text(printable(text, keep="\n")), soft_wrap=True)

    def write_table(self, table: Table) -> None:
        """A table whole: one that is too wide comes as several, each with the first column."""
        if table.title is not None:
            self.write_line(str(table.title))
        for part, width in self._parts(table):
            wide = Console(file=self.file, width=max(width, self.width), highlight=False)
            with wide.capture() as capture:
                wide.print(part)
            lines = (line.rstrip() for line in capture.get().splitlines())
            self.file.write("\n".join(lines) + "\n")

    def _parts(self, table: Table) -> Iterator[tuple[Table, int]]:
        """The table in pieces that fit, and how wide each is; a single column may be too wide."""
        columns = range(len(table.columns))
        shown = list(columns[:1])
        for column in columns[1:]:
            if len(shown) > 1 and self._needed(table, [*shown, column]) > self.width:
                yield _some_columns(table, shown), self._needed(table, shown)
                shown = [0]
            shown.append(column)
        yield _some_columns(table, shown), self._needed(table, shown)

    def _needed(self, table: Table, columns: Sequence[int]) -> int:
        options = self.options.update(max_width=UNBOUNDED)
        return Measurement.get(self, options, _some_columns(table, columns)).maximum


def _some_columns(table: Table, columns: Sequence[int]) -> Table:
    some = plain_table([str(table.columns[c].header) for c in columns])
    rows = zip(*(table.columns[c].cells for c in columns), strict=True)
    for row in rows:
        some.add_row(*(Text(printable(str(cell))) for cell in row))
    return some


def plain_table(names: Sequence[str], title: str | None = None) -> Table:
    """No frame but a line under the head; title and first column at the left, the other columns at the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        justify = "right" if table.columns else "left"
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table
