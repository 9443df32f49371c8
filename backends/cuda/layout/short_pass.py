"""A pass of short prompts: the arguments of the kernels between its products (include/kog/prompt/short_pass.h), which
products they stand between, and how their K is cut."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kog_triton.backends.cuda.layout.batches import THREADS
from kog_triton.backends.cuda.layout.prompt import ProductKernel
from kog_triton.model.spec import DType

ROWS, UNIT = 128, 64  # of a tile; of K, by which blocks share tiles
JOIN_THREADS, MOST_HIDDEN = 256, 8192
HEAD_THREADS, MOST_HEAD_DIM = 128, 256
ATTEND_THREADS, QUERIES = 128, 16
GATE_THREADS = 256
MOST_RANKS = 8

Queue = Callable[[int], None]  # puts a launch on a stream
# Makes a launch ready: of a pass of so many tokens a function by name, with blocks, threads, shared bytes and argument.
Ready = Callable[[ProductKernel, str, int, int, ctypes.Structure], Queue]

P, I64, INT, FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float


class Parts(ctypes.Structure):
    _fields_ = (("at", P), ("tiles", P))


class Order(ctypes.Structure):
    _fields_ = (("parts", INT), ("steps", INT))


class Cache(ctypes.Structure):
    """Strides in values."""

    _fields_ = (("at", P), *((n, I64) for n in ("slot", "head", "kind", "position")))


class JoinCall(ctypes.Structure):
    _fields_ = (
        *((n, P) for n in ("tokens", "x", "embed")),
        ("embed_step", I64),
        ("parts", Parts),
        *((n, P) for n in ("bias", "gain", "streams")),
        ("streams_step", I64),
        ("out", P),
        ("order", Order),
        ("hidden", INT),
        ("eps", FLOAT),
    )


class Exchange(ctypes.Structure):
    _fields_ = (("pass_number", P), *((n, INT) for n in ("index", "count", "ranks")))


class SendCall(ctypes.Structure):
    _fields_ = (
        ("tokens", P),
        ("parts", Parts),
        ("bias", P),
        *((n, P * MOST_RANKS) for n in ("sums", "arrived")),
        ("exchange", Exchange),
        ("hidden", INT),
    )


class MeetCall(ctypes.Structure):
    _fields_ = (
        ("join", JoinCall),
        *((n, P) for n in ("sums", "arrived", "gave_up")),
        ("limit", I64),
        ("exchange", Exchange),
    )


class HeadsCall(ctypes.Structure):
    _fields_ = (
        ("tokens", P),
        ("parts", Parts),
        *((n, P) for n in ("bias", "norms", "rope", "q")),
        ("cache", Cache),
        *((n, INT) for n in ("heads", "kv_heads", "half")),
        ("eps", FLOAT),
    )


class AttendCall(ctypes.Structure):
    _fields_ = (
        *((n, P) for n in ("tiles", "q")),
        ("cache", Cache),
        ("out", P),
        ("order", Order),
        *((n, INT) for n in ("heads", "kv_heads", "d", "window")),
        ("scale", FLOAT),
    )


class GateCall(ctypes.Structure):
    _fields_ = (("tokens", P), ("parts", Parts), *((n, P) for n in ("bias", "out")), ("order", Order), ("width", INT))


class PlaceCall(ctypes.Structure):
    """`words`: PLACE_HEAD words of which the first is the number of pieces, the pieces, and what they bring."""

    _fields_ = (("words", P),)


PLACE_BLOCKS, PLACE_THREADS, PLACE_HEAD = 24, 128, 4
# `count` words from word `from` of the call's on, to an address.
piece_type = np.dtype([("to", "<u8"), ("from", "<i4"), ("count", "<i4")])

CALLS = {
    "Join": JoinCall,
    "Send": SendCall,
    "Meet": MeetCall,
    "Heads": HeadsCall,
    "Attend": AttendCall,
    "Gate": GateCall,
    "Place": PlaceCall,
}

# Of a pass of so many tokens at most: tiles of 128 rows, K in stages of 64.
SHORT_KERNELS = (
    ProductKernel(32, 2, 2, 9, 0, 0),
    ProductKernel(64, 2, 2, 8, 0, 0),
    ProductKernel(128, 2, 2, 6, 0, 0),
    ProductKernel(256, 2, 2, 4, 0, 0),
)


@dataclass(frozen=True)
class Cut:
    """How all blocks share a matrix: K of every tile in `steps` units, dealt evenly. A part is what one block computes
    of one tile; its place is the sum of both numbers. A function of the matrix and the GPU alone, so that a token's
    sums have one order whoever shares its pass."""

    tiles: int
    steps: int
    blocks: int

    @property
    def parts(self) -> int:
        """Places: of some no part comes, where a block begins with a tile."""
        return self.tiles + self.blocks

    def table(self) -> np.ndarray:
        """int32 [tiles, 2]: a tile's first part and how many it has."""
        tile, rest = np.arange(self.tiles, dtype=np.int64), self.tiles * self.steps
        first, last = (
            ((step + 1) * self.blocks - 1) // rest for step in (tile * self.steps, (tile + 1) * self.steps - 1)
        )
        return np.stack([first + tile, last - first + 1], 1).astype(np.int32)


def cut_of(rows: int, padded_k: int, most: int) -> Cut:
    """On a GPU of `most` multiprocessors."""
    tiles, steps = -(-rows // ROWS), padded_k // UNIT
    return Cut(tiles, steps, min(most, tiles * steps))


def attend_bytes(tokens: int) -> int:
    """Shared memory: scores and weights of queries, and their sums."""
    return QUERIES * (tokens + 8) * 6 + QUERIES * 4


def render_short_pass(tokens: int, dtype: DType) -> str:
    """The header of short_pass.cu."""
    sizes = {f"k{name}Bytes": ctypes.sizeof(call) for name, call in CALLS.items()}
    most = SHORT_KERNELS[-1].tokens
    numbers = {"kTokens": tokens, "kMostTokens": most, "kTileRows": ROWS, **sizes}
    return "\n".join(
        [
            f"namespace kog {{ constexpr int kConsumers = {THREADS}; }}",
            "#include <kog/ptx.h>",
            "namespace kog {",
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            f"constexpr bool kF16 = {str(dtype is DType.F16).lower()};",
            "}  // namespace kog",
            "",
        ]
    )
