"""int4 as AutoAWQ stores it (version "gemm"): groups along K with zero points, packed along rows, interleaved.

    NAME.qweight   I32 [cols, rows / 8]        eight rows of one column a word
    NAME.qzeros    I32 [cols / group, rows / 8]
    NAME.scales    F16 [cols / group, rows]    W = (code - zero) * scale

Nibble i of a word, from the lowest, is row ORDER[i] of its eight. Source: AutoAWQ's packing utilities.
"""

from dataclasses import dataclass

import torch

from kog_triton.checkpoint.formats.module import Found, Module
from kog_triton.checkpoint.formats.packed import unpack_words
from kog_triton.checkpoint.formats.patterns import Excluded, group_and_excluded
from kog_triton.checkpoint.narrow import NarrowTensor
from kog_triton.model.config import Config
from kog_triton.model.weight_format import Code, Offset, WeightFormat

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE = [ORDER.index(row) for row in range(8)]  # row r of eight lies in nibble _PLACE[r]


@dataclass(frozen=True)
class Awq:
    group: int  # columns; 0 = all
    excluded: Excluded
    notes: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> "Awq":
        config.only("bits", 4)
        config.only("zero_point", True)
        for name in ("version", "format"):
            config.choice(name, of=("gemm", "GEMM"), default="gemm")
        return cls(*group_and_excluded(config))

    def find(self, module: Module) -> Found | None:
        if not module.has("qweight"):
            return None
        if module.name in self.excluded:
            raise module.error("it has a qweight although quantization_config excludes it")
        rows, cols = module.matrix()
        group = self.group or cols
        if rows % 8 or cols % group:
            raise module.error(f"{rows} x {cols} weights do not divide into words of 8 and groups of {group}")
        module.take("qweight", (cols, rows // 8), "I32")
        module.take("qzeros", (cols // group, rows // 8), "I32")
        scale = module.take_scale("scales", (cols // group, rows))
        how = WeightFormat(Code.UINT4, 1, self.group, scale, Offset.ZERO_POINT)

        def read(m: Module) -> NarrowTensor:
            codes, zeros = (_rows(m.read(name)).T.contiguous() for name in ("qweight", "qzeros"))
            return NarrowTensor(how, codes, m.read("scales").T.contiguous(), zeros)

        return Found(how, module, read)


def _rows(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, rows / 8] as uint8 [n, rows] in the order of the rows."""
    nibbles = unpack_words(words, 4).unflatten(-1, (-1, 8))
    return nibbles[..., _PLACE].flatten(-2)
