"""`kog plan`: a token's plan on one kind of GPU: stages, owners, bytes, padding, roofline. Needs no GPU.

For NVIDIA GPUs the plan is the CUDA lowering, with warps and padding, where that runs; `--backend hip` shows the HIP
kernel's, of AMD GPUs, `--backend triton` the Triton kernel's tiles, of any GPU. Else AMD GPUs' rows are dealt out
evenly to blocks, as are those of narrow weights that no kernel for the GPU reads, which is enough for bytes and
rooflines.
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from kog_triton.backends import find_backend, refuse_narrow, why_not_narrow
from kog_triton.backends.cuda_archs import not_compiled_for
from kog_triton.cli.arguments import Parser, positive
from kog_triton.cli.command import end_process, run
from kog_triton.cli.console import Output, plain_table
from kog_triton.cli.foreign_flags import own_words
from kog_triton.cli.model import add_model, open_spec
from kog_triton.errors import DeviceError
from kog_triton.model.shapes import with_format
from kog_triton.model.spec import ModelSpec, Reduce
from kog_triton.model.weight_format import FORMATS
from kog_triton.schedule.check import check_lowering, check_partition, check_schedule
from kog_triton.schedule.cuda import WARPS, CudaLowering, lower
from kog_triton.schedule.cuda_weights import unreadable
from kog_triton.schedule.embedding import embedding_bytes
from kog_triton.schedule.hip import HipLowering, asked_blocks, lower_hip, place_blocks
from kog_triton.schedule.lowering import Partition, Tiling, matrix_stages
from kog_triton.schedule.scaling import (
    MEASURED_GPU,
    MOST_MEASURED,
    WORST_MISS,
    digits,
    measured_like,
    predicted_rate,
    said_of,
)
from kog_triton.schedule.schedule import Op, Schedule, Scope, Stage, build
from kog_triton.schedule.shards import canonical
from kog_triton.schedule.topology import GPUS, Gpu, find_gpu
from kog_triton.schedule.triton import StageTiles, Tiles, lower_tiles

PAIR = 2  # rows: gate and up of one output stay together


def plan(schedule: Schedule, gpu: Gpu) -> Partition:
    """The checked cut to show: the CUDA lowering where that runs and reads the weights, else rows dealt out evenly."""
    if _default_backend(gpu, schedule.spec) == "cuda" and not unreadable(schedule):
        lowering = lower(schedule, gpu)
        check_lowering(lowering)
        return lowering
    # Every block owns rows of the residual stream (check.py): a small model gets fewer blocks.
    group = min(gpu.num_blocks // schedule.shards_per_rank, -(-schedule.spec.hidden_size // PAIR))
    tilings = {stage.name: Tiling(PAIR) for stage in matrix_stages(schedule)}
    partition = Partition(schedule, group * schedule.shards_per_rank, tilings)
    check_schedule(schedule)
    check_partition(partition)
    return partition


def plan_hip(schedule: Schedule, gpu: Gpu, num_blocks: int = 0) -> HipLowering:
    """The checked HIP lowering. DeviceError for a GPU that is not AMD's, and for too many; KogError for what the kernel
    cannot do, RequestError for blocks that it cannot have."""
    backend: Any = find_backend("hip")
    refuse_narrow(backend, schedule.spec)
    if gpu.vendor != "amd":
        raise DeviceError(f"the hip backend is for AMD GPUs, and {gpu.name} is not: --device mi300x")
    backend.check_count(schedule.num_ranks)
    lowering = lower_hip(schedule, gpu, asked_blocks(schedule, gpu, num_blocks))
    check_schedule(schedule)
    check_partition(lowering)
    backend.lay_out(lowering, schedule.spec.max_context)
    return lowering


def plan_table(partition: Partition, gpu: Gpu, model: str) -> Table:
    """One row a stage, and what a token costs at least."""
    s = partition.schedule
    cuda = partition if isinstance(partition, CudaLowering) else None
    title = f"{model} ({s.spec.family}) on {s.num_ranks} x {gpu.name}, one token"
    names = ["stage", "runs", "shards", "rows", "cols", "blocks", "rows/block"]
    names += ["warps K x rows", "MB/token", "pad", "roofline us"] if cuda else ["MB/token", "roofline us"]
    table = plain_table(names, title)
    for segment, stage in s.walk():
        shards = 1 if stage.scope is Scope.ALL else s.num_shards
        cells = [stage.name, str(segment.repeat), str(shards), str(stage.rows), str(stage.cols)]
        if stage.op is Op.MATVEC:
            real = read = weight_bytes(s, stage, segment.repeat)
            size, tiling = partition.group_size(stage), partition.tilings[stage.name]
            most = max(len(partition.block_units(stage, 0, b)) for b in range(size))
            cells += [str(size), str(most * tiling.unit_rows)]
            if cuda:
                read = stream_bytes(cuda, stage, segment.repeat)
                cells.append(f"{tiling.k_parts} x {WARPS // tiling.k_parts}")
            cells.append(f"{real / 1e6:.1f}")
            if cuda:
                cells.append(f"{read / real - 1:.1%}")
            cells.append(f"{read / s.num_ranks / gpu.bandwidth * 1e6:.1f}")
        table.add_row(*cells)
    return table


def weight_bytes(schedule: Schedule, stage: Stage, repeat: int) -> int:
    """The model's weight bytes of a stage, over all runs and ranks, with the scales of narrow weights."""
    spec = schedule.spec
    return sum(
        spec.weight_bytes(canonical(stage, weight, layer)) for layer in range(repeat) for weight in stage.weights
    )


def stream_bytes(lowering: CudaLowering, stage: Stage, repeat: int) -> int:
    """Weight bytes of a token as the kernel reads them, with padding."""
    return sum(
        lowering.stage_bytes(stage, layer, rank)
        for layer in range(repeat)
        for rank in range(lowering.schedule.num_ranks)
    )


def summary(partition: Partition, gpu: Gpu) -> str:
    """Floor and ceiling of the whole step, in words."""
    s = partition.schedule
    if isinstance(partition, CudaLowering):
        per_gpu = max(partition.stream_bytes(rank) for rank in range(s.num_ranks))
        fragments = f"fragments of 8 x {partition.frag_k} or 4 x {2 * partition.frag_k}"
        cut = (
            f"ring of {partition.ring_slots} slots of {partition.ring_slot_bytes} bytes, "
            f"{partition.calm_slots} to {partition.window_slots} in flight; {fragments}"
        )
        if isinstance(partition, HipLowering):
            cut = (
                f"{gpu.num_sms} CUs on {gpu.dies} XCDs; weights go straight to registers, "
                f"{partition.ring_slot_bytes} bytes of a block at once; {fragments}"
            )
    else:
        total = sum(weight_bytes(s, stage, segment.repeat) for segment, stage in s.walk() if stage.op is Op.MATVEC)
        per_gpu = -(-total // s.num_ranks)
        why = "--backend hip shows the lowering of AMD GPUs"
        if s.spec.narrow:
            why = f"there is no lowering for {s.spec.narrow_formats} weights on {gpu.name} yet"
        cut = f"rows dealt out evenly: {why}"
    roofline = per_gpu / gpu.bandwidth
    return (
        f"{per_gpu / 1e9:.3f} GB a token and GPU; {gpu.bandwidth / 1e12:.2f} TB/s (datasheet) allow "
        f"{1 / roofline:,.0f} tokens/s: {roofline * 1e6:.0f} us a token, KV cache not counted.\n"
        f"{partition.num_blocks} blocks; {cut}; "
        f"{s.spec.kv_bytes_per_position * s.kv_copies:,} bytes of KV cache a position"
        + (f", each KV head on {s.kv_copies} GPUs." if s.kv_copies > 1 else ".")
        + shortage(s, per_gpu, gpu)
        + (expectation(s, gpu) if isinstance(partition, CudaLowering) else "")
    )


def shortage(schedule: Schedule, per_gpu: int, gpu: Gpu, others: Sequence[int] = (2, 4, 8)) -> str:
    """Of weights that a GPU has no room for, a line; else nothing. Each GPU holds the embedding beside its part.
    `others`: on how many GPUs the backend would run."""
    embedding = embedding_bytes(schedule.spec)
    # A datasheet's GB are nearer 2^30 bytes: an H200 of 141 has 150.1e9 by its driver, an H100 of 80 has 85.0e9.
    room = gpu.memory_bytes / 1e9 * 2**30
    if per_gpu + embedding < room:
        return ""
    whole = per_gpu * schedule.num_ranks
    counts = (n for n in others if n > schedule.num_ranks and whole / n + embedding < room)
    enough = next((f"--gpus {n} at least, or " for n in counts), "")
    return (
        f"\nIt does not fit: a GPU would hold {(per_gpu + embedding) / 2**30:.1f} GiB of weights and has "
        f"{room / 2**30:.0f}: choose {enough}a narrower --format."
    )


def placement(lowering: HipLowering) -> str:
    """Which lanes or KV heads each of several GPUs has, and what each XCD works on, of several GPUs the first one's."""
    s = lowering.schedule
    lines = [
        f"  XCD {die.number} (IOD {die.base}): blocks {die.blocks[0]} to {die.blocks[-1]}, "
        + (f"lane {_span(die.lanes)}" if s.shards_per_rank > 1 else f"KV head {_span(die.kv_heads)}")
        for die in place_blocks(lowering)
    ]
    where, has = "", []
    if s.num_ranks > 1:
        count, copies, of = s.shard_kv_heads, s.kv_copies, f"{s.spec.num_kv_heads} KV heads"
        if s.spec.num_lanes > 1:
            count, copies, of = s.shards_per_rank, 1, f"{s.num_shards} lanes"
        firsts = [rank * count // copies for rank in range(s.num_ranks)]
        each = ", ".join(f"{_span(range(n, n + count))} on GPU {rank}" for rank, n in enumerate(firsts))
        where, has = " of GPU 0", [f"Each GPU has {count} of {of}: {each}."]
    many = "about as many" if lowering.num_blocks % lowering.gpu.dies else "as many"
    head = f"Placed by the XCC_ID that each block reads at every launch; with {many} blocks on each XCD{where}:"
    return "\n".join([*has, head, *lines, gathering(lowering)])


def gathering(lowering: HipLowering) -> str:
    """What blocks gather from each other in a layer; of a plain model on one GPU also if one block of each XCD did."""
    s, spec, blocks = lowering.schedule, lowering.schedule.spec, lowering.num_blocks
    hows = list(zip(spec.reduce_attention, spec.reduce_mlp, strict=True))
    vectors = max(2 + both.count(Reduce.NOW) * (s.num_shards - 1) for both in hows)
    words = s.shard_heads * spec.head_dim // 2 + s.shard_ffn // 2 + vectors * spec.hidden_size
    said = f"A layer's four exchanges: each block gathers {words:,} words, {blocks * 4 * words / 1e6:.1f} MB a GPU"
    if s.num_shards == 1:
        joined = len(place_blocks(lowering)) * 4 * words / 1e6
        return f"{said}; joined by XCD first, which costs four exchanges more, {joined:.1f} MB."
    late = max(both.count(Reduce.DELAYED) for both in hows)
    rows = late * spec.hidden_size * s.shards_per_rank * (s.num_shards - 1) // blocks
    return said + (f", and where other lanes' outputs join {rows:,} more." if rows else ".")


def _span(numbers: range) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def expectation(s: Schedule, gpu: Gpu) -> str:
    """What several GPUs should do, where the kernel was measured, and how far from it the formula is where this very
    shape was; else nothing."""
    if s.num_ranks == 1 or gpu.name != MEASURED_GPU:
        return ""
    rate, beyond = predicted_rate(s, gpu.bandwidth), ""
    if s.num_ranks > MOST_MEASURED:
        beyond = f"; {s.num_ranks} GPUs are beyond what was measured"
    out = (
        f"\nPredicted: {rate:,.0f} tokens/s, by a formula that misses what was measured on up to {MOST_MEASURED} GPUs "
        f"by {WORST_MISS:.0%} at most{beyond} (docs/SCALING.md)."
    )
    row = measured_like(s.spec, s.num_ranks)
    if row is None:
        return out
    said, places = said_of(row, s), digits(row.rate)
    return out + (
        f"\nMeasured: {row.rate:,.{places}f} tokens/s where a GPU reads {row.bandwidth:.2f} TB/s; the formula says "
        f"{said:,.{places}f} of it, {said / row.rate - 1:+.1%}."
    )


# ---- the Triton kernel's tiles ----


def tiles_table(schedule: Schedule, tiles: Tiles, gpu: Gpu, model: str) -> Table:
    """One row a matrix stage: its tiles, rows by words along K, and what a token reads of them."""
    names = ["stage", "runs", "rows", "cols", "blocks", "rows/block", "tile rows x words"]
    names += ["KB on its way", "MB/token", "pad", "roofline us"]
    table = plain_table(names, f"{model} ({schedule.spec.family}) by Triton on {gpu.name}, one token")
    for t, (repeat, real, read) in zip(tiles.stages, tile_bytes(schedule, tiles), strict=True):
        blocks = tiles.num_blocks if t.name == "lm_head" else tiles.group
        words = " + ".join(f"{n} x {t.widths[k]}" if n > 1 else f"{t.widths[k]}" for k, n in t.runs)
        cells = [t.name, str(repeat), str(t.rows), str(t.cols), str(blocks), str(t.block_rows)]
        cells += [f"{t.tile_rows} x ({words})", f"{bytes_on_their_way(t) / 1024:.0f}"]
        cells += [f"{real / 1e6:.1f}", f"{read / real - 1:.1%}", f"{read / gpu.bandwidth * 1e6:.1f}"]
        table.add_row(*cells)
    return table


def tile_bytes(schedule: Schedule, tiles: Tiles) -> list[tuple[int, int, int]]:
    """Of every matrix stage how often a token runs it, the model's weight bytes, and those that the kernel reads."""
    out = []
    matrices = ((s, stage) for s, stage in schedule.walk() if stage.op is Op.MATVEC)
    for t, (segment, stage) in zip(tiles.stages, matrices, strict=True):
        parts = stage.cols // t.cols  # a concatenated head is read lane by lane
        read = 4 * t.words * tiles.num_blocks * parts * segment.repeat
        out.append((segment.repeat, weight_bytes(schedule, stage, segment.repeat), read))
    return out


def bytes_on_their_way(t: StageTiles) -> int:
    """Of a block as the stage begins."""
    places = (t.place(tile)[1] for tile in range(t.asked_before(0)))
    return 4 * sum(t.tile_words(k) for k in places)


def tiles_summary(schedule: Schedule, tiles: Tiles, gpu: Gpu) -> str:
    """Floor and ceiling of the whole step, in words."""
    real, read = (sum(column) for column in list(zip(*tile_bytes(schedule, tiles), strict=True))[1:])
    roofline = read / gpu.bandwidth
    return (
        f"{read / 1e9:.3f} GB a token, {read / real - 1:.1%} of it padding; "
        f"{gpu.bandwidth / 1e12:.2f} TB/s (datasheet) allow {1 / roofline:,.0f} tokens/s: "
        f"{roofline * 1e6:.0f} us a token, KV cache not counted.\n"
        f"{tiles.num_blocks} blocks, {tiles.splits} splits of the context for a KV head of {tiles.kv_heads}; "
        f"{schedule.spec.kv_bytes_per_position:,} bytes of KV cache a position." + shortage(schedule, real, gpu, ())
    )


def _body(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="kog plan", description="Show how a model is laid out on a GPU, without a GPU.")
    add_model(parser)
    parser.add_argument("--device", default="h200", help=f"a GPU: {', '.join(GPUS)} (default: h200)")
    parser.add_argument("--gpus", type=positive, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument(
        "--format", choices=FORMATS, help="of the layers' matrices: bytes and roofline as if they were stored so"
    )
    parser.add_argument(
        "--backend",
        choices=("cuda", "hip", "triton"),
        help="whose plan (default: cuda's, triton's where cuda does not run; for an AMD GPU rows dealt out evenly)",
    )
    parser.add_argument("--blocks", type=positive, default=0, metavar="N", help="of a GPU, with --backend hip")
    args = parser.parse_args(own_words(parser, argv, {"--weights": "--format FORMAT"}))
    if args.blocks and args.backend != "hip":
        parser.error("--blocks goes with --backend hip")
    gpu = find_gpu(args.device)
    name, spec = open_spec(args)
    if args.format:
        spec, name = with_format(spec, FORMATS[args.format]), f"{name} as {args.format}"
    console, schedule = Output(), build(spec, args.gpus)
    if (backend := args.backend or _default_backend(gpu, spec)) == "triton":
        refuse_narrow(find_backend("triton"), spec)
        tiles = lower_tiles(schedule, gpu.num_blocks, spec.max_context, gpu.vendor)
        console.write_table(tiles_table(schedule, tiles, gpu, name))
        console.write_line(tiles_summary(schedule, tiles, gpu))
        return 0
    if backend == "cuda" and gpu.vendor != "nvidia":
        raise DeviceError(f"the cuda backend is for NVIDIA GPUs, and {gpu.name} is not: --backend hip, or triton")
    if backend == "cuda" and (refused := not_compiled_for(gpu.name, gpu.arch)):
        raise DeviceError(refused.why("cuda"))
    partition = plan_hip(schedule, gpu, args.blocks) if backend == "hip" else plan(schedule, gpu)
    console.write_table(plan_table(partition, gpu, name))
    console.write_line(summary(partition, gpu))
    if isinstance(partition, HipLowering):
        console.write_line(placement(partition))
    return 0


def _default_backend(gpu: Gpu, spec: ModelSpec) -> str:
    """Whose plan a GPU has: "cuda", or "triton" where CUDA's kernel is not compiled for it; "" for a plain cut."""
    if gpu.vendor != "nvidia":
        return ""
    if not not_compiled_for(gpu.name, gpu.arch):
        return "cuda"
    return "" if why_not_narrow(find_backend("triton"), spec) else "triton"


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    end_process(main)
