"""Use the installed package in a folder of one's own: the commands, their files, and types for checkers."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import kog_triton

assert Path(kog_triton.__file__).is_relative_to(sys.prefix), kog_triton.__file__
assert (files("kog_triton") / "py.typed").is_file() and list(Path.cwd().iterdir()) == []


def kog(*argv, **how):
    return subprocess.run([Path(sys.executable).parent / "kog", *argv], capture_output=True, text=True, **how)


assert kog("--version").stdout == f"kog {kog_triton.__version__}\n"
done = kog("generate", "-p", "-", "-m", "4", "--temp", "0", "--json", "run.json", input="def f(x):")
assert done.returncode == 0 and "backend reference" in done.stderr, done.stderr
record = json.loads(Path("run.json").read_text())
assert record["output"]["outputs"][0]["text"] == done.stdout and done.stdout
assert kog("plan", "--shape", "llama-3.2-1b").stdout.startswith("llama-3.2-1b (llama) on 1 x h200")
assert kog("fly").returncode == 2
