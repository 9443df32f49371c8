"""How a narrow embedding lies on a GPU: a row a token, of a checkpoint's codes and float32 numbers behind them."""

from dataclasses import dataclass

from kog_triton.model.spec import ModelSpec
from kog_triton.model.weight_format import Code, Offset, WeightFormat

ALIGNED = 16  # bytes


@dataclass(frozen=True)
class EmbeddingRow:
    """Codes of 8 bits as they are, of 4 bits two a byte, the first one low; then a scale for each group along K; then,
    if the format has them, as many zero points or minimums."""

    format: WeightFormat
    cols: int

    @property
    def group(self) -> int:
        return self.format.group_cols or self.cols

    @property
    def groups(self) -> int:
        return -(-self.cols // self.group)

    @property
    def zero(self) -> int:
        """The code that stands for zero, where no zero points say it."""
        how = self.format
        return 8 if how.code is Code.UINT4 and how.offset is Offset.NONE else 0

    @property
    def code_bytes(self) -> int:
        return -(-self.cols * self.format.code.bits // 32) * 4

    @property
    def bytes(self) -> int:
        numbers = self.groups * (1 if self.format.offset is Offset.NONE else 2)
        return -(-(self.code_bytes + 4 * numbers) // ALIGNED) * ALIGNED


def embedding_row(spec: ModelSpec) -> EmbeddingRow | None:
    """None for an embedding of 16 bits."""
    how = dict(spec.narrow).get("embed")
    return EmbeddingRow(how, spec.hidden_size) if how else None


def embedding_bytes(spec: ModelSpec) -> int:
    """What a GPU holds of it."""
    row = embedding_row(spec)
    return spec.vocab_size * row.bytes if row else spec.weight_bytes("embed")
