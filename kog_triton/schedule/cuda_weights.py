"""How the weights of one stage lie in the CUDA lowering's stream: 16 bits each, or codes with their scales.

A warp's fragment has as many bytes whatever the weights are: 8 rows by frag_k values of K in 16 bits, by `pack` times
as many where codes take 8 or 4. Behind the codes of all warps' fragments lie their scales, so that one copy brings
both:

    fragment of all warps   [warp][codes]  [warp][scales, then zero points or minimums]

A fragment's codes are `pack` steps of the tensor core along K. Steps that share a scale are a *granule*; a warp's
scales of a fragment are [scale_rows][granules]: one a row, or one where whole fragments share theirs (gate and up are
woven row by row, and each has scales of its own: one for the even and one for the odd rows); zero points and minimums
lie behind them in the same order. Scales that do not differ along K (a channel's, a tensor's) are no part of the
stream: they multiply a row's sum in the end (`row_scales`).

Scales are stored as the checkpoint has them. E4M3 is multiplied as 16-bit values; codes that are whole numbers, or
twice them, meet activations that are whole numbers, too (include/kog/bytes.h). What a code becomes is off by a power of
two, `unit`, which the sums make good.
"""

import math
from dataclasses import dataclass

from kog_triton.errors import ModelError
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import Code, Offset, WeightFormat
from kog_triton.schedule.embedding import embedding_row
from kog_triton.schedule.schedule import Axis, Epilogue, Op, Schedule, Scope, Stage
from kog_triton.schedule.shards import canonical

FRAGMENT_ROWS = 8
QUAD = 4  # values of an embedding's row that a thread reads at a time, of one scale
STEP_VALUES = 32  # of K, that one product of whole numbers takes
# A warp's scales of a fragment take 4 bytes or a multiple of 8: loads of two rows are aligned then
# (include/kog/narrow.h), and those of four warps a whole copy of prompts (include/kog/prompt/pieces.h).
SMALL_RECORD, RECORD_MULTIPLE = 4, 8


@dataclass(frozen=True)
class StreamWeights:
    """Of one stage, for fragments of `frag_k` values of K in 16 bits."""

    format: WeightFormat | None  # None: 16 bits a weight
    frag_k: int
    distinct_rows: int = FRAGMENT_ROWS  # of a fragment, whose scales are stored: all 8, the first 2, or 1

    def __post_init__(self) -> None:
        assert self.distinct_rows in (1, 2, FRAGMENT_ROWS), self.distinct_rows

    @property
    def pack(self) -> int:
        """Weights in the place of one of 16 bits: steps of K of a fragment."""
        return 16 // self.format.code.bits if self.format else 1

    @property
    def scaled(self) -> bool:
        """Whether scales lie in the stream."""
        return self.format is not None and self.format.group_cols > 0

    @property
    def row_scales(self) -> bool:
        """Whether a row has one scale, which multiplies its sum."""
        return self.format is not None and not self.scaled

    @property
    def granule(self) -> int:
        """Values of K of a fragment that share a scale."""
        wide = self.frag_k * self.pack
        return math.gcd(self.format.group_cols, wide) if self.format and self.scaled else wide

    @property
    def granules(self) -> int:
        """Scales of one row of a fragment."""
        return self.frag_k * self.pack // self.granule if self.scaled else 0

    @property
    def scale_rows(self) -> int:
        """Rows of a fragment with scales of their own."""
        return self.distinct_rows if self.scaled else 0

    @property
    def scale_bytes(self) -> int:
        return self.format.scale.bits // 8 if self.format and self.scaled else 0

    @property
    def offset_bytes(self) -> int:
        """Of a zero point, a byte, or a minimum."""
        if not self.format or not self.scaled or self.format.offset is Offset.NONE:
            return 0
        return 1 if self.format.offset is Offset.ZERO_POINT else self.scale_bytes

    @property
    def record_bytes(self) -> int:
        """Beside the codes of one warp's fragment."""
        used = self.scale_rows * self.granules * (self.scale_bytes + self.offset_bytes)
        multiple = SMALL_RECORD if used <= SMALL_RECORD else RECORD_MULTIPLE
        return -(-used // multiple) * multiple

    @property
    def warp_bytes(self) -> int:
        """The codes of one warp's fragment."""
        return FRAGMENT_ROWS * self.frag_k * 2

    @property
    def integer(self) -> bool:
        """Whether the kernel multiplies whole numbers."""
        return self.format is not None and self.format.code is not Code.E4M3

    @property
    def shared_steps(self) -> int:
        """Steps of K of which a token's whole numbers share a scale: all of a fragment of int4 with one scale a row,
        so that their products add up as whole numbers. Of int8, 64 values, one request lost 1.5 % where eight gained 4
        (benchmarks/cuda-log.md#shared-scales)."""
        int4 = self.format is not None and self.format.code is Code.UINT4
        return self.pack if int4 and self.granules <= 1 else 1

    @property
    def sum_bytes(self) -> int:
        """Of the sum of a token's whole numbers that share a scale: weights with offsets multiply it."""
        assert self.format
        return 0 if self.format.offset is Offset.NONE else 4

    def unit(self, dtype: DType) -> float:
        """What a code stands for, over what it is multiplied as: in 16 bits of `dtype`, or as a whole number."""
        if self.format is None:
            return 1.0
        exponents = {
            Code.E4M3: {DType.BF16: 120, DType.F16: 8}.get(dtype, 0),
            Code.INT8: 0,
            Code.UINT4: -4,
            Code.E2M1: -1,
        }
        return 2.0 ** exponents[self.format.code]

    def why_not(self) -> str:
        """Why the stream cannot hold the format with such fragments, "" if it can."""
        how = self.format
        if self.integer and self.frag_k != STEP_VALUES:
            return f"whole numbers take fragments of {STEP_VALUES}, not {self.frag_k}"
        if how is None or not how.group_cols or self.granule % self.frag_k == 0:
            return ""
        return f"groups of {how.group_cols} do not end with fragments of {self.frag_k}"


def stage_weights(schedule: Schedule, stage: Stage, frag_k: int) -> StreamWeights:
    """ModelError where a stage's weights are not all of one format."""
    how = stage_format(schedule, stage)
    return StreamWeights(how, frag_k, _distinct_rows(schedule, stage, how))


def stage_format(schedule: Schedule, stage: Stage) -> WeightFormat | None:
    """The one format of a stage's matrices in all layers; None for 16 bits."""
    known = dict(schedule.spec.narrow)
    layers = next(s.repeat for s in schedule.segments if stage in s.stages)
    names = [canonical(stage, w, layer) for layer in range(layers) for w in stage.weights]
    first = known.get(names[0])
    for name in names:
        if (other := known.get(name)) != first:
            raise ModelError(
                f"{names[0]} is {_called(first)} and {name} is {_called(other)}: a kernel takes one"
                f" format in all of {stage.name}"
            )
    return first


def _called(how: WeightFormat | None) -> str:
    return how.name if how else "16 bits wide"


def unreadable(schedule: Schedule) -> str:
    """Why the CUDA kernel does not read a model's narrow weights, "" if it does."""
    unknown = {how.name: None for _, how in schedule.spec.narrow if how.offset and not how.group_cols}
    if unknown:
        return f"it does not read {', '.join(unknown)} weights with zero points or minimums"
    cut = {
        how.name: None for _, how in schedule.spec.narrow if how.code is not Code.E4M3 and how.group_cols % STEP_VALUES
    }
    if cut:
        return f"it reads groups that {STEP_VALUES} divides, not {', '.join(cut)}"
    row = embedding_row(schedule.spec)
    if row and (row.cols % QUAD or row.group % QUAD):
        return f"it reads narrow embeddings of rows and groups that {QUAD} divides, not of {row.cols} and {row.group}"
    try:
        for _, stage in schedule.walk():
            if stage.op is Op.MATVEC and (how := stage_format(schedule, stage)):
                _check_head(schedule, stage)
                _check_cut(schedule, stage, how)
    except ModelError as error:
        return str(error)
    return ""


def _check_head(schedule: Schedule, stage: Stage) -> None:
    if stage.epilogue is Epilogue.LOGITS and schedule.spec.num_lanes > 1:
        raise ModelError("the cuda backend takes narrow heads of plain models alone")


def _check_cut(schedule: Schedule, stage: Stage, how: WeightFormat) -> None:
    """ModelError where the shards of a plain model would not have whole scale groups, or not the model's FFN alone."""
    if schedule.num_shards == schedule.spec.num_lanes:
        return
    if schedule.shard_ffn * schedule.num_shards != schedule.spec.intermediate_size:
        raise ModelError(
            f"{schedule.spec.intermediate_size} outputs of an FFN of {how.name} weights do not divide over "
            f"{schedule.num_ranks} GPUs"
        )
    if stage.cut is Axis.K and how.group_cols and stage.cols % how.group_cols:
        raise ModelError(
            f"groups of {how.group_cols} {how.name} weights do not divide the {stage.cols} columns that each of "
            f"{schedule.num_ranks} GPUs has of {stage.name}"
        )


def _distinct_rows(schedule: Schedule, stage: Stage, how: WeightFormat | None) -> int:
    """Of eight rows that lie together in a unit, how many have scales of their own, in every fragment."""
    if how is None or how.group_rows == 1:
        return FRAGMENT_ROWS
    # Gate and up are woven row by row, others stacked.
    woven = 2 if stage.epilogue is Epilogue.SILU_MUL else 1
    rows = FRAGMENT_ROWS // woven  # of each matrix
    sizes = [_shard_rows(schedule, stage, w) for w in stage.weights]
    if stage.scope is Scope.ALL:
        sizes += [schedule.head_rows(rank)[0] for rank in range(schedule.num_ranks)]
    sizes += [how.group_rows] if how.group_rows else []
    return woven if all(size % rows == 0 for size in sizes) else FRAGMENT_ROWS


def _shard_rows(schedule: Schedule, stage: Stage, weight: str) -> int:
    """A shard's rows of one of the matrices that a stage stacks."""
    heads = {"q_proj": schedule.shard_heads}
    heads |= dict.fromkeys(("k_proj", "v_proj"), schedule.shard_kv_heads)
    return heads[weight] * schedule.spec.head_dim if weight in heads else stage.rows // len(stage.weights)
