"""The lowering as a C++ header: every size, offset and table that the kernel is specialised for.

Numbers come from the spec, the schedule and the lowering; nothing is typed twice. `Layout` holds what
Python needs as well: where each exchange lies in the words, and how shared memory is cut.

    words    regions of 32-bit words, one row a shard (and slot); rows start on 16 bytes, regions on 128
    shared   ring | mbarriers | partial sums, twice | scratch (activations, or attention) | small things

A kernel of several token columns (include/kog/columns) has regions and scratch of its own: columns.py.
"""

import math
from dataclasses import dataclass

from kog_triton.backends.cuda import protocol

from kog_triton.backends import request_words
from kog_triton.backends.logprob_words import RECORD_WORDS
from kog_triton.errors import ModelError
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from kog_triton.sampling import definition, fixed
from kog_triton.schedule import wire
from kog_triton.schedule.cuda import (
    CALM_BYTES,
    MMA_ROWS,
    PARTIAL_ROWS,
    WARPS,
    WINDOW_BYTES,
    CudaLowering,
    is_wide,
    unit_period,
)
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import Stage
from kog_triton.schedule.topology import KB

LAYER = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
THREADS = WARPS * 32  # that consume
HELPERS = 4 * 32  # one warp fills the ring, one watches over waits; four give up registers together
BINS = 256  # of a histogram of logits
MOST_SEATS = 16  # requests that one launch serves
SMALL_BYTES = 1024  # of shared memory: sums of squares, candidates, seats, flags
PARTIAL_BYTES = 2 * PARTIAL_ROWS * WARPS * 4
# Measured on an H200 (benchmarks/README.md) but for the length, which is an estimate.
SPLIT_TILES = 8  # tiles of positions, of a warp each, that make another split worth its while
BUNDLE = 4  # splits whose logarithms lie side by side
QUERY_TOPS = 32  # words from those of one query to the next's: a line of the L2
MERGED = 4  # splits that are joined by those who read them: of one bundle
MERGED_LENGTH = 2048  # positions up to which they are not more
HEADS_AT_ONCE = 8  # query heads of one warp: the tensor core's columns
# Of a block's stream, that wait in the L2 while its ring is full; all blocks' take a third of it at most.
AHEAD_BYTES = 128 * 1024
# Between two times 16 KB on their way there; the same in kernels of columns.
AHEAD_TICKS, COLUMN_AHEAD_TICKS = 800, 1600
# Registers for operands in a kernel of several columns: beside them wide ones have twice the sums.
HELD_WORDS, HELD_NARROW_WORDS = 32, 40
TAKEN_WORDS = 16  # registers for weights that wait for them there (columns/layer.h)
JOINED = 8  # splits that one warp joins
FLAGS_TOGETHER, LINE_WORDS = 8, 32  # hints of blocks in one line of the L2 (columns/layer.h)
KNOWN = "[[maybe_unused]] constexpr"  # not every model needs every number


@dataclass(frozen=True)
class Region:
    """Words of one exchange: `buffers` x `rows` of `stride` words, the first at `offset`."""

    offset: int
    stride: int
    rows: int = 1
    buffers: int = 1

    @property
    def end(self) -> int:
        return self.offset + self.stride * self.rows * self.buffers


@dataclass(frozen=True)
class Layout:
    lowering: CudaLowering
    max_context: int
    regions: dict[str, Region]
    splits: int  # parts of the context, each with a block of its own
    scratch_bytes: int
    ring_chunks: int
    threads: int = THREADS + HELPERS
    columns: int = 1  # tokens that one step computes
    chunk: bool = (
        False  # they are positions in a row of one prompt, not one each of several requests
    )
    partial_bytes: int = PARTIAL_BYTES
    small_bytes: int = SMALL_BYTES
    profile_tokens: int = 0  # newest tokens whose stamps are kept; 0 = no stamps are taken

    @property
    def total_words(self) -> int:
        return up(max(r.end for r in self.regions.values()), 32)

    def region(self, name: str) -> Region:
        """Empty if this kernel has no such exchange."""
        return self.regions.get(name, Region(0, 0))

    def place_of(self, step: str, word: int) -> str:
        """Where a wait stood: what its error record says, in names."""
        if step == "ring":
            return f"ring, chunk {word}"
        if step == "mask":
            return f"mask, word {word} of the host's"
        for name, region in self.regions.items():
            if region.offset <= word < region.end:
                return f"{step}, word {word - region.offset} of {name}"
        return step

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """A slot's keys and values: [layers, lanes, kv_heads, 2, positions, row_dim]."""
        schedule, spec = self.lowering.schedule, self.lowering.schedule.spec
        lanes = schedule.num_shards
        heads = spec.num_kv_heads // lanes
        return (spec.num_layers, lanes, heads, 2, self.max_context, row_dim(spec))

    def staged_bytes(self, stage: Stage) -> int:
        """Of a matrix stage's inputs in scratch."""
        lo = self.lowering
        if self.columns == 1:
            return lo.staged_bytes(stage)
        words = self.columns * lo.fragment(stage)[1] // 2
        parts, steps = lo.tilings[stage.name].k_parts, lo.steps(stage)
        if is_wide(stage):
            return parts * steps * 2 * words * 4
        return parts * (steps - held_steps(lo, stage, self.columns)) * words * 4

    def sums_at(self, stage: Stage) -> int:
        """Where a matrix stage's partial sums begin in the scratch of a kernel of several columns."""
        return 0 if sums_in_place(self.lowering, stage, self.columns) else self.staged_bytes(stage)

    def stage_bytes(self, stage: Stage) -> int:
        """Of its inputs and partial sums, in a kernel of several columns."""
        lo, staged = self.lowering, self.staged_bytes(stage)
        tiling, units = lo.tilings[stage.name], batch_units(lo, stage, self.columns)
        sums = units * tiling.unit_rows * self.columns * tiling.k_parts * 4
        return max(staged, self.sums_at(stage) + sums)

    @property
    def shared_bytes(self) -> int:
        ring = self.ring_chunks * (self.lowering.chunk_bytes + 16)
        return ring + self.partial_bytes + self.scratch_bytes + self.small_bytes


def lay_out(lowering: CudaLowering, max_context: int) -> Layout:
    """Regions and shared memory. ModelError names what this kernel cannot do."""
    check_model(lowering)
    schedule, spec = lowering.schedule, lowering.schedule.spec
    lanes, group = schedule.num_shards, lowering.group_size(schedule.stage("qkv_proj"))
    splits = max(1, group // spec.lane_kv_heads)
    regions: dict[str, Region] = {}

    def add(name: str, width: int, rows: int = lanes, buffers: int = 1) -> None:
        add_region(regions, name, width, rows, buffers)

    for name in ("qkv", "attention", "mlp"):
        add(name, -(-schedule.exchange(name).width // 2))
    for name in ("attention_out", "mlp_out"):
        add(name, spec.hidden_size)
    for name in ("attention_out", "mlp_out"):
        # Written only in layers reduced NOW over lanes: a lane may write its next one before another
        # has read the last, but not the one after.
        add(name + "_now", spec.hidden_size if _uses(spec, Reduce.NOW) else 0, lanes, 2)
        past = [e.buffers for e in schedule.exchanges if e.name == name + "_past"]
        add(name + "_past", spec.hidden_size if past else 0, lanes, max(past, default=1))
    add_split_regions(regions, spec, lanes * spec.lane_kv_heads, splits)
    mixes = lanes > 1 and spec.head is not Head.VOCAB_PARALLEL
    add("part", spec.hidden_size if mixes else 0)
    add("y", spec.hidden_size if mixes and spec.head is not Head.CONCAT else 0, 1)
    add_head_regions(regions, lowering.num_blocks)
    before = lowering.staged_bytes(schedule.stage("o_proj"))
    scratch = max(_activation_bytes(lowering), before + attention_bytes(spec, splits))
    scratch = up(scratch, 128)
    free = lowering.gpu.shared_bytes - PARTIAL_BYTES - scratch - SMALL_BYTES
    ring = free // (lowering.chunk_bytes + 16)
    if ring < 2 * lowering.window_chunks:
        raise ModelError(
            f"{scratch} bytes of activations leave {ring} chunks of shared memory: "
            f"the cuda backend needs {2 * lowering.window_chunks}"
        )
    return Layout(lowering, max_context, regions, splits, scratch, ring)


def check_model(lowering: CudaLowering) -> None:
    """ModelError naming what no kernel of this folder can do."""
    schedule, spec = lowering.schedule, lowering.schedule.spec
    if schedule.num_ranks != 1:
        raise ModelError("the cuda backend runs on one GPU: choose --gpus 1")
    if spec.head_dim > 256 or spec.head_dim % 8:
        raise ModelError(
            f"head_dim {spec.head_dim}: the cuda backend takes multiples of 8 up to 256"
        )
    if spec.group > HEADS_AT_ONCE * WARPS:
        raise ModelError(
            f"{spec.group} query heads a key/value head: the cuda backend takes "
            f"{HEADS_AT_ONCE * WARPS}"
        )
    if spec.num_experts:
        raise ModelError("the cuda backend has no experts")


def add_region(
    regions: dict[str, Region], name: str, width: int, rows: int = 1, buffers: int = 1
) -> None:
    at = up(max((r.end for r in regions.values()), default=0), 32)
    regions[name] = Region(at, up(width, 4), rows, buffers)


def add_split_regions(regions: dict[str, Region], spec: ModelSpec, heads: int, splits: int) -> None:
    """Outputs of every split of `heads` key/value heads, and the logarithms of their sums."""
    add_region(regions, "splits", spec.group * (spec.head_dim // 2), heads * splits)
    add_region(regions, "split_tops", spec.group * QUERY_TOPS, heads * -(-splits // BUNDLE))


def add_head_regions(regions: dict[str, Region], blocks: int) -> None:
    """What all blocks tell each other about one token's logits."""
    add_region(regions, "winner", 4 * 2 * blocks, 1, 2)
    add_region(regions, "peak", 2 * 2 * blocks)
    add_region(regions, "bin_part", BINS * 4 * 2 * blocks)
    add_region(regions, "bin", BINS * 4 * 2)
    add_region(regions, "best", 2 * 2 * (request_words.MOST_LOGPROBS + 1) * blocks, 1, 2)


def _uses(spec: ModelSpec, how: Reduce) -> bool:
    return spec.num_lanes > 1 and how in spec.reduce_attention + spec.reduce_mlp


def _activation_bytes(lowering: CudaLowering) -> int:
    return max(map(lowering.staged_bytes, matrix_stages(lowering.schedule)))


def row_dim(spec: ModelSpec) -> int:
    """Values of a row of the cache: a head, padded with zeros to steps of the tensor core."""
    return up(spec.head_dim, 16)


def tile_rows(spec: ModelSpec) -> int:
    """Positions that one warp takes at once: two tiles of wider heads would not fit into registers."""
    return 16 if row_dim(spec) <= 64 else 8


def split_least(spec: ModelSpec) -> int:
    """Positions that make another split of the context worth its while."""
    return SPLIT_TILES * tile_rows(spec)


def attention_bytes(spec: ModelSpec, splits: int, new_rows: int = 1) -> int:
    """Behind o_proj's inputs: queries, new keys and values, and either the warps' results or joins."""
    d, row, group = spec.head_dim, row_dim(spec), spec.group
    head_groups = -(-group // HEADS_AT_ONCE)
    slots = head_groups * -(-(WARPS // head_groups) // 2)  # half of the warps find room at once
    merge = slots * -(-group // head_groups) * (row + 4 + 2)
    joins = -(-group // (JOINED + 1)) * -(-splits // JOINED) * d if splits > JOINED else 0
    rows = 2 * head_groups * 8 * row * 2 + 2 * new_rows * row * 2
    return rows + 4 * max(merge, joins)


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def render(layout: Layout) -> str:
    """The header's text."""
    lo = layout.lowering
    schedule, spec = lo.schedule, lo.schedule.spec
    head = schedule.stage("lm_head")
    reduces = {how.name: int(how) for how in Reduce}
    head_group = -(-spec.group // -(-spec.group // HEADS_AT_ONCE))
    one = layout.columns == 1
    numbers = {
        "layers": spec.num_layers,
        "hidden": spec.hidden_size,
        "lanes": schedule.num_shards,
        "heads": spec.num_heads // schedule.num_shards,
        "kv_heads": spec.num_kv_heads // schedule.num_shards,
        "head_dim": spec.head_dim,
        "vocab": spec.vocab_size,
        "max_context": layout.max_context,
        "delay": spec.delay,
        "past_buffers": layout.region("mlp_out_past").buffers,
        "blocks": lo.num_blocks,
        "group": lo.group_size(schedule.stage("qkv_proj")),
        "warps": WARPS,
        "threads": layout.threads,
        "frag_k": lo.frag_k,
        "fragments": lo.fragments,
        "chunk_bytes": lo.chunk_bytes,
        "ring_chunks": layout.ring_chunks,
        "window_chunks": lo.window_chunks if one else lo.chunks_of(WINDOW_BYTES),
        "calm_chunks": lo.calm_chunks if one else lo.chunks_of(CALM_BYTES),
        "ahead_chunks": min(AHEAD_BYTES, lo.gpu.l2_bytes // 3 // lo.num_blocks) // lo.chunk_bytes,
        "ahead_ticks": (AHEAD_TICKS if one else COLUMN_AHEAD_TICKS) * lo.chunk_bytes // (16 * KB),
        "columns": layout.columns,
        "partial_bytes": layout.partial_bytes,
        "room_bytes": layout.partial_bytes or layout.scratch_bytes,
        "small_bytes": layout.small_bytes,
        "scratch_bytes": layout.scratch_bytes,
        "splits": layout.splits,
        "tile_rows": tile_rows(spec),
        "split_least": split_least(spec),
        "bundle": BUNDLE,
        "query_tops": QUERY_TOPS,
        "merged": min(MERGED, layout.splits),
        "merged_length": MERGED_LENGTH,
        "group_heads": head_group,
        "attention_scratch_at": layout.stage_bytes(schedule.stage("o_proj"))
        if layout.columns > 1
        else layout.staged_bytes(schedule.stage("o_proj")),
        "joined": JOINED,
        "taken_words": TAKEN_WORDS,
        "flags_together": FLAGS_TOGETHER,
        "line_words": LINE_WORDS,
        "request_words": request_words.capacity(spec.vocab_size),
        "mask_words": -(-spec.vocab_size // 32),
        "bins": BINS,
        "record_words": RECORD_WORDS,
        "most_logprobs": request_words.MOST_LOGPROBS,
        "distance_bits": fixed.DISTANCE_BITS,
        "most_seats": MOST_SEATS,
        "profile_tokens": max(1, layout.profile_tokens),
        "points": len(POINTS),
        "pair_turn": wire.TURN,
        "exponent_top": wire.EXPONENT_TOP,
    }
    mixes = layout.region("part").stride > 0
    flags = {
        "profile": layout.profile_tokens > 0,
        "chunk": layout.chunk,
        "streams": lo.streams,
        "f16": spec.dtype is DType.F16,
        "qkv_bias": spec.qkv_bias,
        "o_bias": spec.o_bias,
        "mlp_bias": spec.mlp_bias,
        "qk_norm": spec.qk_norm,
        "lane_norms": spec.lane_norms,
        "has_past": layout.region("mlp_out_past").stride > 0,
        "has_now": layout.region("mlp_out_now").stride > 0,
        "mixes": mixes,
        "mean": mixes and spec.head is Head.MEAN,
        "concat": mixes and spec.head is Head.CONCAT,
        "head_by_lane": schedule.num_shards > 1 and spec.head is Head.VOCAB_PARALLEL,
    }
    lines = ["#include <kog/ptx.h>", "", "namespace kog {"]
    lines += [f"{KNOWN} int {_camel('k_' + k)} = {v};" for k, v in numbers.items()]
    lines += [f"{KNOWN} bool {_camel('k_' + k)} = {str(v).lower()};" for k, v in flags.items()]
    lines.append(f"{KNOWN} long long kCacheStride = {math.prod(layout.cache_shape)};")
    lines.append(f"{KNOWN} float kNormEps = {float(spec.norm_eps)!r}f;")
    lines.append(f"{KNOWN} float kPairScale = {wire.SCALE[spec.dtype]!r}f;")
    lines.append(f"{KNOWN} float kRootLanes = {math.sqrt(schedule.num_shards)!r}f;")
    lines += [f"{KNOWN} int {_camel('k_' + k.lower())} = {v};" for k, v in reduces.items()]
    lines += protocol.declarations()
    lines += _sampling()
    names = (*LAYER, "lm_head")
    lines.append(f"enum class Step {{ {', '.join(_camel('k_' + n) for n in STEPS)} }};")
    lines.append(f"enum class Point {{ {', '.join(_camel('k_' + n) for n in POINTS)} }};")
    for name, region in layout.regions.items():
        lines.append(
            f"struct {_camel(name, True)}Words {{ static constexpr int kOffset = {region.offset}, "
            f"kStride = {region.stride}, kRows = {region.rows}; }};"
        )
    bias_at = 0
    for name in names:
        stage = schedule.stage(name)
        tiling = lo.tilings[name]
        fields = {
            "rows": stage.rows,
            "cols": stage.cols,
            "parts": tiling.k_parts,
            "unit_rows": tiling.unit_rows,
            "fragment_rows": tiling.fragment_rows,
            "padded_k": lo.padded_k(stage),
            "steps": lo.steps(stage),
            "units": lo.num_units(stage),
            "group": lo.group_size(stage),
            "batch": batch_units(lo, stage, layout.columns),
            "held": held_steps(lo, stage, layout.columns),
            "sums_at": layout.sums_at(stage),
            "period": unit_period(lo.steps(stage), lo.fragments),
            "bias_at": bias_at,
        }
        bias_at += stage.rows * schedule.num_shards if stage is not head else 0
        body = ", ".join(f"{_camel('k_' + k)} = {v}" for k, v in fields.items())
        wide = str(is_wide(stage)).lower()
        in_place = str(sums_in_place(lo, stage, layout.columns)).lower()
        lines.append(
            f"struct {_camel(name, True)} {{ static constexpr int {body}; "
            f"static constexpr bool kWide = {wide}, kSumsInPlace = {in_place}; }};"
        )
    lines.append(f"constexpr int kBiasRows = {bias_at};")
    for name, values in (
        ("windows", spec.windows),
        ("reduce_attention", spec.reduce_attention),
        ("reduce_mlp", spec.reduce_mlp),
    ):
        text = ", ".join(str(int(v)) for v in values)
        lines.append(f"KOG_CONSTANT int {_camel('k_' + name)}[] = {{{text}}};")
    return "\n".join([*lines, "}  // namespace kog", ""])


def _sampling() -> list[str]:
    """Places of a request's words, and the definition's numbers."""
    places = ", ".join(f"{_camel('k_' + k)} = {v}" for k, v in request_words.OFFSETS.items())
    flags = ", ".join(
        f"{_camel('k_' + (flag.name or '').lower())} = {int(flag)}" for flag in request_words.Flag
    )
    return [
        f"struct Request {{ static constexpr int {places}; }};",
        f"enum Flag : unsigned {{ {flags} }};",
        f"{KNOWN} double kNoiseScale = {definition.NOISE_SCALE!r};",
        f"{KNOWN} double kLog2eScale = {definition.LOG2E_SCALE!r};",
        f"{KNOWN} long long kLog2Log2E = {fixed.LOG2_LOG2E}, kMaxDistance = {fixed.MAX_DISTANCE};",
        f"KOG_CONSTANT unsigned kExp2[] = {{{', '.join(f'{c}u' for c in fixed.EXP2)}}};",
    ]


# What a warp has just done when it leaves a stamp in the profile.
POINTS = (
    "start",
    "qkv_proj",
    "attention_qkv",
    "attention_split",
    "attention",
    "o_proj_input",
    "o_proj",
    "attention_out",
    "gate_up_proj",
    "down_proj_input",
    "down_proj",
    "mlp_out",
)

# Where a wait stands, for its error record.
STEPS = (
    "ring",
    "attention_qkv",
    "attention_join",
    "o_proj_input",
    "attention_out",
    "down_proj_input",
    "mlp_out",
    "past",
    "mix_lanes",
    "mix_gather",
    "winner",
    "mask",
    "peaks",
    "histogram",
    "cut",
    "best",
)


def batch_units(lo: CudaLowering, stage: Stage, columns: int = 1) -> int:
    """Units whose partial sums are held at once: whole chunks, as many rows a thread as columns."""
    tiling, steps = lo.tilings[stage.name], lo.steps(stage)
    # rows x parts are never more than for these
    most = max(PARTIAL_ROWS // MMA_ROWS // columns, unit_period(steps, lo.fragments))
    most = min(most, THREADS // tiling.unit_rows)
    return max(_whole_chunks(lo, steps, most), units_in_place(lo, stage, columns))


def units_in_place(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Units whose partial sums find room where operands were that are in registers by then."""
    if columns == 1 or not is_wide(stage) or not held_steps(lo, stage, columns):
        return 0
    steps = lo.steps(stage)
    words = steps * columns * lo.frag_k  # of one part's operands
    rows = lo.tilings[stage.name].unit_rows * columns
    return _whole_chunks(lo, steps, min(WARPS, words // rows))  # a warp finishes a unit


def sums_in_place(lo: CudaLowering, stage: Stage, columns: int) -> bool:
    """Whether a stage's partial sums lie where its operands did."""
    return batch_units(lo, stage, columns) == units_in_place(lo, stage, columns)


def _whole_chunks(lo: CudaLowering, steps: int, most: int) -> int:
    """The most units, up to so many, that end with a chunk; 0 if none do."""
    return next((n for n in range(most, 0, -1) if n * steps % lo.fragments == 0), 0)


def held_steps(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Steps of K whose operands a warp of a kernel of several columns holds in registers."""
    if columns == 1:
        return 0
    tokens = 2 if is_wide(stage) else lo.fragment(stage)[0] // 2  # that an instruction takes
    words = lo.frag_k // 16 * max(1, columns // tokens)
    steps = lo.steps(stage)
    held = min(steps, (HELD_WORDS if is_wide(stage) else HELD_NARROW_WORDS) // words)
    # Wide ones, which all come by the scratch, are all there or all in registers.
    return held if held == steps or not is_wide(stage) else 0


def _camel(name: str, upper: bool = False) -> str:
    first, *rest = name.split("_")
    return (first.capitalize() if upper else first) + "".join(w.capitalize() for w in rest)
