"""The tensors of a GGUF file: wide ones as they are, Q8_0, Q4_0 and Q4_1 narrow, the others unpacked to 16 bits.

A block of 32 weights along a row (source: ggml-quants; tests compare with the gguf package):

    Q8_0   F16 scale, 32 x int8                       W = code * scale
    Q4_0   F16 scale, 16 bytes                        W = (code - 8) * scale
    Q4_1   F16 scale, F16 minimum, 16 bytes           W = code * scale + minimum

Byte j of the 16 holds weight j in its low and weight j + 16 in its high four bits. The K-quants have scales of scales
and codes of 2 to 6 bits, which the internal form does not hold: the gguf package unpacks them, F16 rounds them.
"""

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from kog_triton.checkpoint.formats.module import Found, Module
from kog_triton.checkpoint.gguf.file import TYPES, Directory, Entry
from kog_triton.checkpoint.narrow import NarrowTensor
from kog_triton.checkpoint.tensor_files import StoredTensor
from kog_triton.errors import ModelError, shown
from kog_triton.model.weight_format import Code, Offset, Scale, WeightFormat

BLOCK = 32
ROPE_DIVISORS = "rope_freqs.weight"  # of Llama 3, read by config.py
FORMATS = {
    "Q8_0": WeightFormat(Code.INT8, 1, BLOCK, Scale.F16),
    "Q4_0": WeightFormat(Code.UINT4, 1, BLOCK, Scale.F16),
    "Q4_1": WeightFormat(Code.UINT4, 1, BLOCK, Scale.F16, Offset.MINIMUM),
}
_WIDE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES = {name: (block, size) for name, block, size in TYPES.values()}


class GgufTensors:
    """The tensors of one file, and the scheme by which its narrow ones are found (formats/module.py's protocols).

    `stored` calls a type that is unpacked F16, which is what `read` gives.
    """

    harmless = (ROPE_DIVISORS,)

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.stored: dict[str, StoredTensor] = {}
        unpacked = set()
        for name, entry in directory.entries.items():
            known = entry.kind in _WIDE or entry.kind in FORMATS
            if not known:
                unpacked.add(entry.kind)
            self.stored[name] = StoredTensor(directory.path, entry.shape, entry.kind if known else "F16")
        kinds = ", ".join(sorted(unpacked))
        self.notes = (f"{kinds} weights are unpacked to 16 bits (F16)",) if kinds else ()

    def read(self, name: str) -> torch.Tensor:
        """A wide tensor; of a narrow one its bytes, [..., blocks of a row, bytes of a block]."""
        entry = self._directory.entries[name]
        data = torch.frombuffer(self._directory.data, dtype=torch.uint8, offset=entry.first, count=entry.num_bytes)
        if entry.kind in _WIDE:
            return data.view(_WIDE[entry.kind]).reshape(entry.shape)
        block, size = _BYTES[entry.kind]
        blocks = data.reshape(*entry.shape[:-1], entry.shape[-1] // block, size)
        return blocks if entry.kind in FORMATS else self._unpack(entry, blocks)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        return self.read(name)[list(indices)]

    def forget(self) -> None:
        """Give back the pages of the file that were read."""
        self._directory.data.madvise(mmap.MADV_DONTNEED)

    def _unpack(self, entry: Entry, blocks: torch.Tensor) -> torch.Tensor:
        try:
            import gguf
        except ImportError:
            raise ModelError(
                f'{self._directory.path}: {entry.kind} weights need the gguf package: pip install "kog-triton[gguf]"'
            ) from None
        kind = gguf.GGMLQuantizationType[entry.kind]
        with np.errstate(all="ignore"):  # what a damaged scale gives is refused below
            values = gguf.dequantize(blocks.flatten(-2).numpy(), kind).astype(np.float16)
        if not np.isfinite(values).all():
            raise ModelError(f"{self._directory.path}: tensor {shown(entry.name)} has a weight that F16 does not hold")
        return torch.from_numpy(values)

    def find(self, module: Module) -> Found | None:
        kind = module.dtype("weight") if module.has("weight") else ""
        if kind not in FORMATS:
            return None
        module.take("weight", module.shape, kind)
        return Found(FORMATS[kind], module, lambda m: _narrow(kind, m.read("weight")))


def _narrow(kind: str, blocks: torch.Tensor) -> NarrowTensor:
    """[rows, blocks, bytes] in the internal form."""
    how = FORMATS[kind]
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if kind == "Q8_0":
        return NarrowTensor(how, blocks[..., 2:].contiguous().view(torch.int8).flatten(-2), scales)
    minimums = None
    if how.offset is Offset.MINIMUM:
        minimums = blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]
    packed = blocks[..., -BLOCK // 2 :]
    codes = torch.cat([packed & 15, packed >> 4], -1).flatten(-2)
    return NarrowTensor(how, codes, scales, minimums)
