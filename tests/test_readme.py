"""The README's tables are what the program prints and the training recorded; what it names exists."""

import json
import re
import shlex
from pathlib import Path

import faults
import pytest

from kog_triton import __main__ as kog
from kog_triton.generate import parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [line.rstrip() for line in README.splitlines()]


def test_it_is_short():
    assert len(LINES) <= 250


def test_the_plan_is_what_plan_prints(capsys):
    assert kog.main(["plan", "--shape", "llama-3.2-1b"]) == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    (start,) = [i for i, line in enumerate(LINES) if line == shown[0]]
    assert LINES[start : start + len(shown)] == shown


def row(name):
    """The cells of one row of a table."""
    (line,) = [line for line in LINES if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_demo_s_figures_are_those_recorded():
    record = json.loads((ROOT / "kog_triton" / "demo" / "training.json").read_text())
    both = [record["demo"], record["twin"]]
    bits = [one["evaluation"]["bits_per_byte"] for one in both]
    assert row("held-out bits per byte") == [f"{b:.4f}" for b in bits]
    assert f"costs this small model {bits[0] / bits[1] - 1:.1%}".replace("%", " %") in README
    for temperature, name in ((0.0, "greedy"), (0.7, "temperature 0.7")):
        shares = [
            f"{100 * share['parse_share']:.1f} %"
            for one in both
            for share in one["completions"]["shares"]
            if share["temperature"] == temperature
        ]
        assert row(f"completions that parse, {name}") == shares
    assert f"{record['demo']['evaluation']['parameters'] / 1e6:.1f} million" in README


def test_the_test_command_is_ci_s():
    command = "python -m pytest -q -n 2"
    assert f"&& {command}\n" in README
    assert re.search(rf"^{command}( |$)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def commands():
    """Every `kog NAME ...` and `python -m kog_triton.NAME ...` at the start of an indented line."""
    for line in README.replace("\\\n", " ").splitlines():
        match = re.search(r"(?:^    |&& )(?:kog |python -m kog_triton\.)(\w+)(.*)", line)
        if match:
            yield match[1], shlex.split(match[2].split("   ")[0])


@pytest.mark.parametrize(("name", "argv"), list(commands()))
def test_every_command_is_understood(name, argv):
    assert name in kog.commands()
    if name == "generate":
        parse([arg.replace("run.json", "/run.json") for arg in argv])


def test_every_file_in_the_tree_exists():
    tree = README[README.index("## The tree") : README.index("Imports point one way")]
    for line in tree.splitlines()[2:]:
        if line.startswith("    "):
            names = [n for n in line.strip().split("   ")[0].split("  ") if n]
            for name in names:
                home = ROOT if line[4] != " " else ROOT / "kog_triton"
                assert (home / name).exists(), f"no {home / name}"
    for path in re.findall(
        r"`((?:tests|kog_triton|\.ci|schedule|model|families)/[\w./]+)`", README
    ):
        assert any((home / path).exists() for home in (ROOT, ROOT / "kog_triton")), path


def test_the_number_of_faults_is_right():
    assert f"plants {len(faults.FAULTS)} errors" in README
