"""The embedding on a GPU, as a prompt's pass reads it: rows of 16-bit values, or of codes (schedule/embedding.py)."""

from dataclasses import dataclass

import torch

from kog_triton.backends.narrow import Narrow, code_values
from kog_triton.model.spec import ModelSpec
from kog_triton.model.weight_format import Offset
from kog_triton.schedule.embedding import EmbeddingRow, embedding_row
from kog_triton.schedule.narrow_packing import scales_by_row

Tensor = torch.Tensor


@dataclass(frozen=True)
class Embedding:
    """table  [vocab, hidden_size or more] of `dtype`, or uint8 [vocab, row.bytes]"""

    table: Tensor
    dtype: torch.dtype  # of the values
    row: EmbeddingRow | None = None

    @classmethod
    def of(cls, table: Tensor) -> "Embedding":
        return cls(table, table.dtype)

    @property
    def device(self) -> torch.device:
        return self.table.device

    def rows(self, ids: Tensor) -> Tensor:
        """Values of tokens, float32 [*ids.shape, hidden_size]: what the checkpoint's stand for, rounded to `dtype`."""
        found = self.table[ids]
        if self.row is None:
            return found.float()
        row, how = self.row, self.row.format
        values = code_values(how.code, found[..., : row.code_bytes], row.zero)[..., : row.cols]

        def by_value(number: int) -> Tensor:
            first = row.code_bytes + 4 * row.groups * number
            groups = found[..., first : first + 4 * row.groups].contiguous().view(torch.float32)
            each = groups[..., None].expand(*groups.shape, row.group)
            return each.flatten(-2)[..., : row.cols]

        if how.offset is Offset.ZERO_POINT:
            values -= by_value(1)
        values *= by_value(0)
        if how.offset is Offset.MINIMUM:
            values += by_value(1)
        return values.to(self.dtype).float()


def narrow_table(part: Narrow, spec: ModelSpec) -> Tensor:
    """A narrow embedding's rows, uint8 [vocab, bytes]."""
    row = embedding_row(spec)
    assert row
    codes = part.codes.view(torch.uint8)
    if part.format.code.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    numbers = [part.scale_values()] + ([] if part.offsets is None else [part.offsets.float()])
    table = codes.new_zeros(len(codes), row.bytes)
    table[:, : codes.shape[1]] = codes
    for i, of_groups in enumerate(numbers):
        each = scales_by_row(part.format.group_rows, of_groups, len(codes)).contiguous()
        first = row.code_bytes + 4 * row.groups * i
        table[:, first : first + 4 * row.groups] = each.view(torch.uint8)
    return table
