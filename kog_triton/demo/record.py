"""Joins everything that was measured about one training into training.json.

    python -m kog_triton.demo.record --manifest FILE --environment FILE --out FILE
        --demo STATE EVALUATION COMPLETIONS --twin STATE EVALUATION COMPLETIONS

STATE is the state.json of a run's last step folder; EVALUATION and COMPLETIONS are what
evaluate.py and completions.py wrote; the environment is a JSON object that names the GPU and the
versions of torch and Python.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kog_triton.errors import RunError
from kog_triton.json_file import in_lines


def read(path: Path) -> Any:
    """The JSON in a file; RunError if it is missing or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {error}; run the step that writes it") from None


def describe(state: Path, evaluation: Path, completions: Path) -> dict[str, Any]:
    """One run: what it was, how the loss fell, what it reached."""
    run = read(state)
    settings = run["settings"]
    step_tokens = settings["batch"] * settings["window"]
    if run["step"] != max(1, settings["tokens"] // step_tokens):
        raise RunError(f"{state}: stopped at step {run['step']}; resume it first")
    return {
        "shape": run["shape"],
        "settings": settings,
        "steps": run["step"],
        "tokens": run["step"] * step_tokens,
        "seconds": round(run["seconds"], 1),
        "evaluation": read(evaluation),
        "completions": read(completions),
        # Every second entry, and the last.
        "loss_curve": [[s, round(v, 3)] for s, v in [*run["curve"][1::2], run["curve"][-1]]],
    }


def record(manifest: Path, environment: Path, demo: Sequence[Path], twin: Sequence[Path]) -> dict[str, Any]:
    """The record of one pair of runs; RunError if they did not see the same data alike."""
    runs = {"demo": describe(*demo), "twin": describe(*twin)}
    if runs["demo"]["settings"] != runs["twin"]["settings"]:
        raise RunError("demo and twin were trained under other settings; train one of them again")
    corpus = read(manifest)
    for of in ("packages", "left_out"):  # columns are named once: there are hundreds of rows
        columns = [*corpus[of][0]] if corpus[of] else []
        rows = [[package[name] for name in columns] for package in corpus[of]]
        corpus[of] = {"columns": columns, "rows": rows}
    return {"environment": read(environment), **runs, "corpus": corpus}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write training.json")
    parser.add_argument("--manifest", type=Path, required=True, help="manifest.json of the corpus")
    parser.add_argument("--environment", type=Path, required=True, help="GPU and versions")
    parser.add_argument("--demo", type=Path, nargs=3, required=True, metavar="FILE")
    parser.add_argument("--twin", type=Path, nargs=3, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    joined = record(arguments.manifest, arguments.environment, arguments.demo, arguments.twin)
    arguments.out.write_text(in_lines(joined, 2) + "\n")


if __name__ == "__main__":
    main()
