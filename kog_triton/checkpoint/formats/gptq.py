"""int4 as GPTQ checkpoints store it: groups along K, codes packed along K, zero points along rows.

    NAME.qweight   I32 [cols / 8, rows]        eight columns of one row a word
    NAME.qzeros    I32 [cols / group, rows / 8]
    NAME.scales    F16 [cols / group, rows]    W = (code - zero) * scale
    NAME.g_idx     I32 [cols]                  the group of a column, if it is stored

`checkpoint_format`, or `format`, "gptq" (v1) stores zero - 1, "gptq_v2" the zero point itself. Of a stored 15 in v1
some readers make 16 and some 0: it is refused. Columns in another order (desc_act) are refused. Source: AutoGPTQ and
GPTQModel.
"""

from dataclasses import dataclass

import torch

from kog_triton.checkpoint.formats.module import Found, Module
from kog_triton.checkpoint.formats.packed import unpack_words
from kog_triton.checkpoint.formats.patterns import Excluded, group_and_excluded
from kog_triton.checkpoint.narrow import SYMMETRIC, NarrowTensor
from kog_triton.errors import ModelError
from kog_triton.model.config import Config
from kog_triton.model.weight_format import Code, Offset, WeightFormat


@dataclass(frozen=True)
class Gptq:
    group: int  # columns; 0 = all
    symmetric: bool  # every zero point is 8
    stored_less: int  # what the zero points are stored less
    excluded: Excluded
    notes: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> "Gptq":
        config.only("bits", 4)
        config.only("desc_act", False)
        config.only("dynamic", {})
        config.only("is_marlin_format", False)
        config.only("use_marlin", False)
        names, known = ("checkpoint_format", "format"), ("gptq", "gptq_v2")
        version = config.choice(*names, of=known, default="gptq")
        config.only("format", version)
        group, excluded = group_and_excluded(config)
        return cls(
            group=group,
            symmetric=config.boolean("sym", default=False),
            stored_less=1 if version == "gptq" else 0,
            excluded=excluded,
        )

    def find(self, module: Module) -> Found | None:
        if not module.has("qweight"):
            return None
        if module.name in self.excluded:
            raise module.error("it has a qweight although quantization_config excludes it")
        rows, cols = module.matrix()
        group = self.group or cols
        if rows % 8 or cols % 8 or cols % group:
            raise module.error(f"{rows} x {cols} weights do not divide into words of 8 and groups of {group}")
        module.take("qweight", (cols // 8, rows), "I32")
        module.take("qzeros", (cols // group, rows // 8), "I32")
        scale = module.take_scale("scales", (cols // group, rows))
        if module.has("g_idx"):
            module.take("g_idx", (cols,), "I32")
        offset = Offset.NONE if self.symmetric else Offset.ZERO_POINT
        how = WeightFormat(Code.UINT4, 1, self.group, scale, offset)

        def read(m: Module) -> NarrowTensor:
            if m.has("g_idx"):
                given = m.read("g_idx")
                if not torch.equal(given, torch.arange(cols).to(given) // group):
                    raise ModelError("g_idx reorders columns (act-order, desc_act): not supported")
            codes = unpack_words(m.read("qweight").T.contiguous(), 4)
            zeros = unpack_words(m.read("qzeros"), 4).T.contiguous()
            if self.stored_less and bool((zeros == 15).any()):
                raise ModelError("qzeros has a 15, which readers of this version take for 0 or for 16")
            zeros = zeros + self.stored_less
            if self.symmetric and bool((zeros != SYMMETRIC).any()):
                raise ModelError(f"sym is true but a zero point is not {SYMMETRIC}")
            scales = m.read("scales").T.contiguous()
            return NarrowTensor(how, codes, scales, None if self.symmetric else zeros)

        return Found(how, module, read)
