"""FP8 as DeepSeek, Qwen3-FP8 and transformers' `fp8` store it: e4m3 with a scale a block, or one a tensor.

    NAME.weight             F8_E4M3 [rows, cols]
    NAME.weight_scale_inv   [rows / 128, cols / 128], rounded up, or one value: what a weight is MULTIPLIED with
    NAME.weight_scale       the same by its older name, one value

Source: DeepSeek-V3's inference code (weight_dequant) and transformers' finegrained_fp8.
"""

from dataclasses import dataclass

from kog_triton.checkpoint.formats.module import ONE_VALUE, Found, Module
from kog_triton.checkpoint.formats.patterns import Excluded
from kog_triton.checkpoint.narrow import NarrowTensor
from kog_triton.model.config import Config
from kog_triton.model.weight_format import Code, Scale, WeightFormat

NAMES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Fp8:
    block: tuple[int, int]  # (0, 0): one scale a tensor
    excluded: Excluded
    notes: tuple[str, ...]
    harmless: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> "Fp8":
        config.only("fmt", "e4m3")
        config.only("scale_fmt", "float", "ue8m0")  # how scales were rounded; their type says how they are stored
        how = config.choice("activation_scheme", of=("dynamic", "static"), default="dynamic")
        block = config.integers("weight_block_size", low=1, high=1 << 16, default=(0, 0))
        if len(block) != 2:
            raise config.error(["weight_block_size"], "two integers: rows and columns")
        field = "ignored_layers" if config.get("ignored_layers") else "modules_to_not_convert"
        notes = (f"activations stay wide: the checkpoint's {how} FP8 activations are not used",)
        return cls((block[0], block[1]), Excluded(config.get(field), config.label(field)), notes)

    def find(self, module: Module) -> Found | None:
        if not module.has("weight") or module.dtype("weight") != "F8_E4M3":
            return None
        if module.name in self.excluded:
            raise module.error("it is stored as F8_E4M3 although quantization_config excludes it")
        rows, cols = module.matrix()
        name = next((n for n in NAMES if module.has(n)), NAMES[0])
        high, wide = self.block
        grid = WeightFormat(Code.E4M3, high, wide, Scale.F32).grid(rows, cols)
        shape = grid if high else module.stored_shape(name) if module.has(name) else (1,)
        if not high and shape not in ONE_VALUE:
            raise module.error(f"{name} has shape {list(shape)}: without weight_block_size it is one value")
        module.take("weight", (rows, cols), "F8_E4M3")
        scale = module.take_scale(name, shape, "F32", "BF16", "F16", "F8_E8M0")
        module.ignore("input_scale", "activation_scale")
        how = WeightFormat(Code.E4M3, high, wide, scale)

        def read(m: Module) -> NarrowTensor:
            return NarrowTensor(how, m.read("weight"), m.read(name).reshape(grid))

        return Found(how, module, read)
