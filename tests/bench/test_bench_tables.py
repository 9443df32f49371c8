"""Tables of commands are whole, in a terminal of 80 columns as in a pipe: no number loses a digit."""

import pytest
from rich.table import Table

from kog_triton import plan
from kog_triton.bench import show
from kog_triton.bench.record import SCHEMA, read_all, record_files
from kog_triton.cli.console import Output, plain_table
from tests import ROOT

FILES = record_files(ROOT / "benchmarks" / "results")
RECORDS = [record for f in FILES for record in read_all(f) if record["schema"] == SCHEMA]


@pytest.fixture
def shown(monkeypatch):
    """Every table that is written, as (title, rows of cells), in order."""
    tables = []
    write = Output.write_table

    def noted(self, table):
        columns = [[str(c.header), *c.cells] for c in table.columns]
        tables.append((table.title, list(zip(*columns, strict=True))))
        write(self, table)

    monkeypatch.setattr(Output, "write_table", noted)
    return tables


@pytest.fixture(params=["", "80"], ids=["pipe", "80"])
def width(request, monkeypatch):
    """Columns of the terminal; 0 for a pipe."""
    monkeypatch.setenv("COLUMNS", request.param)
    return int(request.param or 0)


def check(text, tables, width):
    """Every cell of every row stands in the text, in its order; no line of a table is too wide or ends in blanks."""
    assert tables and "…" not in text and "..." not in text.replace("...]", "")
    lines = text.splitlines()
    for title, rows in tables:
        assert str(title) in lines
        for row in rows:
            wanted = [word for cell in row[1:] for word in cell.split()]
            said = [
                word
                for line in lines
                if line.startswith(f" {row[0]} ") or line.strip() == row[0]
                for word in line.split()
            ]
            assert [w for w in wanted if w not in said] == [], row
    ruled = [line for line in lines if set(line.strip()) & set("─-") == set(line.strip()) and line]
    assert len(ruled) >= len(tables)
    assert not [line for line in lines if line.endswith(" ")]
    assert not width or max(map(len, ruled)) <= width


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: f"{r['created']}-{r['kind']}")
def test_every_kept_record_renders_whole(record, shown, width, capsys):
    show.show(record)
    check(capsys.readouterr().out, shown, width)


@pytest.mark.parametrize("device", ["h200", "mi300x"])
def test_a_plan_renders_whole(device, shown, width, capsys):
    assert plan.main(["--shape", "llama-3.2-1b", "--device", device]) == 0
    check(capsys.readouterr().out, shown, width)


def test_the_records_are_found():
    assert len(RECORDS) > 30


def test_a_wide_table_comes_in_parts_with_the_first_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    table = plain_table(["name", "first", "second", "a column wider than all"], "a title of more than twenty columns")
    table.add_row("one", "1,234.5", "2.25", "3")
    Output().write_table(table)
    lines = [line for line in capsys.readouterr().out.splitlines() if line and "─" not in line]
    assert [line.split() for line in lines[1:]] == [
        ["name", "first"], ["one", "1,234.5"], ["name", "second"], ["one", "2.25"],
        ["name", "a", "column", "wider", "than", "all"], ["one", "3"],
    ]  # fmt: skip
    assert isinstance(table, Table) and lines[0] == "a title of more than twenty columns"
