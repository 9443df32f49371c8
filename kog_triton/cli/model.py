"""Which model a command is about that opens none: its shape alone, of a checkpoint or by name."""

import argparse
from pathlib import Path

from kog_triton.model.spec import DTYPES, ModelSpec


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that `open_spec` reads."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", help="folder, .gguf file or Hugging Face id (default: the demo that ships)"
    )
    what.add_argument("--shape", help="a named shape, such as llama-3.2-1b")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16"),
        help="of the weights in memory (default: as in the checkpoint)",
    )


def open_spec(args: argparse.Namespace) -> tuple[str, ModelSpec]:
    """Name and spec of a named shape, of a checkpoint, or of the demo, in the type that is asked for."""
    name, spec = _find_spec(args.model, args.shape)
    return name, spec.replace(dtype=DTYPES[args.dtype]) if args.dtype else spec


def _find_spec(model: str | None, shape: str | None) -> tuple[str, ModelSpec]:
    if shape:
        from kog_triton.model.shapes import named_shape

        return shape, named_shape(shape)
    from kog_triton.checkpoint.folder import Checkpoint
    from kog_triton.demo import checkpoint_path

    name = Path(model).name if model else "demo"
    return name, Checkpoint.open(model or checkpoint_path()).spec
