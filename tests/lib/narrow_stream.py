"""Narrow weights in the CUDA lowering's stream, read back by the rule that its kernel follows, in numpy.

Nothing here is the packing's: codes become values by what the kernel's shifts, masks and tables make of stored words
(include/kog/narrow.h), and where which value lies is what the tensor core's fragment says (include/kog/matvec.h).
"""

from dataclasses import replace

import numpy as np
import torch

from kog_triton.checkpoint.narrow import SYMMETRIC, NarrowTensor, as_it_is
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights, nearest
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import Code, Offset, Scale, WeightFormat
from kog_triton.schedule import wire
from kog_triton.schedule.cuda import WARPS, CudaLowering
from kog_triton.schedule.narrow_packing import NarrowMatrix
from kog_triton.schedule.schedule import Schedule, Stage
from kog_triton.schedule.shards import shard_matrix

ROWS, QUARTERS = 8, 4
_HALF = {Scale.BF16: DType.BF16, Scale.F16: DType.F16}


class NarrowWeights:
    """A `WeightSource` whose narrow weights are another's, round to nearest. Blocks with offsets have the scales and
    offsets of their first rows: weights of some kind."""

    def __init__(self, spec, wide):
        self.spec, self._wide, self._formats = spec, wide, dict(spec.narrow)

    def narrow(self, name, bring=as_it_is) -> NarrowTensor:
        return self.stored(name).moved(bring)

    def stored(self, name) -> NarrowTensor:
        how, wide = self._formats[name], self._wide.load(name)
        if how.offset is Offset.NONE or how.group_rows == 1:
            return nearest(wide, how)
        rows = nearest(wide, replace(how, group_rows=1))
        scales, offsets = (v[..., :: how.group_rows, :] for v in (rows.scales, rows.offsets))
        return NarrowTensor(how, rows.codes, scales, offsets)

    def load(self, name):
        if name in self._formats:
            return self.narrow(name).unpack()
        return self._wide.load(name)

    @property
    def arrays(self):
        """Values by name, float32."""
        spec = self.spec
        names = {n.format(i) for n in spec.shapes for i in range(spec.num_layers)}
        return {n: self.load(n).float().numpy() for n in names}


def random_weights(spec):
    """Random ones, of which those that the spec says so are narrow."""
    return (NarrowRandomWeights if spec.narrow else RandomWeights)(spec)


def narrow_spec(how, head=False, **sizes):
    """A small model whose layers' matrices, and head if asked for, are narrow; groups need not divide them."""
    from tests.lib.ring_walker import spec_of

    spec = spec_of(**sizes)
    layers = [n for n in spec.shapes if n.endswith("_proj")]
    names = [n.format(i) for n in layers for i in range(spec.num_layers)]
    if head:
        names.append("embed" if spec.tied_embeddings else "lm_head")
    return spec.replace(narrow=tuple((name, how) for name in names))


def matrices_of(schedule: Schedule, stage: Stage, parts: list[NarrowTensor]) -> list[NarrowMatrix]:
    """A stage's matrices, a shard each: codes, and every row's scales as bytes."""

    def stacked(arrays):
        return np.concatenate([shard_matrix(schedule, stage, a) for a in arrays], -2)

    codes = stacked([part.codes.numpy().view(np.uint8) for part in parts])

    def by_row(values):
        rows = []
        for part, groups in zip(parts, values, strict=True):
            bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[groups.element_size()]
            index = np.arange(part.shape[-2]) // (part.format.group_rows or part.shape[-2])
            rows.append(groups.view(bits).numpy()[..., index, :])
        of_all = np.ascontiguousarray(stacked(rows))
        return of_all.view(np.uint8).reshape(*of_all.shape, of_all.itemsize)

    stored = [codes, by_row([part.scales for part in parts])]
    if parts[0].offsets is not None:
        stored.append(by_row([part.offsets for part in parts]))
    return [NarrowMatrix(*shard) for shard in zip(*stored, strict=True)]


def row_scales_of(schedule: Schedule, stage: Stage, parts: list[NarrowTensor]) -> np.ndarray:
    """float64 [shards, rows] of a stage whose rows have one scale each."""
    scales = []
    for part in parts:
        values = part.scale_values().numpy().astype(np.float64)
        rows = np.arange(part.shape[-2]) // (part.format.group_rows or part.shape[-2])
        scales.append(shard_matrix(schedule, stage, values[..., rows, :]))
    return np.concatenate(scales, -2)[..., 0]


def unpacked(code: Code, q: np.ndarray, dtype: DType) -> np.ndarray:
    """Stored words of a thread, uint32 [..., words], as its values in the order of K, [..., pairs of values, 2]."""

    def bits(shift, count):
        return ((q >> np.uint32(shift)) & np.uint32(2**count - 1)).astype(np.int64)

    def in_order(values):  # of each word
        return np.stack(values, -1).astype(np.float64).reshape(*q.shape[:-1], -1, 2)

    if code is Code.UINT4:
        signed = [(bits(4 * i, 4) + 8) % 16 - 8 for i in range(8)]
        return in_order(signed[0::2] + signed[1::2])
    if code is Code.E2M1:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        return in_order([table[bits(4 * i, 3)] * (1 - 2 * bits(4 * i + 3, 1)) for i in range(8)])
    if code is Code.INT8:
        return in_order([(bits(8 * i, 8) + 128) % 256 - 128 for i in range(4)])
    assert code is Code.E4M3

    # Of each half of a word the bits of two codes, from the sign down.
    first, second = (
        ((15, 13, 12, 11, 10, 9, 8, 7), (14, 6, 5, 4, 3, 2, 1, 0))
        if dtype is DType.F16
        else ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0))
    )

    def value(half, places):
        sign, *bits = ((half >> np.uint32(i)) & np.uint32(1) for i in places)
        exponent = sum(bit * 2**i for bit, i in zip(bits[:4], (3, 2, 1, 0), strict=True))
        mantissa = sum(bit * 2**i for bit, i in zip(bits[4:], (2, 1, 0), strict=True)) / 8.0
        normal = (1 + mantissa) * 2.0 ** (exponent.astype(np.float64) - 7)
        return np.where(exponent == 0, mantissa * 2.0**-6, normal) * (1 - 2.0 * sign)

    low, high = q & np.uint32(0xFFFF), q >> np.uint32(16)
    pairs = [np.stack([value(low, p), value(high, p)], -1) for p in (first, second)]
    return np.stack(pairs, -2).reshape(*q.shape[:-1], -1, 2)


def scale_values(kind: Scale, stored: np.ndarray) -> np.ndarray:
    """Scales [..., bytes] as numbers."""
    if kind is Scale.F32:
        return stored.copy().view(np.float32)[..., 0].astype(np.float64)
    if kind is Scale.E8M0:
        return 2.0 ** (stored[..., 0].astype(np.float64) - 127)
    bits = stored.copy().view(np.uint16)[..., 0]
    return wire.from_half(bits, _HALF[kind]).astype(np.float64)


def narrow_fragments(lo: CudaLowering, stage: Stage, slot: np.ndarray) -> np.ndarray:
    """A ring slot's bytes as weights, float64 [fragments, warps, 8 rows, values of K]."""
    weights = lo.weights[stage.name]
    how: WeightFormat = weights.format
    step, words = weights.frag_k, weights.frag_k // 8
    each = lo.fragment_bytes(stage)
    slot = slot[: lo.fragments * each].reshape(lo.fragments, each)
    codes, scales = np.split(slot, [WARPS * weights.warp_bytes], 1)
    stored = np.ascontiguousarray(codes).view(np.uint32)
    stored = stored.reshape(lo.fragments, WARPS, ROWS, QUARTERS, words)
    targets = unpacked(how.code, stored, lo.schedule.spec.dtype)
    # Target words in order: steps of K, each with so many of this quarter.
    targets = targets.reshape(lo.fragments, WARPS, ROWS, QUARTERS, weights.pack, words, 2)
    values = targets.transpose(0, 1, 2, 4, 3, 5, 6).reshape(lo.fragments, WARPS, ROWS, -1)
    assert values.shape[-1] == step * weights.pack
    if not weights.scaled:
        return values
    shape = (lo.fragments, WARPS, weights.scale_rows, weights.granules, weights.scale_bytes)
    each_warp = scales.reshape(lo.fragments, WARPS, weights.record_bytes)
    cut = weights.scale_rows * weights.granules * weights.scale_bytes

    def spread(of_granules):  # rows with scales of their own in turn
        of_granules = np.tile(of_granules, (1, 1, ROWS // weights.scale_rows, 1))
        return np.repeat(of_granules, values.shape[-1] // weights.granules, -1)

    scale = spread(scale_values(how.scale, each_warp[..., :cut].reshape(shape)))
    used = cut + weights.scale_rows * weights.granules * weights.offset_bytes
    assert not each_warp[..., used:].any()
    beside = np.ascontiguousarray(each_warp[..., cut:used])
    if how.offset is Offset.ZERO_POINT:
        points = beside.view(np.int8) if how.code is Code.INT8 else beside
        points = spread(points.reshape(shape[:-1]).astype(np.float64))
        return (values + (SYMMETRIC if how.code is Code.UINT4 else 0) - points) * scale
    if how.offset is Offset.MINIMUM:
        minimum = spread(scale_values(how.scale, beside.reshape(shape)))
        return (values + (SYMMETRIC if how.code is Code.UINT4 else 0)) * scale + minimum
    assert not beside.size
    return values * scale
