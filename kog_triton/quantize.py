"""`kog quantize`: a narrow checkpoint from any that is read, in the layout of compressed-tensors.

    kog quantize --model DIR --out NEW_DIR --format int4-g128

The layers' matrices become narrow, round to nearest, without calibration; embedding, head, norms and biases stay as
they are. Tensors are read, quantized and written one after the other; config.json is written last. A folder that would
not be whole is removed.
"""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kog_triton.cli.arguments import Parser
from kog_triton.cli.command import end_process, interruptible, run
from kog_triton.cli.foreign_flags import own_words
from kog_triton.cli.model import add_checkpoint
from kog_triton.cli.stderr_log import say
from kog_triton.errors import ModelError, RequestError
from kog_triton.model.spec import pattern_of
from kog_triton.model.weight_format import FORMATS, WRITTEN

if TYPE_CHECKING:
    import torch

    from kog_triton.checkpoint.folder import Checkpoint

FORGET_BYTES = 256 << 20  # of the files read, after which their pages are given back
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


def quantize_checkpoint(model: str | Path, out: Path, format_name: str, revision: str | None = None) -> dict[str, Any]:
    """Write the narrow checkpoint; what was done: `tensors`, `bytes_read`, `bytes_written`, `seconds`.

    ModelError for a model that is not read, or whose matrices the format does not divide; RequestError for a folder
    that is there already or cannot be written.
    """
    from kog_triton.checkpoint.folder import Checkpoint

    started = time.perf_counter()
    checkpoint = Checkpoint.open(model, revision)
    if reason := _why_not(checkpoint, format_name):
        fit = ", ".join(name for name in WRITTEN if not _why_not(checkpoint, name))
        raise ModelError(f"{reason}: choose one of {fit}")
    if checkpoint.spec.narrow:
        say(f"the source is already {checkpoint.spec.narrow_formats}: values are rounded twice")
    try:
        out.mkdir(parents=True)
    except FileExistsError as error:
        raise RequestError(f"--out {out}: {error.strerror}: name a folder that is not there yet") from error
    except OSError as error:
        raise RequestError(f"--out {out}: it cannot be created there: {error.strerror}") from error
    try:
        done = _write(checkpoint, out, format_name)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return done | {"seconds": time.perf_counter() - started}


def _write(checkpoint: "Checkpoint", out: Path, format_name: str) -> dict[str, Any]:
    """Fill the new folder; what was done, but for the time."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from kog_triton.checkpoint.formats import FIELD, without_scheme
    from kog_triton.checkpoint.formats.compressed_writer import quantization_config
    from kog_triton.checkpoint.shards import ShardWriter
    from kog_triton.model.families import find_family

    names = _stored_names(checkpoint)
    writer = ShardWriter(out)
    bar = Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    read = forgotten = 0
    with bar:
        task = bar.add_task("", total=sum(map(checkpoint.spec.weight_bytes, names)))
        for name, stored in names.items():
            for stored_name, tensor in _tensors(checkpoint, name, stored, format_name):
                writer.add(stored_name, tensor)
            read += checkpoint.spec.weight_bytes(name)
            bar.update(task, completed=read)
            if read - forgotten > FORGET_BYTES:
                checkpoint.forget()
                forgotten = read
        writer.close()
    _copy_texts(checkpoint, out)
    wide = [n.removesuffix(".weight") for k, n in names.items() if k in ("embed", "lm_head")]
    config = without_scheme(checkpoint.config)
    classes = find_family(config).architectures
    config = {"architectures": list(classes)} | config if classes else config
    config |= {FIELD: quantization_config(FORMATS[format_name], wide)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return {"tensors": len(names), "bytes_read": read, "bytes_written": writer.total_bytes}


def _stored_names(checkpoint: "Checkpoint") -> dict[str, str]:
    """Canonical name -> the name that a checkpoint of this family gives the tensor."""
    from kog_triton.model.families import sources

    where = sources(checkpoint.spec)
    out = {}
    for name in checkpoint.names():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        out[name] = where[pattern_of(name)].names[0].format(layer)
    return out


def _why_not(checkpoint: "Checkpoint", format_name: str) -> str:
    """Why a model is not written in a format, "" if it is."""
    how, spec = FORMATS[format_name], checkpoint.spec
    if how.group_rows > 1 and spec.num_lanes > 1:
        return f"{format_name} does not go with lanes"
    for name in filter(_is_projection, checkpoint.names()):
        if reason := how.undivided(spec.shapes[pattern_of(name)][-1]):
            return f"{name}: {reason}"
    return ""


def _is_projection(name: str) -> bool:
    return name.startswith("layers.") and name.endswith("_proj")


def _tensors(checkpoint: "Checkpoint", name: str, stored: str, format_name: str) -> "list[tuple[str, torch.Tensor]]":
    """What the new checkpoint holds of one weight; in memory of its own, unless it is too large for a second copy."""
    from kog_triton.checkpoint.folder import interleaved_rows
    from kog_triton.checkpoint.formats.compressed_writer import stored_tensors
    from kog_triton.checkpoint.quantizing import quantize
    from kog_triton.checkpoint.random_weights import DTYPES
    from kog_triton.model.families import sources

    spec, weight = checkpoint.spec, checkpoint.load(name)
    if sources(spec)[pattern_of(name)].interleaved_rope:
        weight = interleaved_rows(weight, spec.head_dim)
    if weight.dim() > 1 and weight.shape[0] == 1:
        weight = weight[0]
    if not _is_projection(name):
        if name in dict(spec.narrow):
            return [(stored, weight.to(DTYPES[spec.dtype]))]
        return [(stored, weight if weight.nbytes > FORGET_BYTES else weight.clone())]
    module = stored.removesuffix(".weight")
    try:
        parts = stored_tensors(quantize(weight, FORMATS[format_name]))
    except ModelError as error:
        raise ModelError(f"{checkpoint.folder}: {name}: {error}") from None
    return [(f"{module}.{suffix}", tensor) for suffix, tensor in parts.items()]


def _copy_texts(checkpoint: "Checkpoint", out: Path) -> None:
    """Tokenizer, templates and defaults of generation; of a GGUF file as a folder holds them."""
    if checkpoint.metadata is not None:
        from kog_triton.text.gguf_tokenizer import tokenizer_of_gguf

        tokenizer_of_gguf(checkpoint.metadata, checkpoint.folder).save(out)
        return
    for name in COPIED:
        source = checkpoint.folder / name
        if source.is_dir():
            shutil.copytree(source, out / name)
        elif source.is_file():
            shutil.copyfile(source, out / name)


def build_parser() -> Parser:
    parser = Parser(prog="kog quantize", description="Write a narrow checkpoint in the layout of compressed-tensors.")
    add_checkpoint(parser, "", required=True)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--format",
        required=True,
        choices=WRITTEN,
        help=f"{', '.join(WRITTEN)}; beside fp8 and int8 other engines have 8-bit activations",
    )
    return parser


def _body(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    args = parser.parse_args(own_words(parser, argv, {"--weights": "--format FORMAT"}))
    import torch  # noqa: F401  which takes a while, before Ctrl-C is an exception

    interruptible()
    done = quantize_checkpoint(args.model, args.out, args.format, args.revision)
    say(
        f"{args.out}: {done['tensors']} weights, {done['bytes_read'] / 1e9:.3f} GB as"
        f" {done['bytes_written'] / 1e9:.3f} GB ({args.format}) in {done['seconds']:.1f} s"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    end_process(main)
