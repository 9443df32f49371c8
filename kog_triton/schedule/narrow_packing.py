"""Narrow weights in the order in which the CUDA lowering reads them: codes, and behind them their scales.

`cuda_weights.py` says where what lies; this says in which order the codes of one thread do. A thread of a warp has a
quarter of a row of each of the fragment's steps. Codes lie so that few operations on a stored word reach all of them:

    e4m3     as words of two 16-bit values, a *target word* each: bytes 1 and 3 become one, bytes 0 and 2 the next. Of
             the two codes a (byte 1 or 3) and b of each half of a word a lies where a 16-bit value has it, and b in two
             parts: s_a b6.4 s_b a6.0 b3.0 for bfloat16, s_a s_b a6.0 b6.0 for float16
    int8     two words a step: bytes are values of K in order
    int4     a word a step, of two's complement, a code less 8: the low nibbles of its bytes are the first four values
             of K, the high ones the others. Either becomes the high nibble of a byte
    e2m1     a word a step: nibbles are values of K in order, each picks its magnitude and sign from a table

Bits are only moved, and arrays may be numpy's or torch's: packing runs where the weights are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kog_triton.model.spec import DType
from kog_triton.model.weight_format import Code
from kog_triton.schedule.cuda import MMA_ROWS, WARPS, CudaLowering
from kog_triton.schedule.cuda_weights import StreamWeights
from kog_triton.schedule.lowering import PADDING
from kog_triton.schedule.packing import index_like, new_like, permute
from kog_triton.schedule.schedule import Stage

QUARTERS = 4  # of a row, a thread each
ZERO = {Code.UINT4: np.uint8(8)}  # the code that stands for zero, where another does


@dataclass(frozen=True)
class NarrowMatrix:
    """A shard's matrix, stacked as the stage stacks its weights.

    codes    uint8 [rows, cols]
    scales   uint8 [rows, groups along K, bytes], their bits as they are stored; empty where a row has one
    offsets  of the same kind: zero points or minimums; None without
    """

    codes: Any
    scales: Any
    offsets: Any = None

    def of_rows(self, first: int, last: int) -> "NarrowMatrix":
        parts = (self.codes, self.scales, self.offsets)
        return NarrowMatrix(*(None if part is None else part[first:last] for part in parts))


def pack_narrow(lowering: CudaLowering, stage: Stage, layer: int, blocks: list[int], rank: int, w: NarrowMatrix) -> Any:
    """Ring slots of one stage, of blocks with equally many units: uint8 [blocks, slots, bytes of a full slot]."""
    weights, tiling = lowering.weights[stage.name], lowering.tilings[stage.name]
    assert weights.format is not None
    each, parts, padded = lowering.unit_fragments(stage), tiling.k_parts, lowering.padded_k(stage)
    rows = lowering.rows_of_blocks(stage, layer, lowering.group_index(stage, np.array(blocks)), rank)
    count, units = len(blocks), rows.shape[1] // tiling.unit_rows
    groups = WARPS // parts
    real = np.flatnonzero(rows.reshape(-1) != PADDING)
    taken = index_like(w.codes, rows.reshape(-1)[real])

    def by_fragment(of_k: Any, per_fragment: int) -> Any:
        """[rows of all blocks, values along K, ...] as [block, unit, fragment, warp, row, value, ...]."""
        shape = (count, units, groups, MMA_ROWS, parts, each, per_fragment)
        extra = of_k.shape[2:]
        axes = (0, 1, 5, 2, 4, 3, 6, *range(7, 7 + len(extra)))
        ordered = permute(of_k.reshape((*shape, *extra)), axes)
        return ordered.reshape((count, units, each, WARPS, MMA_ROWS, per_fragment, *extra))

    flat = new_like(w.codes, (rows.size, padded)) + ZERO.get(weights.format.code, 0)
    flat[index_like(w.codes, real), : stage.cols] = w.codes[taken]
    wide = weights.frag_k * weights.pack
    codes = by_fragment(flat, wide)[..., index_like(w.codes, stored_order(weights))]
    if weights.format.code is Code.E4M3:
        codes = _paired(codes, lowering.schedule.spec.dtype)
    elif weights.pack == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    if weights.format.code is Code.UINT4:
        codes = codes ^ 0x88  # less 8 each
    stored = [codes.reshape(count, units * each, WARPS * weights.warp_bytes)]
    if weights.scaled:
        beside = [w.scales] if w.offsets is None else [w.scales, w.offsets]
        inside, of = group_of_granule(weights, stage.cols)
        record = new_like(w.scales, (count, units * each, WARPS, weights.record_bytes))
        at = 0
        for values in beside:
            spread = new_like(values, (rows.size, padded // weights.granule, values.shape[-1]))
            columns = values[taken][:, index_like(values, of)]
            spread[index_like(values, real)[:, None], index_like(values, inside)] = columns
            some = by_fragment(spread, weights.granules)[..., : weights.scale_rows, :, :]
            size = weights.scale_rows * weights.granules * values.shape[-1]
            record[..., at : at + size] = some.reshape(count, units * each, WARPS, size)
            at += size
        stored.append(record.reshape(count, units * each, WARPS * weights.record_bytes))
    slots = -(-units * each // lowering.fragments)
    out = new_like(w.codes, (count, slots * lowering.fragments, lowering.fragment_bytes(stage)))
    at = 0
    for part in stored:
        out[:, : units * each, at : at + part.shape[-1]] = part
        at += part.shape[-1]
    return out.reshape(count, slots, lowering.fragments * out.shape[2])


def _paired(codes: Any, dtype: DType) -> Any:
    """Codes of E4M3 [..., 2 n], b before a, as as many bytes, the low one of each half of a word first."""
    a, b = codes[..., 1::2], codes[..., 0::2]
    out = new_like(codes, codes.shape)
    if dtype is DType.F16:
        out[..., 0::2] = (a & 1) << 7 | b & 127
        out[..., 1::2] = a & 128 | (b & 128) >> 1 | (a & 127) >> 1
    else:
        out[..., 0::2] = (a & 15) << 4 | b & 15
        out[..., 1::2] = a & 128 | b & 112 | (b & 128) >> 4 | (a & 112) >> 4
    return out


def stored_order(weights: StreamWeights) -> np.ndarray:
    """Which value of K of a fragment's row each stored code is: int64 [frag_k * pack], thread after thread."""
    assert weights.format is not None
    each = weights.frag_k // QUARTERS  # of a thread and step
    quarter, step, place = np.meshgrid(np.arange(QUARTERS), np.arange(weights.pack), np.arange(each), indexing="ij")
    value = place
    if weights.format.code is Code.E4M3:  # the two target words of each two stored ones, then their halves
        value = place // 4 * 4 + 2 * (1 - place % 2) + place % 4 // 2
    elif weights.format.code is Code.UINT4:  # pairs become a byte
        value = place // 2 + place % 2 * (each // 2)
    order: np.ndarray = (step * weights.frag_k + quarter * each + value).reshape(-1)
    return order


def group_of_granule(weights: StreamWeights, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Granules of a row that lie within its columns, and the scale group of each."""
    assert weights.format is not None
    inside = np.arange(-(-cols // weights.granule))
    return inside, inside * weights.granule // weights.format.group_cols


def scales_by_row(how_group_rows: int, scales: Any, rows: int) -> Any:
    """Scales [..., row groups, column groups] as [..., rows, column groups]."""
    group = np.arange(rows) // (how_group_rows or rows)
    return scales[..., index_like(scales, group), :]
