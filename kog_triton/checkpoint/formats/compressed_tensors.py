"""compressed-tensors (llm-compressor, vLLM): FP8, int8, int4 and MXFP4 by groups of modules.

    float-quantized, int-quantized, naive-quantized
        NAME.weight            F8_E4M3 or I8 [rows, cols]
        NAME.weight_scale      [1], [rows, 1], or a value a block or group
        NAME.weight_zero_point I8, of the scales' shape, if the weights are not symmetric
    pack-quantized, int4 and int8
        NAME.weight_packed     I32 [rows, cols * bits / 32], codes + 2^(bits - 1), low bits first
        NAME.weight_scale      [rows, cols / group] or [rows, 1]
        NAME.weight_shape      I64 [2]
        NAME.weight_zero_point I32 [rows * bits / 32, ...], packed along rows, if not symmetric
    mxfp4-pack-quantized
        NAME.weight_packed     U8 [rows, cols / 2], NAME.weight_scale U8 [rows, cols / 32]

config.json names the modules of each group, and those of none (`ignore`). Activations stay wide whatever it asks for.
Source: the compressed-tensors package; tests compare with it.
"""

import re
from dataclasses import dataclass

import torch

from kog_triton.checkpoint.formats.module import ONE_VALUE, Found, Module
from kog_triton.checkpoint.formats.packed import unpack_nibbles, unpack_words
from kog_triton.checkpoint.formats.patterns import names, regexes
from kog_triton.checkpoint.narrow import NarrowTensor
from kog_triton.errors import ModelError
from kog_triton.model.config import Config
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat

METHOD = "compressed-tensors"
PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
LAYOUTS = (*PLAIN, "pack-quantized", "mxfp4-pack-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")
_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "input_global_scale")
_CACHE = (".self_attn.k_scale", ".self_attn.v_scale")


class Targets:
    """Module names, "re:" patterns that match from the start, or the class name Linear."""

    def __init__(self, values: object, field: str) -> None:
        listed = names(values, field)
        self.exact = frozenset(n for n in listed if not n.startswith("re:"))
        self._patterns: tuple[re.Pattern[str], ...] = regexes(
            (n.removeprefix("re:") for n in listed if n.startswith("re:")), field
        )

    def named(self, module: str) -> bool:
        return module in self.exact or any(p.match(module) for p in self._patterns)


@dataclass(frozen=True)
class Group:
    """One entry of config_groups: which modules, and how their weights are stored."""

    targets: Targets
    code: Code
    group: tuple[int, int]
    symmetric: bool
    layout: str


@dataclass(frozen=True)
class CompressedTensors:
    groups: tuple[Group, ...]
    ignore: Targets
    notes: tuple[str, ...]
    harmless: tuple[str, ...]

    @classmethod
    def of(cls, config: Config) -> "CompressedTensors":
        config.only("quantization_status", "compressed", "frozen")
        if config.mapping("transform_config") is not None:
            raise config.error(["transform_config"], "absent or empty: not supported")
        sparsity = config.mapping("sparsity_config")
        if sparsity is not None and sparsity.get("format") != "dense":
            raise config.error(["sparsity_config"], "absent, empty or of format 'dense'")
        entries = config.mapping("config_groups")
        if entries is None:
            raise config.error(["config_groups"], "an object with a group of modules or more")
        groups, notes = [], []
        for name in entries.values:
            entry = entries.mapping(name)
            if entry is None:
                raise entries.error([name], "an object with targets and weights")
            groups.append(_group(entry, config))
            if any(entry.mapping(f"{side}_activations") for side in ("input", "output")):
                notes.append("activations stay wide: the checkpoint's narrow activations are not used")
        cache = config.mapping("kv_cache_scheme") is not None
        if cache:
            notes.append("the KV cache stays wide: the checkpoint's narrow cache is not used")
        ignore = Targets(config.get("ignore"), config.label("ignore"))
        return cls(tuple(groups), ignore, tuple(dict.fromkeys(notes)), _CACHE if cache else ())

    def find(self, module: Module) -> Found | None:
        packed = module.has("weight_packed")
        narrow = packed or (module.has("weight") and module.dtype("weight") in ("F8_E4M3", "I8"))
        if not narrow:
            return None
        if self.ignore.named(module.name):
            raise module.error("it is stored narrow although quantization_config ignores it")
        group = next(
            (g for g in self.groups if g.targets.named(module.name)),
            next((g for g in self.groups if "Linear" in g.targets.exact), None),
        )
        if group is None:
            raise module.error("it is stored narrow but no group of quantization_config targets it")
        if packed is not (group.layout not in PLAIN):
            raise module.error(f"it is not stored as its format {group.layout!r} says")
        module.ignore(*_ACTIVATIONS)
        if group.layout == "mxfp4-pack-quantized":
            return _find_mxfp4(module)
        return (_find_packed if packed else _find_plain)(group, module)


def _group(entry: Config, whole: Config) -> Group:
    """Read one group; ModelError for whatever is not read."""
    weights = entry.mapping("weights")
    if weights is None:
        raise entry.error(["weights"], "an object: groups without narrow weights are not read")
    layout = entry.choice("format", of=LAYOUTS, default="")
    layout = layout or whole.choice("format", of=LAYOUTS, default="")
    if not layout:
        raise whole.error(["format"], " or ".join(LAYOUTS))
    weights.only("dynamic", False)
    weights.only("actorder", False, "weight", "static")
    bits = weights.integer("num_bits", high=16, default=8)
    kind = weights.choice("type", of=("int", "float"), default="int")
    code = {("int", 4): Code.UINT4, ("int", 8): Code.INT8, ("float", 8): Code.E4M3}.get((kind, bits))
    if layout == "mxfp4-pack-quantized" and (kind, bits) == ("float", 4):
        code = Code.E2M1
    size = weights.integer("group_size", low=-1, high=1 << 16, default=None)
    default = "channel" if size == -1 else "group" if size else "tensor"
    strategy = weights.choice("strategy", of=STRATEGIES, default=default)
    if strategy == "group" and (size is None or size < 1):
        raise weights.error(["group_size"], "a positive integer for strategy 'group'")
    block = weights.integers("block_structure", low=1, high=1 << 16, default=())
    if strategy == "block" and len(block) != 2:
        raise weights.error(["block_structure"], "two integers for strategy 'block'")
    shared = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size or 0)}.get(strategy, block)
    fits = {
        Code.E4M3: layout in ("float-quantized", "naive-quantized"),
        Code.INT8: layout in ("int-quantized", "naive-quantized", "pack-quantized"),
        Code.UINT4: layout == "pack-quantized" and strategy in ("group", "channel"),
        Code.E2M1: strategy == "group" and size == 32,
    }
    if code is None or not fits[code]:
        said = f"{bits} bits of {kind}, strategy {strategy!r}, format {layout!r}"
        raise ModelError(f"{weights.label('num_bits')}: {said}: this combination is not supported")
    symmetric = weights.boolean("symmetric", default=True)
    if not symmetric and code in (Code.E4M3, Code.E2M1):
        raise weights.error(["symmetric"], "true for weights of floating point")
    targets = Targets(entry.get("targets"), entry.label("targets"))
    return Group(targets, code, (shared[0], shared[1]), symmetric, layout)


def _scale_shape(how: WeightFormat, shape: tuple[int, ...]) -> tuple[int, ...]:
    """As stored: one value for a tensor, else a grid; a lane each where there are several."""
    if not how.group_rows:
        return (1,)
    return (*shape[:-2], *how.grid(*shape[-2:]))


def _find_plain(group: Group, module: Module) -> Found:
    """A byte a weight, in the order of the matrix."""
    offset = Offset.NONE if group.symmetric else Offset.ZERO_POINT
    how = WeightFormat(group.code, *group.group, Scale.F32, offset)
    module.check_columns(how)
    shape = _scale_shape(how, module.shape)
    if not how.group_rows and module.has("weight_scale"):
        stored_shape = module.stored_shape("weight_scale")
        shape = stored_shape if stored_shape in ONE_VALUE else shape
    if not how.group_rows and len(module.shape) != 2:
        raise module.error("one scale a tensor goes with one matrix, not with lanes")
    stored = "F8_E4M3" if group.code is Code.E4M3 else "I8"
    module.take("weight", module.shape, stored)
    scale = module.take_scale("weight_scale", shape)
    if not group.symmetric:
        module.take("weight_zero_point", shape, "I8")
    else:
        module.ignore("weight_zero_point")
    how = WeightFormat(group.code, *group.group, scale, offset)
    grid = (*module.shape[:-2], *how.grid(*module.shape[-2:]))

    def read(m: Module) -> NarrowTensor:
        if group.symmetric and m.has("weight_zero_point") and bool(m.read("weight_zero_point").any()):
            raise ModelError("the weights are symmetric but a zero point is not 0")
        zeros = None if group.symmetric else m.read("weight_zero_point").reshape(grid)
        return NarrowTensor(how, m.read("weight"), m.read("weight_scale").reshape(grid), zeros)

    return Found(how, module, read)


def _find_packed(group: Group, module: Module) -> Found:
    """Several codes a 32-bit word, along the columns; zero points along the rows."""
    bits, (*lanes, rows, cols) = group.code.bits, module.shape
    per_word = 32 // bits
    if module.has("weight_g_idx"):
        raise module.error("weight_g_idx reorders columns (actorder 'group'): not supported")
    offset = Offset.NONE if group.symmetric else Offset.ZERO_POINT
    how = WeightFormat(group.code, *group.group, Scale.F32, offset)
    if group.group[0] != 1:
        raise module.error("packed weights have a scale a row or a group")
    module.check_columns(how)
    grid = _scale_shape(how, module.shape)
    module.take("weight_packed", (*lanes, rows, -(-cols // per_word)), "I32")
    scale = module.take_scale("weight_scale", grid)
    module.take("weight_shape", (len(module.shape),), "I64", "I32")
    if not group.symmetric:
        module.take("weight_zero_point", (*lanes, -(-rows // per_word), grid[-1]), "I32")
    how = WeightFormat(group.code, *group.group, scale, offset)

    def read(m: Module) -> NarrowTensor:
        if m.read("weight_shape").tolist() != list(m.shape):
            raise ModelError(f"weight_shape is not {list(m.shape)}, which config.json asks for")
        codes = _centered(group.code, unpack_words(m.read("weight_packed"), bits)[..., :cols])
        zeros = None
        if not group.symmetric:
            words = m.read("weight_zero_point").mT.contiguous()
            zeros = _centered(group.code, unpack_words(words, bits)[..., :rows].mT)
        return NarrowTensor(how, codes, m.read("weight_scale"), zeros)

    return Found(how, module, read)


def _centered(code: Code, codes: torch.Tensor) -> torch.Tensor:
    """Packed codes are stored with 2^(bits - 1) added: INT8's are less that, UINT4's stay."""
    if code is Code.UINT4:
        return codes.contiguous()
    return (codes ^ 128).view(torch.int8)


def _find_mxfp4(module: Module) -> Found:
    rows, cols = module.matrix()
    module.check_columns(FORMATS["mxfp4"])
    module.take("weight_packed", (rows, cols // 2), "U8")
    module.take("weight_scale", (rows, cols // 32), "U8")

    def read(m: Module) -> NarrowTensor:
        codes = unpack_nibbles(m.read("weight_packed"))
        return NarrowTensor(FORMATS["mxfp4"], codes, m.read("weight_scale"))

    return Found(FORMATS["mxfp4"], module, read)
