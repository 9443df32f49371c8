"""Trains the small Llama of this folder, by the demo's own scripts, and writes training.json.

    python tests/data/llama/train.py --work DIR

DIR gets the corpus (Python's standard library) and the run. One thread of a CPU; a quarter of an hour.
Another Python or torch gives another model.
"""

import argparse
import json
import platform
from pathlib import Path

import torch

from kog_triton.demo import corpus, evaluate, export, train
from kog_triton.demo.model import Shape
from kog_triton.json_file import in_lines

HERE = Path(__file__).parent
SHAPE = Shape(
    vocab_size=512,
    hidden_size=96,
    num_layers=3,
    num_heads=3,
    intermediate_size=192,
    max_positions=512,
    num_lanes=1,
    reduce="blocking",
)
SETTINGS = train.Settings(tokens=8_000_000, batch=8, window=512, warmup=100, peak_rate=5e-3)
SHARD_BYTES = 500_000  # two shards


def record(data: Path, run: Path) -> dict[str, object]:
    """What was trained, on what, and how well the exported weights do."""
    state = json.loads((train.newest(run) / "state.json").read_text())
    return {
        "environment": {"torch": torch.__version__, "python": platform.python_version()},
        "shape": state["shape"],
        "settings": state["settings"],
        "steps": state["step"],
        "seconds": round(state["seconds"], 1),
        "evaluation": evaluate.evaluate(data, HERE, "cpu"),
        "loss_by_step": dict(state["curve"]),  # nats a token
        "corpus": json.loads((data / "manifest.json").read_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small Llama that tests read")
    parser.add_argument("--work", type=Path, required=True, help="folder for corpus and run")
    work = parser.parse_args().work
    torch.set_num_threads(1)
    data, run = work / "data", work / "run"
    corpus.build(data, SHAPE, [corpus.standard_library()], [])
    training = train.Training(SHAPE, SETTINGS, data, "cpu")
    train.run(training, run, log_every=50, save_every=500, stop=None)
    export.export(run, data, HERE, SHARD_BYTES)
    (HERE / "training.json").write_text(in_lines(record(data, run), 1) + "\n")


if __name__ == "__main__":
    main()
