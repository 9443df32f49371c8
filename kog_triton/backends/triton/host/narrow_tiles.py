"""Narrow weights of a checkpoint as the Triton kernel's tiles, and back as values."""

from collections.abc import Sequence
from functools import partial

import torch

from kog_triton.backends.narrow import Narrow, code_values
from kog_triton.model.weight_format import Offset
from kog_triton.schedule.lowering import row_order
from kog_triton.schedule.narrow_packing import scales_by_row
from kog_triton.schedule.schedule import Epilogue, Stage
from kog_triton.schedule.triton import StageTiles
from kog_triton.schedule.triton_codes import TileCodes, pack_codes, unpack_codes
from kog_triton.schedule.triton_packing import tiles_of

Tensor = torch.Tensor


def pack_narrow_tiles(stage: Stage, t: StageTiles, warps: int, group: int, parts: Sequence[Narrow]) -> Tensor:
    """All blocks' tiles of one stage, int32 [words of all]; `parts` are the matrices that the stage stacks."""
    assert t.codes
    codes, *by_row = (torch.cat(of) for of in zip(*(_rows(t.codes, p) for p in parts), strict=True))
    if stage.epilogue is Epilogue.SILU_MUL:
        order = torch.tensor(row_order(stage, stage.rows).tolist(), device=codes.device)
        codes, by_row = codes[order], [values[order] for values in by_row]
    shape = (group, t.units, t.tile_rows)
    rows = codes.new_zeros(group * t.block_rows, 2 * t.row_words)
    rows[: t.rows, : t.cols] = codes
    given = rows.view(*shape, -1)
    packed = codes.new_zeros(group * t.words, 4)
    for k, tiles in tiles_of(t, group, packed):
        first, width = t.first_word(k), t.widths[k]
        values = [given[..., 2 * first : 2 * (first + width)], *(_of_tile(t, k, v, shape) for v in by_row)]
        ordered = [v.transpose(0, 1).flatten(0, 1) for v in values]  # units, then blocks
        stored = pack_codes(t.codes, ordered, t.tile_shape(k, warps), partial(torch.cat, dim=1))
        tiles.copy_(stored.view(tiles.shape))
    return packed.reshape(-1).view(torch.int32)


def unpack_narrow_tiles(t: StageTiles, warps: int, group: int, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """What `pack_narrow_tiles`' words stand for, [1, rows, cols], rounded once; rows as they are dealt out."""
    assert t.codes
    padded = packed.new_empty(group, t.units, t.tile_rows, 2 * t.row_words, dtype=dtype)
    for k, tiles in tiles_of(t, group, packed[:, None]):
        stored = tiles.reshape(t.units * group, -1).view(torch.uint8)
        count = t.codes.groups(t.widths[k])
        codes, *beside = unpack_codes(t.codes, stored, t.tile_shape(k, warps), count)
        shape = (t.units, group, t.tile_rows, count, -1)
        values = _values(t.codes, codes.contiguous()).view(shape)
        scales, *zeros = (v.contiguous().view(torch.float32).view(shape) for v in beside)
        if zeros:
            values -= zeros[0]
        values *= scales
        begin = 2 * t.first_word(k)
        padded[..., begin : begin + 2 * t.widths[k]] = values.flatten(3).transpose(0, 1)
    return padded.view(1, group * t.block_rows, -1)[:, : t.rows, : t.cols]


def _values(codes: TileCodes, stored: Tensor) -> Tensor:
    """Of a tile's bytes [..., n], float32 [..., codes of them], but for zero points."""
    if codes.zero:  # stored less that, in 4 bits: what 17 times it turns in both halves of a byte is the code
        return code_values(codes.code, stored ^ 17 * codes.zero, codes.zero)
    return code_values(codes.code, stored)


def _rows(how: TileCodes, part: Narrow) -> list[Tensor]:
    """A matrix's codes, uint8 [rows, cols], its scales and what zero points it has, float32 [rows, groups along K]."""
    codes, scales = _matrix(part.codes.view(torch.uint8)), part.scale_values()
    if part.offsets is None:
        return [codes, _matrix(_by_row(part, scales))]
    if part.format.offset is Offset.ZERO_POINT:
        zeros = part.offsets.float() - how.zero
    else:
        minimums, of = part.offsets.double(), scales.double()
        zeros = -minimums / of - how.zero
        flat = scales == 0
        if bool(flat.any()):  # the minimum alone: codes that stand for nothing less a zero point
            cols = codes.shape[1]
            each = _matrix(_by_row(part, flat)).repeat_interleave(part.format.group_cols or cols, 1)
            codes = codes.masked_fill(each[:, :cols], how.zero)
            zeros, scales = torch.where(flat, -minimums, zeros), torch.where(flat, 1.0, scales)
    return [codes, *(_matrix(_by_row(part, v.float())) for v in (scales, zeros))]


def _matrix(values: Tensor) -> Tensor:
    """Of the one lane."""
    return values.reshape(values.shape[-2:])


def _by_row(part: Narrow, values: Tensor) -> Tensor:
    """What a scale group has, a row: [rows, groups along K]."""
    by_row: Tensor = scales_by_row(part.format.group_rows, values, part.codes.shape[-2])
    return by_row


def _of_tile(t: StageTiles, k: int, by_row: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """What a tile's groups have, as bytes [blocks, units, rows, groups * 4]; zeros beyond the matrix."""
    assert t.codes
    count, size = t.codes.groups(t.widths[k]), t.codes.group
    at = torch.arange(count, device=by_row.device) * (2 * t.widths[k] // count) + 2 * t.first_word(k)
    which = at // size if size else torch.zeros_like(at)
    inside = (at < t.cols) & (which < by_row.shape[1])
    padded = by_row.new_zeros(shape[0] * t.block_rows, count)
    columns = by_row[:, which.clamp(max=by_row.shape[1] - 1)]
    padded[: t.rows] = torch.where(inside, columns, torch.zeros_like(columns))
    return padded.contiguous().view(torch.uint8).view(*shape, -1)
