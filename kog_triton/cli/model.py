"""Which model a command is about: the flags that name one, and for a command that opens none its shape alone."""

import argparse
from pathlib import Path
from typing import Any

from kog_triton.errors import RequestError
from kog_triton.model.spec import DTYPES, ModelSpec


def add_checkpoint(parser: Any, more: str = " (default: the demo that ships)", shape: str = "", **how: Any) -> None:
    """--model and --revision, of a parser or a group; `shape` is the help of --shape beside them."""
    what = parser.add_mutually_exclusive_group() if shape else parser
    what.add_argument("--model", help=f"folder, .gguf file or Hugging Face id{more}", **how)
    if shape:
        what.add_argument("--shape", metavar="NAME", help=f"{shape}, such as llama-3.2-1b")
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")


def check_revision(model: str | None, revision: str | None) -> None:
    """RequestError for the revision of nothing that is opened."""
    if revision is not None and model is None:
        raise RequestError("--revision goes with --model, a Hugging Face id")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that `open_spec` reads."""
    add_checkpoint(parser, shape="a named shape")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16"), help="of the weights in memory (default: as in the checkpoint)"
    )


def open_spec(args: argparse.Namespace) -> tuple[str, ModelSpec]:
    """Name and spec of a named shape, of a checkpoint, or of the demo, in the type that is asked for."""
    check_revision(args.model, args.revision)
    name, spec = _find_spec(args)
    return name, spec.replace(dtype=DTYPES[args.dtype]) if args.dtype else spec


def _find_spec(args: argparse.Namespace) -> tuple[str, ModelSpec]:
    if args.shape:
        from kog_triton.model.shapes import named_shape

        return args.shape, named_shape(args.shape)
    from kog_triton.checkpoint.folder import Checkpoint
    from kog_triton.demo import checkpoint_path

    name = Path(args.model).name if args.model else "demo"
    return name, Checkpoint.open(args.model or checkpoint_path(), args.revision).spec
