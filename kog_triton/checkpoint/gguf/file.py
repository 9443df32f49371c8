"""The directory of a GGUF file: metadata and where tensors lie, each length checked before anything is allocated.

    "GGUF", version, tensor count, metadata count
    metadata   name, type, value                           strings and arrays begin with a 64-bit length
    tensors    name, dimensions, type, offset              offsets count from the end of the directory, aligned
    data

A count or a length that the rest of the file cannot hold is refused where it is read. Versions 2 and 3, little-endian.
Source: the GGUF specification (ggml, docs/gguf.md); tests compare with the gguf package.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kog_triton.checkpoint import MAX_TENSORS
from kog_triton.errors import ModelError, shown

MAX_FIELDS = 1 << 16
MAX_NAME = 1 << 10  # bytes
MAX_VALUES = 1 << 23  # of all arrays of the metadata: a vocabulary has three of some 2^18
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# ggml's types: name, weights a block, bytes a block
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# types that are not read, for the error
_UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


@dataclass(frozen=True)
class Entry:
    """One tensor. `shape` is ours, columns last; `first` and `num_bytes` say where it lies in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    first: int
    num_bytes: int


class Directory:
    """`metadata` by name and `entries` by name of one file; ModelError, with the file, for whatever is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is empty"
            raise ModelError(f"{path}: cannot be read as GGUF: {reason}") from error
        self._at = self._values = 0
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self._read()

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")

    # ---- reading ----

    def _read(self) -> None:
        if self.data[:4] != b"GGUF":
            raise self.error("not a GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise self.error("a big-endian GGUF file: not supported")
        if version not in (2, 3):
            raise self.error(f"GGUF version {version}: 2 and 3 are read")
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        self._check_count(tensors, 8 + 4 + 8 + 4 + 8, MAX_TENSORS, "tensors")
        self._check_count(fields, 8 + 4 + 1, MAX_FIELDS, "metadata fields")
        for _ in range(fields):
            name = self._string(MAX_NAME)
            if name in self.metadata:
                raise self.error(f"metadata field {shown(name)} is there twice")
            self.metadata[name] = self._value(self._scalar("I"), name)
        found = [self._entry() for _ in range(tensors)]
        if self.metadata.get("split.count", 1) != 1:
            raise self.error(
                f"split.count is {shown(self.metadata['split.count'])}: one model in several files:"
                " join them with llama-gguf-split --merge"
            )
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise self.error(f"general.alignment is {shown(alignment)}: it must be a multiple of 8")
        start = -(-self._at // alignment) * alignment
        for entry in found:
            self._place(entry, start, alignment)

    def _place(self, entry: Entry, start: int, alignment: int) -> None:
        """Check a tensor's place, which only now is known."""
        if entry.name in self.entries:
            raise self.error(f"tensor {shown(entry.name)} is there twice")
        first = start + entry.first
        if entry.first % alignment or first + entry.num_bytes > len(self.data):
            raise self.error(
                f"tensor {shown(entry.name)}: {entry.num_bytes} bytes from {first} on do not lie in"
                f" the file of {len(self.data)}: download it again"
            )
        self.entries[entry.name] = Entry(entry.name, entry.kind, entry.shape, first, entry.num_bytes)

    def _entry(self) -> Entry:
        name = self._string(MAX_NAME)
        count = self._scalar("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self.error(f"tensor {shown(name)} has {count} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(count))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in TYPES:
            called = f" ({_UNREAD[kind]})" if kind in _UNREAD else ""
            raise self.error(f"tensor {shown(name)} has ggml type {kind}{called}: it is not supported")
        word, block, block_bytes = TYPES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self.error(f"tensor {shown(name)} has shape {shown(list(shape))}, which {word} does not hold")
        num_bytes = math.prod(shape) // block * block_bytes
        if num_bytes > len(self.data):
            raise self.error(f"tensor {shown(name)} is larger than the file")
        return Entry(name, word, shape, offset, num_bytes)

    def _value(self, kind: int, name: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self.error(f"metadata field {shown(name)} has type {kind}: it is not known")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[inner])
            self._check_values(count, width, name)
            found = struct.unpack_from(f"<{count}{_SCALARS[inner]}", self.data, self._at)
            self._at += count * width
            return list(found)
        if inner != _STRING:
            raise self.error(f"metadata field {shown(name)} is an array of type {inner}: it is not known")
        self._check_values(count, 8, name)
        return [self._string() for _ in range(count)]

    def _check_values(self, count: int, least: int, name: str) -> None:
        """Count what an array brings against MAX_VALUES: a byte of the file is many in memory."""
        self._check_count(count, least, None, f"values of {shown(name)}")
        self._values += count
        if self._values > MAX_VALUES:
            raise self.error(f"metadata field {shown(name)} has {count} values: at most {MAX_VALUES} are read")

    def _check_count(self, count: int, least: int, most: int | None, what: str) -> None:
        """Refuse more items than the rest of the file can hold, at `least` bytes each."""
        left = len(self.data) - self._at
        if count * least > left or (most is not None and count > most):
            raise self.error(f"{count} {what}: the file holds {left} bytes more: download it again")

    def _scalar(self, kind: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + kind, self.data, self._at)
        except struct.error:
            raise self.error("the file ends in its directory: download it again") from None
        self._at += struct.calcsize("<" + kind)
        return value

    def _string(self, most: int | None = None) -> str:
        length = self._scalar("Q")
        self._check_count(length, 1, most, "characters of a text")
        self._at += length
        try:
            return self.data[self._at - length : self._at].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"a text in the directory is not UTF-8: {error.reason}") from None
