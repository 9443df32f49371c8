"""Kernels of instructions that move values between lanes, through LDS or in matrices, with what each must give."""

import functools
from collections.abc import Callable

import numpy as np

from tests.lib.gfx942 import clang
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import PLAIN, Buffer, Kernel, Launch, Memory

LANES = 64
Lanes = np.ndarray  # uint32 [64]
LANE = np.arange(LANES)


def row_of(lane: Lanes) -> Lanes:
    return lane & ~15


DPP: dict[str, Callable[[Lanes], tuple[Lanes, Lanes]]] = {
    # lanes -> which lane each reads, whether there is one
    "quad_perm": lambda n: ((n & ~3) + np.array([2, 3, 0, 1])[n & 3], n >= 0),
    "row_shl_3": lambda n: (n + 3, (n & 15) < 13),
    "row_shr_1": lambda n: (n - 1, (n & 15) > 0),
    "row_shr_8": lambda n: (n - 8, (n & 15) >= 8),
    "row_ror_5": lambda n: (row_of(n) + ((n & 15) - 5) % 16, n >= 0),
    "wave_shl": lambda n: (n + 1, n < 63),
    "wave_rol": lambda n: ((n + 1) % 64, n >= 0),
    "wave_shr": lambda n: (n - 1, n > 0),
    "wave_ror": lambda n: ((n - 1) % 64, n >= 0),
    "row_mirror": lambda n: (row_of(n) + 15 - (n & 15), n >= 0),
    "row_half_mirror": lambda n: ((n & ~7) + 7 - (n & 7), n >= 0),
    "row_bcast_15": lambda n: (row_of(n) - 1, n >= 16),
    "row_bcast_31": lambda n: (np.full(64, 31), n >= 32),
    "row_newbcast_6": lambda n: (row_of(n) + 6, n >= 0),
}  # fmt: skip
SWIZZLE = {
    "xor_1": 0x041F,
    "xor_16": 0x401F,
    "reverse_8": 0x1C1F,
    "broadcast_of_4": 0x0018,
    "quad": 0x8000 | 0b00_01_10_11,
}


@functools.cache
def code_object() -> CodeObject:
    return clang.code_object("cross_lane.hip")


def run(name: str, *arrays: np.ndarray, memory: Memory = PLAIN, seed: int = 0, threads: int = LANES) -> Kernel:
    """Run a kernel of one workgroup on these arrays, in place."""
    kernel = Kernel(code_object(), name)
    args = [array.ctypes.data for array in arrays]
    kernel.run(Launch(args, (1, 1, 1), (threads, 1, 1)), [Buffer(array) for array in arrays], memory, seed)
    return kernel
