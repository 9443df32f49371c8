"""What narrow weights cost and save: text quality by format, and the memory that `kog quantize` takes.

    python benchmarks/formats.py quality --model FILE.gguf [--tokens 4096] [--json FILE]
    python benchmarks/formats.py stream --folder DIR [--shape qwen3-8b] [--format int4-g128] [--json FILE]

`quality`: perplexity of a held-out text and KL(own weights || format) a position, on the reference backend, for a model
as it is and quantized again by `kog quantize`. The text is the English of Python's own help (pydoc_data.topics), which
is on every machine; the record has its hash.

`stream`: writes a checkpoint of a published shape with random weights below DIR, which needs room for it and for the
result, quantizes it in a process of its own, and reads that process's peak of resident memory, mapped files included.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.bench import machine
from kog_triton.bench.check import compare
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.shards import ShardWriter
from kog_triton.llm import load_tokenizer
from kog_triton.model.families import sources
from kog_triton.model.shapes import SHAPES, named_shape
from kog_triton.model.weight_format import FORMATS, WRITTEN
from kog_triton.quantize import quantize_checkpoint

SCHEMA = "kog_triton.formats/1"
WINDOW = 256  # tokens that are scored together; each sees those before it in its window
QUALITY = ("int8-channel", "fp8-block", "fp8-channel", "int4-g32", "int4-g64", "int4-g128")
CHILD = """
import re, sys
from kog_triton.quantize import main
code = main(sys.argv[1:])
status = open("/proc/self/status").read()
print(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])
sys.exit(code)
"""


def held_out_text() -> str:
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def logits_of(checkpoint: Checkpoint, windows: list[list[int]]) -> list[np.ndarray]:
    backend = ReferenceBackend(checkpoint, BackendOptions(max_context=WINDOW))
    try:
        return [backend.forward_logits(ids) for ids in windows]
    finally:
        backend.close()


def nats(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """-log p of each token but the first, by what is before it."""
    rows = logits[:-1].astype(np.float64)
    top = rows.max(1)
    norm = top + np.log(np.exp(rows - top[:, None]).sum(1))
    return np.asarray(norm - rows[np.arange(len(rows)), ids[1:]])


def judge(
    name: str, checkpoint: Checkpoint, windows: list[list[int]], own: list[np.ndarray] | None
) -> tuple[dict[str, Any], list[np.ndarray]]:
    logits = logits_of(checkpoint, windows)
    loss = np.concatenate([nats(x, ids) for x, ids in zip(logits, windows, strict=True)])
    pairs = [compare(a, b) for a, b in zip(own or logits, logits, strict=True)]
    same, kl = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    row = {
        "format": name,
        "weights": checkpoint.spec.narrow_formats,
        "bytes_per_token": checkpoint.spec.bytes_per_token,
        "perplexity": round(math.exp(loss.mean()), 4),
        "kl_mean": round(float(kl.mean()), 6),
        "kl_max": round(float(kl.max()), 4),
        "top1": round(float(same.mean()), 4),
    }
    return row, logits


def quality(args: argparse.Namespace) -> dict[str, Any]:
    checkpoint = Checkpoint.open(args.model)
    text = held_out_text()
    ids = load_tokenizer(checkpoint).encode(text[: 12 * args.tokens])[: args.tokens]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    first, own = judge("its own", checkpoint, windows, None)
    rows = [first]
    absent = []
    for name in QUALITY:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / name
            try:
                quantize_checkpoint(args.model, out, name)
            except Exception as error:  # a format that does not divide this model is part of the table
                absent.append({"format": name, "why": str(error)})
                continue
            rows.append(judge(name, Checkpoint.open(out), windows, own)[0])
    return {
        "kind": "quality",
        "model": {"file": Path(args.model).name, "sha256": sha256(Path(args.model))},
        "text": {
            "source": "pydoc_data.topics",
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": len(windows) * WINDOW,
            "window": WINDOW,
        },
        "rows": rows,
        "absent": absent,
    }


def quality_table(record: dict[str, Any]) -> list[str]:
    """The rows of a record of `quality`, as docs/FORMATS.md shows them."""
    names = ("layers' weights", "MB a token", "perplexity", "KL mean", "KL max", "same top-1")
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for row in record["rows"]:
        name = row["format"] if row["format"] != "its own" else f"its own ({row['weights']})"
        cells = (
            name,
            f"{row['bytes_per_token'] / 1e6:.1f}",
            f"{row['perplexity']:.2f}",
            f"{row['kl_mean']:.4f}",
            f"{row['kl_max']:.2f}",
            f"{row['top1']:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def stream_line(record: dict[str, Any]) -> str:
    """The figures of a record of `stream`, as docs/FORMATS.md says them."""
    return (
        f"{record['shape']}, {record['bytes_read'] / 1e9:.1f} GB, as {record['format']}:"
        f" {record['bytes_written'] / 1e9:.1f} GB, peak of resident memory"
        f" {record['peak_resident_bytes'] / 1e9:.1f} GB"
    )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_random(folder: Path, shape: str) -> int:
    """A checkpoint of a published shape; a block of random weights, repeated. Its bytes."""
    spec = named_shape(shape)
    folder.mkdir()
    g = torch.Generator().manual_seed(0)
    block = torch.randn(1 << 25, generator=g).mul_(spec.hidden_size**-0.5).bfloat16()
    writer, where = ShardWriter(folder), sources(spec)
    for pattern, size in spec.shapes.items():
        for layer in range(spec.num_layers if "{}" in pattern else 1):
            count = math.prod(size)
            start = (layer * 104_729) % (len(block) // 2)
            data = block[start:].repeat(-(-count // (len(block) - start)))[:count]
            dims = size[1:] if len(size) > 1 and size[0] == 1 else size
            writer.add(where[pattern].names[0].format(layer), data.reshape(dims).clone())
    writer.close()
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return writer.total_bytes


def stream(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.folder) as home:
        written = write_random(Path(home) / "wide", args.shape)
        print(f"{args.shape}: {written / 1e9:.2f} GB written", flush=True)
        argv = ["--model", f"{home}/wide", "--out", f"{home}/narrow", "--format", args.format]
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", CHILD, *argv], stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - began
        narrow = Checkpoint.open(f"{home}/narrow")
        result = sum(p.stat().st_size for p in Path(home, "narrow").glob("*.safetensors"))
        expected = FORMATS[args.format]
        assert {how for _, how in narrow.spec.narrow} == {expected}
        narrow.load("layers.0.q_proj")
    peak = int(done.stdout) * 1024
    return {
        "kind": "stream",
        "shape": args.shape,
        "format": args.format,
        "bytes_read": written,
        "bytes_written": result,
        "seconds": round(seconds, 1),
        "peak_resident_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks/formats.py", description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("quality")
    one.add_argument("--model", required=True)
    one.add_argument("--tokens", type=int, default=4096)
    two = kinds.add_parser("stream")
    two.add_argument("--folder", required=True)
    two.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    two.add_argument("--format", default="int4-g128", choices=WRITTEN)
    for kind in (one, two):
        kind.add_argument("--json", type=Path, metavar="FILE", help="write the record of the run")
    args = parser.parse_args()
    if args.kind == "quality":
        found = quality(args)
        print("\n".join(quality_table(found)))
    else:
        found = stream(args)
        print(stream_line(found))
    if args.json:
        record = {
            "schema": SCHEMA,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(),
            **found,
        }
        args.json.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
