"""A code object: its kernels, what a launch of each has to provide, and its instructions."""

import functools
import hashlib
import re
import struct
from dataclasses import dataclass
from typing import Any

import msgpack
from tinygrad.runtime.support.elf import elf_loader

GFX942 = 0x4C  # the machine in an ELF header's flags (LLVM's AMDGPUUsage)
USUAL_MODE = 0xF0  # float mode of a kernel descriptor: round to nearest even, all denormals kept


@dataclass(frozen=True)
class Descriptor:
    """What the hardware reads of a kernel before it runs (LLVM's AMDGPUUsage, "Kernel Descriptor")."""

    lds: int
    scratch: int
    entry: int  # byte in the image
    user_sgprs: int
    group_ids: tuple[bool, bool, bool]
    has_dispatch: bool
    has_kernarg: bool
    preloaded: tuple[int, int]  # words of the arguments in SGPRs: how many, from which on


@dataclass(frozen=True)
class CodeObject:
    """A file for gfx942. ValueError if it is for another GPU, or for a float mode that the executor does not know."""

    blob: bytes

    def __post_init__(self) -> None:
        machine = struct.unpack_from("<I", self.blob, 48)[0] & 0xFF
        if machine != GFX942:
            raise ValueError(f"this code object is for machine {machine:#x}, not for gfx942")

    @property
    def sha256(self) -> str:
        """16 digits of it, of what a GPU and its driver read: not of what debuggers do, which names the source's
        folder."""
        digest = hashlib.sha256()
        for name in (".note", ".rodata", ".text"):
            digest.update(self._loaded[1][name].content)
        return digest.hexdigest()[:16]

    @functools.cached_property
    def _loaded(self) -> tuple[bytes, dict[str, Any]]:
        image, sections, relocations = elf_loader(self.blob)
        assert not relocations, "a linked object has none"
        return bytes(image), {section.name: section for section in sections}

    @property
    def image(self) -> bytes:
        return self._loaded[0]

    @functools.cached_property
    def symbols(self) -> dict[str, tuple[int, int]]:
        """Address and size of each symbol."""
        sections = self._loaded[1]
        names = sections[".strtab"].content if ".strtab" in sections else sections[".dynstr"].content
        table = sections.get(".symtab", sections.get(".dynsym"))
        out = {}
        for name, _, _, _, value, size in struct.iter_unpack("<IBBHQQ", table.content):
            out[names[name : names.index(b"\0", name)].decode()] = (value, size)
        return out

    @functools.cached_property
    def kernels(self) -> dict[str, dict[str, Any]]:
        """The metadata of each kernel, by its name: registers, spills, arguments."""
        note = self._loaded[1][".note"].content
        name_size, size, _ = struct.unpack_from("<III", note)
        at = 12 + (name_size + 3 & ~3)
        return {k[".name"]: k for k in msgpack.unpackb(note[at : at + size])["amdhsa.kernels"]}

    def descriptor(self, kernel: str) -> Descriptor:
        at, _ = self.symbols[f"{kernel}.kd"]
        lds, scratch, _, _, entry = struct.unpack_from("<IIIIq", self.image, at)
        rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIHH", self.image, at + 48)
        mode = rsrc1 >> 12 & 0xFF
        if mode != USUAL_MODE:
            raise ValueError(f"kernel {kernel} asks for float mode {mode:#x}; the executor knows {USUAL_MODE:#x}")
        if properties & ~0b1010:
            raise ValueError(f"kernel {kernel} asks for SGPRs {properties:#b} that the executor does not fill")
        return Descriptor(
            lds,
            scratch,
            at + entry,
            rsrc2 >> 1 & 31,
            (bool(rsrc2 & 1 << 7), bool(rsrc2 & 1 << 8), bool(rsrc2 & 1 << 9)),
            bool(properties & 2),
            bool(properties & 8),
            (preload & 127, preload >> 7),
        )

    def code(self, kernel: str) -> tuple[int, bytes]:
        """Address and bytes of a kernel's instructions."""
        address, size = self.symbols[kernel]
        return address, self.image[address : address + size]


@functools.cache  # millions of times of a few hundred
def text_name(name: str) -> str:
    """A decoder's name of an operation without its encoding: V_ADD_U32_E32 is V_ADD_U32."""
    name = re.sub(r"_E(32|64)$", "", name)
    return name.replace("V_MAD_MIX", "V_FMA_MIX")  # one opcode; from gfx90a on it is fused
