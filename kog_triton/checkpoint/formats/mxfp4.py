"""MXFP4 as gpt-oss and transformers' `mxfp4` store it: e2m1 codes, an e8m0 scale for 32 of a row.

    NAME.weight_blocks   U8 [rows, cols / 32, 16]   two codes a byte, the first in the low four bits
    NAME.weight_scales   U8 [rows, cols / 32]       2^(byte - 127)

Source: OCP Microscaling Formats 1.0; transformers' integrations/mxfp4.
"""

from dataclasses import dataclass

from kog_triton.checkpoint.formats.module import Found, Module
from kog_triton.checkpoint.formats.packed import unpack_nibbles
from kog_triton.checkpoint.formats.patterns import Excluded
from kog_triton.checkpoint.narrow import NarrowTensor
from kog_triton.model.config import Config
from kog_triton.model.weight_format import FORMATS

GROUP = 32


@dataclass(frozen=True)
class Mxfp4:
    excluded: Excluded
    notes: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> "Mxfp4":
        field = "modules_to_not_convert"
        return cls(Excluded(config.get(field), config.label(field)))

    def find(self, module: Module) -> Found | None:
        if not module.has("weight_blocks"):
            return None
        if module.name in self.excluded:
            raise module.error("it has weight_blocks although quantization_config excludes it")
        rows, cols = module.matrix()
        module.check_columns(FORMATS["mxfp4"])
        module.take("weight_blocks", (rows, cols // GROUP, GROUP // 2), "U8")
        module.take("weight_scales", (rows, cols // GROUP), "U8")
        return Found(FORMATS["mxfp4"], module, _read)


def _read(m: Module) -> NarrowTensor:
    codes = unpack_nibbles(m.read("weight_blocks").flatten(1))
    return NarrowTensor(FORMATS["mxfp4"], codes, m.read("weight_scales"))
