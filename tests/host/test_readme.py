"""What README.md and its neighbors show is what the program prints and records say; what they name exists.

Their commands are understood by the programs that they name.
"""

import json
import re
import shlex
import tomllib
from importlib import import_module

import pytest

from kog_triton import __main__ as kog
from kog_triton.bench import arguments as bench
from kog_triton.cli import generate_arguments
from tests import ROOT, faults


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


README, CONTRIBUTING = read("README.md"), read("CONTRIBUTING.md")
ARCHITECTURE = read("docs/ARCHITECTURE.md")
WITH_COMMANDS = (README, CONTRIBUTING, read("docs/HIP.md"), read("benchmarks/README.md"))


def test_it_is_short():
    assert len(README.splitlines()) < 150


def test_the_size_of_the_default_install_is_one_line_with_the_way_to_a_smaller_one():
    """torch's own page is named, no place from which packages come."""
    assert re.search(r"^The default install takes about [\d.]+ GB", README, re.MULTILINE)
    assert re.findall(r"https?://[^\s)>\"]+", README) == ["https://pytorch.org/get-started/locally/"]


def test_the_plan_is_what_plan_prints(capsys):
    assert kog.main(["plan", "--shape", "llama-3.2-1b"]) == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    lines = [line.rstrip() for line in ARCHITECTURE.splitlines()]
    (start,) = [i for i, line in enumerate(lines) if line == shown[0]]
    assert lines[start : start + len(shown)] == shown


def test_the_demo_s_figures_are_those_recorded():
    """Its card has the others (tests/host/test_demo.py)."""
    record = json.loads(read("kog_triton/demo/training.json"))
    bits = [record[name]["evaluation"]["bits_per_byte"] for name in ("demo", "twin")]
    text = " ".join(README.split())
    assert f"costs this small model {bits[0] / bits[1] - 1:.1%}".replace("%", " %") in text
    assert f"{record['demo']['evaluation']['parameters'] / 1e6:.1f} million" in text


def test_the_test_command_is_ci_s():
    command = "python -m pytest -q -n 2"
    assert f"&& {command}\n" in README
    assert re.search(rf"^{command}( |$)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def shell_lines():
    """The indented lines of these files without the words beside them, each `&&` a line of its own."""
    for text in WITH_COMMANDS:
        for line in re.findall(r"^    (\S.*)", text.replace("\\\n", " "), re.MULTILINE):
            for part in line.split(" && "):
                yield shlex.split(re.split(r"   +", part.strip())[0], posix=True)


def commands():
    """Every `kog NAME ...` and `python -m kog_triton.NAME ...` among them, without what precedes NAME."""
    for words in shell_lines():
        if words[:1] == ["kog"]:
            yield words[1], words[2:]
        elif words[:2] == ["python", "-m"] and words[2].startswith("kog_triton."):
            yield words[2].removeprefix("kog_triton."), words[3:]


@pytest.mark.parametrize(("name", "argv"), list(commands()))
def test_every_command_is_understood(name, argv, capsys):
    """By the parser of its own program; plan and doctor, which need no model, by running."""
    assert name in kog.commands()
    if name == "generate":
        generate_arguments.parse([arg.replace("run.json", "/run.json") for arg in argv])
    elif name == "bench":
        bench.parse(argv)
    elif name in ("profile", "quantize", "serve"):
        import_module(f"kog_triton.{name}").build_parser().parse_args(argv)
    else:
        assert name in ("plan", "doctor", "cache") and kog.main([name, *argv]) == 0


def test_the_commands_are_found():
    """A pattern that finds none would pass every test above."""
    found = list(commands())
    assert {name for name, _ in found} == {
        *("generate", "serve", "quantize", "doctor", "cache", "plan", "profile", "bench")
    }
    kinds = {argv[0] for name, argv in found if name == "bench"}
    assert kinds == {
        *("compare", "decode", "prefill", "concurrency", "stages", "startup", "table"),
        *("serve", "agent", "kccl"),
    }


def test_what_is_installed_exists():
    """Constraints and extras of every pip install, and the scripts that are run by their path."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installs = [words for words in shell_lines() if words[:2] == ["pip", "install"]]
    assert any("constraints/h200.txt" in words for words in installs)
    for words in installs:
        assert words[2:] == ["-e", "."] or (ROOT / words[words.index("-c") + 1]).is_file()
        names = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[words.index("-e") + 1])
        assert names and set((names[1] or "test").split(",")) <= set(extras["optional-dependencies"])
    for words in shell_lines():
        if words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file()


def test_every_file_in_the_tree_exists():
    start = ARCHITECTURE.index("## The tree")
    tree = ARCHITECTURE[start : ARCHITECTURE.index("Imports point one way")]
    for line in tree.splitlines()[2:]:
        if line.startswith("    "):
            names = [n for n in line.strip().split("   ")[0].split("  ") if n]
            for name in names:
                home = ROOT if line[4] != " " else ROOT / "kog_triton"
                assert (home / name).exists(), f"no {home / name}"


def test_every_file_that_contributing_names_exists():
    paths = re.findall(r"`([\w./-]+/[\w./-]*|\.ci/\w+)`", CONTRIBUTING)
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []
    table = [line for line in CONTRIBUTING.splitlines() if line.startswith("| ")]
    assert all(re.search(r"`tests/[^`]+` \|$", line) for line in table[2:])  # behind its head


def test_what_contributing_runs_is_the_host_s_tests():
    words = "python -m pytest -q -m host -n 2"
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert words in CONTRIBUTING
    assert any(marker.startswith("host: ") for marker in markers["markers"])


def test_the_number_of_faults_is_right():
    assert f"plants {len(faults.FAULTS)} errors" in CONTRIBUTING
