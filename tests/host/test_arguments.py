"""What the commands' command lines share: usage errors of one line, numbers in range, files to write."""

import argparse
from importlib import import_module

import pytest

from kog_triton.__main__ import commands
from kog_triton.cli.arguments import check_output, not_negative, positive, share
from kog_triton.errors import RequestError


@pytest.mark.parametrize("name", commands())
def test_a_wrong_usage_is_one_line_that_says_where_help_is(name, capsys):
    needed = {"bench": ["decode"], "quantize": ["--model", "m", "--out", "o", "--format", "fp8-block"]}
    with pytest.raises(SystemExit) as end:
        import_module(f"kog_triton.{name}").main([*needed.get(name, []), "--no-such-option"])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("error: ") and "--no-such-option" in err
    assert f"(see kog {name}" in err and err.endswith(" --help)\n")


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (positive, "0", "0 is below 1"),
        (positive, "-3", "-3 is below 1"),
        (positive, "x", "'x' is no whole number"),
        (positive, "1.5", "'1.5' is no whole number"),
        (not_negative, "-0.1", "-0.1 is no number from 0 on"),
        (not_negative, "nan", "nan is no number from 0 on"),
        (not_negative, "inf", "inf is no number from 0 on"),
        (not_negative, "", "'' is no number"),
        (share, "0", "0 is not above 0 and at most 1"),
        (share, "1.01", "1.01 is not above 0 and at most 1"),
    ],
)
def test_numbers_out_of_range(kind, text, says):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        kind(text)
    assert str(error.value) == says


def test_numbers_in_range():
    assert positive("17") == 17 and not_negative("0") == 0 and not_negative("1e3") == 1000
    assert share("1") == 1 and share("0.01") == 0.01


def test_where_a_file_can_be_written(tmp_path, monkeypatch):
    check_output("--json", tmp_path / "new.json")
    (tmp_path / "old.json").write_text("{}")
    check_output("--json", tmp_path / "old.json")
    # what was there stays, and nothing is left of what was tried
    assert [f.name for f in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "{}"
    for file, says in (
        (tmp_path, "Is a directory: name a file in it"),
        (tmp_path / "none" / "x.json", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path / "old.json" / "x.json", f"there is no folder {tmp_path / 'old.json'}"),
    ):
        with pytest.raises(RequestError) as error:
            check_output("--json", file)
        assert str(error.value) == f"--json {file}: {says}"
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "old.json")
    check_output("--out", tmp_path / "new.json")
    with pytest.raises(RequestError, match=r"--out .*old\.json: cannot be written: permission"):
        check_output("--out", tmp_path / "old.json")
