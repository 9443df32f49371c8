"""The demo model: a small trained Laneformer that ships with the package, and what trained it.

corpus -> train -> export -> evaluate, completions -> record: each a `python -m` command. README.md
is the model card; training.json holds the figures it quotes.
"""

from pathlib import Path


def checkpoint_path() -> Path:
    """The folder of the shipped checkpoint: config, tokenizer and fp16 safetensors shards."""
    return Path(__file__).parent / "checkpoint"
