"""`kog plan`: a token's plan on one kind of GPU: stages, owners, bytes, padding, floor.

python -m kog_triton.plan --shape llama-3.2-1b --device h200 --gpus 1
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kog_triton.errors import KogError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.cuda import CudaLowering, lower
from kog_triton.schedule.schedule import Op, Scope, Stage, build
from kog_triton.schedule.topology import GPUS, Gpu, find_gpu


def plan_table(lowering: CudaLowering) -> Table:
    """One row a stage, and what a token costs at least."""
    s, gpu = lowering.schedule, lowering.gpu
    table = Table(
        title=f"{s.spec.family} on {s.num_ranks} x {gpu.name}, one token", title_justify="left"
    )
    for name in (
        "stage",
        "runs",
        "shards",
        "rows",
        "cols",
        "blocks",
        "rows a block",
        "warps K x rows",
    ):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for name in ("MB/token", "padding", "floor us"):
        table.add_column(name, justify="right")
    for segment, stage in s.walk():
        shards = 1 if stage.scope is Scope.ALL else s.num_shards
        cells = [stage.name, str(segment.repeat), str(shards), str(stage.rows), str(stage.cols)]
        if stage.op is Op.MATVEC:
            real, padded = stage_bytes(lowering, stage, segment.repeat)
            tiling = lowering.tilings[stage.name]
            most = max(
                len(lowering.block_units(stage, 0, b)) for b in range(lowering.group_size(stage))
            )
            cells += [
                str(lowering.group_size(stage)),
                str(most * tiling.unit_rows),
                f"{tiling.k_parts} x {tiling.unit_rows // 8}",
                f"{real / 1e6:.1f}",
                f"{padded / real - 1:.1%}",
                f"{padded / s.num_ranks / gpu.bandwidth * 1e6:.1f}",
            ]
        table.add_row(*cells)
    return table


def stage_bytes(lowering: CudaLowering, stage: Stage, repeat: int) -> tuple[int, int]:
    """Weight bytes of a stage over all runs and ranks: of the model, and as read with padding."""
    s = lowering.schedule
    shards = 1 if stage.scope is Scope.ALL else s.num_shards
    real = stage.rows * stage.cols * shards * repeat * s.spec.dtype.bytes
    chunks = sum(
        lowering.stage_chunks(stage, layer, lowering.place(stage, block), rank)
        for layer in range(repeat)
        for rank in range(s.num_ranks)
        for block in range(lowering.num_blocks)
    )
    return real, chunks * lowering.chunk_bytes


def summary(lowering: CudaLowering) -> str:
    """Floor and ceiling of the whole step, in words."""
    s, gpu = lowering.schedule, lowering.gpu
    per_gpu = max(lowering.stream_bytes(rank) for rank in range(s.num_ranks))
    floor = per_gpu / gpu.bandwidth
    return (
        f"{per_gpu / 1e9:.3f} GB a token and GPU; {gpu.bandwidth / 1e12:.2f} TB/s (datasheet) allow "
        f"{1 / floor:,.0f} tokens/s: {floor * 1e6:.0f} us a token, KV cache not counted.\n"
        f"{lowering.num_blocks} blocks; chunks of {lowering.chunk_bytes} bytes, {lowering.ring_chunks} in the "
        f"ring, {lowering.window_chunks} in flight; fragments of 8 x {lowering.frag_k}; "
        f"{s.spec.kv_bytes_per_position:,} bytes of KV cache a position."
    )


def open_spec(model: str | None, shape: str | None) -> ModelSpec:
    """The spec of a checkpoint, of a named shape, or of the demo."""
    if shape:
        from kog_triton.model.shapes import named_shape

        return named_shape(shape)
    from kog_triton.checkpoint import Checkpoint
    from kog_triton.demo import checkpoint_path

    return Checkpoint.open(model or str(checkpoint_path())).spec


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kog plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", help="a checkpoint folder or a Hugging Face id (default: the demo)"
    )
    what.add_argument("--shape", help="a named shape, such as llama-3.2-1b")
    parser.add_argument(
        "--device", default="h200", help=f"a GPU: {', '.join(GPUS)} (default: h200)"
    )
    parser.add_argument("--gpus", type=int, default=1, help="how many of them (default: 1)")
    args = parser.parse_args(argv)
    try:
        gpu: Gpu = find_gpu(args.device)
        lowering = lower(build(open_spec(args.model, args.shape), args.gpus), gpu)
        check_lowering(lowering)
    except KogError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(plan_table(lowering))
    console.print(summary(lowering), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
