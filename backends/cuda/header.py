"""The lowering as a C++ header: every size, offset and table that the kernel is specialised for.

Numbers come from the spec, the schedule and the lowering; nothing is typed twice. `Layout` holds what
Python needs as well: where each exchange lies in the words, and how shared memory is cut.

    words    regions of 32-bit words, one row a shard (and slot); rows start on 16 bytes, regions on 128
    shared   ring | mbarriers | partial sums, twice | scratch (activations, or attention) | small things
"""

import math
from dataclasses import dataclass

from kog_triton.errors import ModelError
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from kog_triton.schedule.cuda import MMA_ROWS, PARTIAL_ROWS, WARPS, CudaLowering
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import Prologue, Stage

LAYER = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
THREADS = WARPS * 32  # that consume; one more warp fills the ring
MOST_STOPS = 16
SMALL_BYTES = 1024  # of shared memory: sums of squares, candidates, flags
SPLIT_LEAST = 64  # positions that make another split worth its while: one step of a block at d = 64
HEADS_AT_ONCE = 4  # query heads of one warp: 8 values of q and of the output each, in registers
JOINED = 8  # splits that one warp joins
KNOWN = "[[maybe_unused]] constexpr"  # not every model needs every number


@dataclass(frozen=True)
class Region:
    """Words of one exchange: `slots` x `rows` of `stride` words, the first at `offset`."""

    offset: int
    stride: int
    rows: int = 1
    slots: int = 1

    @property
    def end(self) -> int:
        return self.offset + self.stride * self.rows * self.slots


@dataclass(frozen=True)
class Layout:
    lowering: CudaLowering
    max_context: int
    regions: dict[str, Region]
    splits: int  # parts of the context, each with a block of its own
    scratch_bytes: int
    ring_chunks: int
    threads: int = THREADS + 32

    @property
    def total_words(self) -> int:
        return _up(max(r.end for r in self.regions.values()), 32)

    @property
    def shared_bytes(self) -> int:
        ring = self.ring_chunks * (self.lowering.chunk_bytes + 16)
        return ring + _partial_bytes() + self.scratch_bytes + SMALL_BYTES


def lay_out(lowering: CudaLowering, max_context: int) -> Layout:
    """Regions and shared memory. ModelError names what this kernel cannot do."""
    schedule, spec = lowering.schedule, lowering.schedule.spec
    if schedule.num_ranks != 1:
        raise ModelError("the cuda backend runs on one GPU: choose --gpus 1")
    if spec.head is Head.CONCAT:
        raise ModelError("the cuda backend has no CONCAT head yet: choose --backend triton")
    if spec.head_dim > 256:
        raise ModelError(f"head_dim {spec.head_dim}: the cuda backend takes at most 256")
    if spec.group > HEADS_AT_ONCE * WARPS:
        raise ModelError(f"{spec.group} query heads a key/value head: the cuda backend takes 64")
    if spec.num_experts:
        raise ModelError("the cuda backend has no experts")
    lanes, group = schedule.num_shards, lowering.group_size(schedule.stage("qkv_proj"))
    splits = max(1, group // spec.lane_kv_heads)
    regions: dict[str, Region] = {}

    def add(name: str, width: int, rows: int = lanes, slots: int = 1) -> None:
        at = _up(max((r.end for r in regions.values()), default=0), 32)
        regions[name] = Region(at, _up(width, 4), rows, slots)

    for name in ("qkv", "attention", "mlp"):
        add(name, -(-schedule.exchange(name).width // 2))
    for name in ("attention_out", "mlp_out"):
        add(name, spec.hidden_size)
    for name in ("attention_out", "mlp_out"):
        # Written only in layers reduced NOW over lanes: a lane may write its next one before another
        # has read the last, but not the one after.
        add(name + "_now", spec.hidden_size if _uses(spec, Reduce.NOW) else 0, lanes, 2)
        past = [e.slots for e in schedule.exchanges if e.name == name + "_past"]
        add(name + "_past", spec.hidden_size if past else 0, lanes, max(past, default=1))
    add("splits", spec.group * (spec.head_dim + 2), lanes * spec.lane_kv_heads * splits)
    mixes = lanes > 1 and spec.head is not Head.VOCAB_PARALLEL
    add("part", spec.hidden_size if mixes else 0)
    add("y", spec.hidden_size if mixes else 0, 1)
    add("winner", 4 * 2 * lowering.num_blocks, 1, 2)
    scratch = max(_activation_bytes(lowering), _attention_bytes(lowering, splits))
    free = lowering.gpu.shared_bytes - _partial_bytes() - scratch - SMALL_BYTES
    ring = free // (lowering.chunk_bytes + 16)
    if ring < 2 * lowering.window_chunks:
        raise ModelError(
            f"{scratch} bytes of activations leave {ring} chunks of shared memory: "
            f"the cuda backend needs {2 * lowering.window_chunks}"
        )
    return Layout(lowering, max_context, regions, splits, scratch, ring)


def _uses(spec: ModelSpec, how: Reduce) -> bool:
    return spec.num_lanes > 1 and how in spec.reduce_attention + spec.reduce_mlp


def _partial_bytes() -> int:
    return 2 * PARTIAL_ROWS * WARPS * 4


def _is_wide(stage: Stage) -> bool:
    """Whether activations come as float32 (kept as two 16-bit parts) or as 16-bit words."""
    return stage.prologue is Prologue.RMS_NORM or stage.source == "y"


def _activation_bytes(lowering: CudaLowering) -> int:
    return max(
        lowering.padded_k(s) * (4 if _is_wide(s) else 2) for s in matrix_stages(lowering.schedule)
    )


def _attention_bytes(lowering: CudaLowering, splits: int) -> int:
    """Rotated heads and, behind them, either the warps' results or the joined splits."""
    spec = lowering.schedule.spec
    d, group = spec.head_dim, spec.group
    head_groups = -(-group // HEADS_AT_ONCE)
    merge = WARPS * -(-group // head_groups) * (d + 2)
    joins = -(-group // (JOINED + 1)) * -(-splits // JOINED) * d if splits > JOINED else 0
    return _up(4 * ((group + 1) * d + max(merge, joins)), 128)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def render(layout: Layout) -> str:
    """The header's text."""
    lo = layout.lowering
    schedule, spec = lo.schedule, lo.schedule.spec
    head = schedule.stage("lm_head")
    reduces = {how.name: int(how) for how in Reduce}
    head_group = -(-spec.group // -(-spec.group // HEADS_AT_ONCE))
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
        "past_slots": layout.regions["mlp_out_past"].slots,
        "blocks": lo.num_blocks,
        "group": lo.group_size(schedule.stage("qkv_proj")),
        "warps": WARPS,
        "frag_k": lo.frag_k,
        "fragments": lo.fragments,
        "chunk_bytes": lo.chunk_bytes,
        "ring_chunks": layout.ring_chunks,
        "window_chunks": lo.window_chunks,
        "partial_bytes": _partial_bytes(),
        "scratch_bytes": layout.scratch_bytes,
        "splits": layout.splits,
        "split_least": SPLIT_LEAST,
        "heads_at_once": head_group,
        "joined": JOINED,
    }
    flags = {
        "f16": spec.dtype is DType.F16,
        "qkv_bias": spec.qkv_bias,
        "o_bias": spec.o_bias,
        "mlp_bias": spec.mlp_bias,
        "qk_norm": spec.qk_norm,
        "lane_norms": spec.lane_norms,
        "has_past": layout.regions["mlp_out_past"].stride > 0,
        "has_now": layout.regions["mlp_out_now"].stride > 0,
        "mixes": layout.regions["y"].stride > 0,
        "mean": spec.head is Head.MEAN,
        "head_by_lane": schedule.num_shards > 1 and spec.head is Head.VOCAB_PARALLEL,
    }
    lines = ["#include <kog/ptx.h>", "", "namespace kog {"]
    lines += [f"{KNOWN} int {_camel('k_' + k)} = {v};" for k, v in numbers.items()]
    lines += [f"{KNOWN} bool {_camel('k_' + k)} = {str(v).lower()};" for k, v in flags.items()]
    lines.append(f"{KNOWN} float kNormEps = {float(spec.norm_eps)!r}f;")
    lines.append(f"{KNOWN} float kRootLanes = {math.sqrt(schedule.num_shards)!r}f;")
    lines += [f"{KNOWN} int {_camel('k_' + k.lower())} = {v};" for k, v in reduces.items()]
    names = (*LAYER, "lm_head")
    lines.append(f"enum class Step {{ {', '.join(_camel('k_' + n) for n in STEPS)} }};")
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
            "padded_k": lo.padded_k(stage),
            "steps": lo.steps(stage),
            "units": lo.num_units(stage),
            "group": lo.group_size(stage),
            "batch": _batch(lo, stage),
            "bias_at": bias_at,
        }
        bias_at += stage.rows * schedule.num_shards if stage is not head else 0
        body = ", ".join(f"{_camel('k_' + k)} = {v}" for k, v in fields.items())
        wide = str(_is_wide(stage)).lower()
        lines.append(
            f"struct {_camel(name, True)} {{ static constexpr int {body}; "
            f"static constexpr bool kWide = {wide}; }};"
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
)


def _batch(lo: CudaLowering, stage: Stage) -> int:
    """Units whose partial sums are held at once: one row a thread, whole chunks."""
    tiling = lo.tilings[stage.name]
    most = PARTIAL_ROWS // MMA_ROWS  # rows x parts is the same for every tiling
    most = min(most, THREADS // tiling.unit_rows)
    steps = lo.steps(stage)
    return next(n for n in range(most, 0, -1) if n * steps % lo.fragments == 0)


def _camel(name: str, upper: bool = False) -> str:
    first, *rest = name.split("_")
    return (first.capitalize() if upper else first) + "".join(w.capitalize() for w in rest)
