"""The layout as a C++ header: every size, offset and table that the kernel is specialised for.

Numbers come from the spec, the schedule, the lowering and the layout; nothing is typed twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import IntEnum

from kog_triton.backends import request_words
from kog_triton.backends.cuda.layout import attention, batches, protocol
from kog_triton.backends.cuda.layout.attention import MERGED, MERGED_LENGTH, split_least
from kog_triton.backends.cuda.layout.exchanges import BINS, FLAGS_TOGETHER, LINE_WORDS
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.names import POINTS, STEPS, stamp_words
from kog_triton.backends.logprob_words import RECORD_WORDS
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from kog_triton.model.weight_format import Code, Offset, Scale
from kog_triton.sampling import definition, fixed
from kog_triton.schedule import wire
from kog_triton.schedule.cuda import WARPS, CudaLowering, is_wide, slice_values, unit_period
from kog_triton.schedule.cuda_weights import StreamWeights
from kog_triton.schedule.embedding import embedding_row
from kog_triton.schedule.lowering import layer_matrices, matrix_stages
from kog_triton.schedule.schedule import Stage
from kog_triton.schedule.topology import KB

# Of a block's stream, that wait in the L2 while its ring is full; all blocks' take a third of it at most.
AHEAD_BYTES = 128 * 1024
# Between two times 16 KB on their way there; the same in kernels of columns. Of an H200, as windows are
# (schedule/cuda.py).
AHEAD_TICKS, COLUMN_AHEAD_TICKS = 800, 1600
TAKEN_WORDS = 16  # registers for weights that wait for operands (columns/layer.h)
KNOWN = "[[maybe_unused]] constexpr"  # not every model needs every number


def render(layout: Layout) -> str:
    """The header's text."""
    schedule, spec = layout.lowering.schedule, layout.lowering.schedule.spec
    reduces = {how.name: int(how) for how in Reduce}
    consumers = f"constexpr int kConsumers = {batches.THREADS};"
    lines = [f"namespace kog {{ {consumers} }}"]
    lines += ['#define KOG_WORD_SCOPE "sys"'] if schedule.num_ranks > 1 else []
    lines += ["#include <kog/ptx.h>", "", "namespace kog {"]
    lines += [f"{KNOWN} int {_camel('k_' + k)} = {v};" for k, v in _numbers(layout).items()]
    lines += [f"{KNOWN} bool {_camel('k_' + k)} = {str(v).lower()};" for k, v in _flags(layout).items()]
    lines.append(f"{KNOWN} u32 kCachePlanes = {math.prod(layout.cache_shape[:4])};")
    lines.append(f"{KNOWN} float kNormEps = {float(spec.norm_eps)!r}f;")
    lines.append(f"{KNOWN} float kPairScale = {wire.SCALE[spec.dtype]!r}f;")
    lines.append(f"{KNOWN} float kRootLanes = {math.sqrt(schedule.num_shards)!r}f;")
    lines += [f"{KNOWN} int {_camel('k_' + k.lower())} = {v};" for k, v in reduces.items()]
    lines += protocol.declarations(schedule.num_ranks)
    lines += _sampling()
    lines.append(f"enum class Step {{ {', '.join(_camel('k_' + n) for n in STEPS)} }};")
    lines.append(f"enum class Point {{ {', '.join(_camel('k_' + n) for n in POINTS)} }};")
    lines.append(_constants("EmbeddingRow", _embedding(spec)))
    for name, region in layout.regions.items():
        lines.append(_constants(_camel(name, True) + "Words", asdict(region)))
    places = attention.scratch_places(schedule.spread, layout.new_rows)
    lines.append(_constants("ScratchPlaces", places))
    if layout.columns > 1:
        lines.append(_constants("HeadPlaces", layout.head_places))
    lines += _stages(layout)
    lines += _tables(layout)
    return "\n".join([*lines, "}  // namespace kog", ""])


def _numbers(layout: Layout) -> dict[str, int]:
    """Every size, by the name of its constant."""
    lo = layout.lowering
    schedule, spec = lo.schedule, lo.schedule.spec
    one = layout.columns == 1
    return {
        "layers": spec.num_layers,
        "hidden": spec.hidden_size,
        "ranks": schedule.num_ranks,
        "lanes": schedule.num_shards,
        "rank_lanes": schedule.shards_per_rank,
        "heads": schedule.shard_heads,
        "kv_heads": schedule.shard_kv_heads,
        "head_dim": spec.head_dim,
        "vocab": spec.vocab_size,
        "delay": spec.delay,
        "blocks": lo.num_blocks,
        "group": lo.group_size(schedule.stage("qkv_proj")),
        "warps": WARPS,
        "threads": layout.threads,
        "frag_k": lo.frag_k,
        "fragments": lo.fragments,
        "slice": slice_values(schedule, lo.frag_k),
        "ring_slot_bytes": lo.ring_slot_bytes,
        "ring_slots": layout.ring_slots,
        "window_slots": layout.windows[0],
        "calm_slots": layout.windows[1],
        "ahead_slots": min(AHEAD_BYTES, lo.gpu.l2_bytes // 3 // lo.num_blocks) // lo.ring_slot_bytes,
        "ahead_ticks": int((AHEAD_TICKS if one else COLUMN_AHEAD_TICKS) * lo.ring_slot_bytes / (16 * KB) / lo.pace),
        "columns": layout.columns,
        "partial_bytes": layout.partial_bytes,
        "sampling_bytes": layout.partial_bytes or layout.scratch_bytes,
        "small_bytes": layout.small_bytes,
        "scratch_bytes": layout.scratch_bytes,
        "splits": layout.splits,
        "split_least": split_least(spec),
        **attention.numbers(schedule.spread),
        "merged": min(MERGED, layout.splits),
        "merged_length": MERGED_LENGTH,
        "part_queries": layout.part_queries,
        "head_parts": layout.head_parts,
        "block_kv_tasks": layout.block_kv_tasks,
        "attention_scratch_at": layout.stage_bytes(schedule.stage("o_proj"))
        if layout.columns > 1
        else layout.staged_bytes(schedule.stage("o_proj")),
        "joined_at": layout.joined_at,
        "taken_words": TAKEN_WORDS,
        "flags_together": FLAGS_TOGETHER,
        "line_words": LINE_WORDS,
        "request_words": request_words.capacity(spec.vocab_size),
        "mask_words": -(-spec.vocab_size // 32),
        "bins": BINS,
        "record_words": RECORD_WORDS,
        "most_logprobs": request_words.MOST_LOGPROBS,
        "distance_bits": fixed.DISTANCE_BITS,
        "max_requests": protocol.MAX_REQUESTS,
        "profile_tokens": max(1, layout.profile_tokens),
        "points": len(POINTS),
        "stamp_words": stamp_words(layout.lowering.schedule.num_ranks),
        "pair_rotation": wire.PAIR_ROTATION,
        "exponent_top": wire.EXPONENT_TOP,
    }


def _flags(layout: Layout) -> dict[str, bool]:
    """What the model has."""
    schedule, spec = layout.lowering.schedule, layout.lowering.schedule.spec
    mixes = layout.region("part").stride > 0
    return {
        "profile": layout.profile_tokens > 0,
        "tokens_only": layout.tokens_only,
        "deep": layout.deep,
        "chunk": layout.chunk,
        "streams": layout.lowering.streams,
        "results_over_sums": layout.results_over_sums,
        "f16": spec.dtype is DType.F16,
        "qkv_bias": spec.qkv_bias,
        "o_bias": spec.o_bias,
        "mlp_bias": spec.mlp_bias,
        "qk_norm": spec.qk_norm,
        "lane_norms": spec.lane_norms,
        "same_windows": len(set(spec.windows)) == 1,
        "has_delayed": layout.region("mlp_out_delayed").stride > 0,
        "has_now": layout.region("mlp_out_now").stride > 0,
        "sends": layout.joined_at > 0,
        "mixes": mixes,
        "mean": mixes and spec.head is Head.MEAN,
        "concat": mixes and spec.head is Head.CONCAT,
        # Each lane's stream is normed before it is sent.
        "normed_mix": mixes and spec.head in (Head.MEAN, Head.CONCAT),
        "head_by_lane": schedule.num_shards > 1 and spec.head is Head.VOCAB_PARALLEL,
    }


def _stages(layout: Layout) -> list[str]:
    """A struct a matrix stage, a layer's in their order, and how many rows their biases have together."""
    lo = layout.lowering
    schedule = lo.schedule
    kinds = dict.fromkeys(lo.weights[stage.name] for stage in matrix_stages(schedule))
    names = {kind: f"Weights{n}" for n, kind in enumerate(kinds)}
    lines = render_weights({name: kind for kind, name in names.items()})
    layer = layer_matrices(schedule)
    places, bias_rows = bias_places(lo)
    for stage in matrix_stages(schedule):
        name, tiling = stage.name, lo.tilings[stage.name]
        bias_at, row_scale_at = places.get(name, (bias_rows, 0))
        fields = {
            "rows": lo.num_rows(stage),
            "cols": stage.cols,
            "parts": tiling.k_parts,
            "unit_rows": tiling.unit_rows,
            "fragment_rows": tiling.fragment_rows,
            "padded_k": lo.padded_k(stage),
            "steps": lo.steps(stage),
            "units": lo.num_units(stage),
            "group": lo.group_size(stage),
            "shift": tiling.shift,
            "checked_units": _checked_units(lo, stage),
            "unit_fragments": lo.unit_fragments(stage),
            "period": unit_period(lo.unit_fragments(stage), lo.fragments),
            "long_units": lo.long_units(stage),
            "bias_at": bias_at,
            "wide": is_wide(stage),
            **layout.products(stage),
            "row_scales": lo.weights[name].row_scales,
            "row_scale_at": row_scale_at,
        }
        identity = f"static constexpr StageId kId = StageId::{_camel('k_' + name)};"
        identity += f" using Weights = {names[lo.weights[name]]};"
        identity += f" static constexpr float kSumUnit = {sum_unit(lo, stage)!r}f;"
        lines.append(_constants(_camel(name, True), fields, identity))
    order = ", ".join(_camel(stage.name, True) for stage in layer)
    lines += ["template <class... Stages> struct Matrices;", f"using LayerMatrices = Matrices<{order}>;"]
    return [*lines, f"constexpr int kBiasRows = {bias_rows};"]


def bias_places(lo: CudaLowering) -> tuple[dict[str, tuple[int, int]], int]:
    """Of a layer's matrices where their biases begin and what multiplies their sums, among a layer's rows of `biases`
    (memory.py), and how many rows these are."""
    places, at = {}, 0
    for stage in layer_matrices(lo.schedule):
        rows = stage.rows * lo.schedule.num_shards
        places[stage.name] = at, at + rows
        at += 2 * rows if lo.weights[stage.name].row_scales else rows
    return places, at


def row_scales_at(lo: CudaLowering, stage: str, layer: int, rank: int) -> int:
    """Where the scales of rows of a rank's shards begin in `biases`, in bytes."""
    places, rows = bias_places(lo)
    own = rank * lo.schedule.shards_per_rank * lo.schedule.stage(stage).rows
    return 4 * (layer * rows + places[stage][1] + own)


def render_weights(kinds: Mapping[str, StreamWeights]) -> list[str]:
    """A struct each, by its name: how a stage's weights lie in the stream (include/kog/narrow.h)."""
    return [
        *_enum("Codes", Code),
        *_enum("ScaleKind", Scale, "scale_"),
        *_enum("OffsetKind", Offset, "offset_"),
        *(_constants(name, _weight_fields(kind)) for name, kind in kinds.items()),
    ]


def _weight_fields(weights: StreamWeights) -> dict[str, int]:
    how = weights.format
    return {
        "codes": int(how.code) if how else -1,
        "pack": weights.pack,
        "granules": weights.granules,
        "scale_rows": weights.scale_rows,
        "scale_kind": int(how.scale) if how else -1,
        "scale_bytes": weights.scale_bytes,
        "offset_kind": int(how.offset) if how else 0,
        "offset_bytes": weights.offset_bytes,
        "record_bytes": weights.record_bytes,
        "integer": weights.integer,
        "shared_steps": weights.shared_steps,
    }


def _embedding(spec: ModelSpec) -> dict[str, int]:
    row = embedding_row(spec)
    if row is None:
        return {"codes": -1}
    return {
        "codes": int(row.format.code),
        "offset_kind": int(row.format.offset),
        "zero": row.zero,
        "group": row.group,
        "groups": row.groups,
        "scales_at": row.code_bytes,
        "bytes": row.bytes,
    }


def _enum(name: str, kinds: type[IntEnum], prefix: str = "") -> list[str]:
    """Its members as constants, and none."""
    members = [f"{_camel('k_' + prefix + kind.name.lower())} = {int(kind)}" for kind in kinds]
    return [f"enum {name} {{ {', '.join(members)} }};"]


def gain_scale(lo: CudaLowering, stage: Stage) -> float:
    """What the gains that come before a stage are multiplied with: where codes become tiny numbers the products would
    else be below what float32 holds in full."""
    spec = lo.schedule.spec
    return wire.SCALE[spec.dtype] if lo.weights[stage.name].unit(spec.dtype) > 1 else 1.0


def sum_unit(lo: CudaLowering, stage: Stage) -> float:
    """What a stage's sums are multiplied with, for what the operands and the codes carry."""
    spec = lo.schedule.spec
    carried = gain_scale(lo, stage) if is_wide(stage) else wire.SCALE[spec.dtype]
    return lo.weights[stage.name].unit(spec.dtype) / carried


def _checked_units(lo: CudaLowering, stage: Stage) -> int:
    """Of the first and the last layer: block.h makes the same number of the units that it deals out."""
    n = 1
    for layer in (0, lo.schedule.spec.num_layers - 1):
        for place in range(lo.group_size(stage)):
            n = (31 * n + lo.block_units(stage, layer, place).start) % 0x7FFFFFFF
    return n


def _tables(layout: Layout) -> list[str]:
    """What differs from layer to layer."""
    spec = layout.lowering.schedule.spec
    lines = []
    tables: dict[str, Sequence[int]] = {
        "windows": spec.windows,
        "reduce_attention": spec.reduce_attention,
        "reduce_mlp": spec.reduce_mlp,
    }
    if layout.columns > 1:
        # Outputs that a step sends to other lanes before each layer, then those of all layers.
        for name, sent in (("attention_sends", "attention_out_sent"), ("mlp_sends", "mlp_out_sent")):
            layers = layout.kernel.exchange(sent).layers or ()
            tables[name] = [sum(n < i for n in layers) for i in range(spec.num_layers + 1)]
    for name, values in tables.items():
        text = ", ".join(str(int(v)) for v in values)
        lines.append(f"KOG_CONSTANT int {_camel('k_' + name)}[] = {{{text}}};")
    return lines


def _sampling() -> list[str]:
    """Places of a request's words, and the definition's numbers."""
    flags = ", ".join(f"{_camel('k_' + (flag.name or '').lower())} = {int(flag)}" for flag in request_words.Flag)
    return [
        _constants("Request", request_words.OFFSETS),
        f"enum Flag : unsigned {{ {flags} }};",
        f"{KNOWN} double kNoiseScale = {fixed.NOISE_SCALE!r};",
        f"{KNOWN} double kLog2eScale = {definition.LOG2E_SCALE!r};",
        f"{KNOWN} long long kLog2Log2E = {fixed.LOG2_LOG2E}, kMaxDistance = {fixed.MAX_DISTANCE};",
        f"KOG_CONSTANT unsigned kExp2[] = {{{', '.join(f'{c}u' for c in fixed.EXP2)}}};",
    ]


def _constants(name: str, values: Mapping[str, int], more: str = "") -> str:
    """A struct of nothing but numbers, and `more`."""
    body = ", ".join(f"{_camel('k_' + k)} = {str(v).lower()}" for k, v in values.items())
    return f"struct {name} {{ static constexpr int {body}; {more}}};"


def _camel(name: str, upper: bool = False) -> str:
    first, *rest = name.split("_")
    return (first.capitalize() if upper else first) + "".join(w.capitalize() for w in rest)
