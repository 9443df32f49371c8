"""The expressions of hip/expressions.inc compiled for gfx942 and executed, and compiled for this machine and run."""

import ctypes
import functools
import re

import numpy as np

from tests.lib.gfx942 import clang
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import Buffer, Kernel, Launch

LANES = 64
COUNT = 4 * LANES  # inputs, of which scalars see the first LANES
TYPES = {
    "u32": "u4",
    "s32": "i4",
    "u64": "u8",
    "s64": "i8",
    "float": "f4",
    "double": "f8",
    "_Float16": "f2",
    "floats": "2f4",
    "halves": "2f2",
}

# name and type of each expression, by the macro that says where it is tested
LISTED = re.findall(r"^(BOTH|EACH|VECTOR|SCALAR)\((\w+), (\w+),", (clang.HIP / "expressions.inc").read_text(), re.M)
BY_VECTOR = [(name, kind) for macro, name, kind in LISTED if macro != "SCALAR"]
BY_SCALAR = [(name, kind) for macro, name, kind in LISTED if macro != "VECTOR"]


@functools.cache
def code_object() -> CodeObject:
    return clang.code_object("expressions.hip")


@functools.cache
def host() -> ctypes.CDLL:
    return ctypes.CDLL(str(clang.shared_object("expressions.cpp")))


INPUT = np.dtype(
    [(n, "u4") for n in "abcd"]
    + [(n, "f4") for n in ("fa", "fb", "fc")]
    + [(n, "f2") for n in ("ha", "hb")]
    + [(n, "f8") for n in ("da", "db", "dc")]
    + [(n, "u8") for n in ("la", "lb")],
    align=True,
)
SPECIAL = {
    "u4": [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x10000, 0x8000, 0xFFFF, 1000, 7],
    "u8": [0, 1, 1 << 63, (1 << 63) - 1, (1 << 64) - 1, 1 << 32, (1 << 32) - 1],
    "f4": [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 1e-40, -1e-45, 1e38, 3e38, 1.5e-38, np.inf, -np.inf, np.nan],
    "f8": [0.0, -0.0, 1.0, -1.5, 2.5, 5e-324, 1e-310, 1e300, 1.7e308, 2.3e-308, np.inf, -np.inf, np.nan, 2e9],
    "f2": [0.0, -0.0, 1.0, -2.0, 6e-8, 6e-5, 65504.0, np.inf, -np.inf, np.nan],
}  # fmt: skip


def inputs(seed: int) -> np.ndarray:
    """Random values of all magnitudes, one of three special; equal pairs now and then."""
    rng = np.random.default_rng(seed)
    out = np.zeros(COUNT, INPUT)
    for name, (kind, _) in INPUT.fields.items():
        code = kind.str[1:]
        if code in ("u4", "u8"):
            bits = 8 * kind.itemsize
            values = rng.integers(0, 2**bits, COUNT, kind, endpoint=False) >> rng.integers(0, bits, COUNT).astype(kind)
        else:
            widest = {"f4": 37, "f8": 300, "f2": 4}[code]
            spread = rng.choice([1, widest / 4, widest], COUNT)
            with np.errstate(over="ignore"):
                values = (rng.standard_normal(COUNT) * 10.0 ** (spread * rng.uniform(-1, 1, COUNT))).astype(kind)
        special = rng.random(COUNT) < 1 / 3
        with np.errstate(over="ignore"):
            values[special] = rng.choice(np.array(SPECIAL[code], kind), special.sum())
        out[name] = values
    same = rng.random(COUNT) < 0.1
    for x, y in (("a", "b"), ("fa", "fb"), ("da", "db"), ("ha", "hb"), ("la", "lb")):
        out[y][same] = out[x][same]
    return out


def executed(name: str, kind: str, data: np.ndarray) -> tuple[np.ndarray, Kernel]:
    """What the kernel v_... or s_... makes of the inputs; scalars see the first LANES of them."""
    kernel = Kernel(code_object(), name)
    scalar = name.startswith("s_")
    out = np.zeros(COUNT, TYPES[kind])
    grid = (LANES, 1, 1) if scalar else (COUNT // LANES, 1, 1)
    block = (1, 1, 1) if scalar else (LANES, 1, 1)
    kernel.run(Launch([data.ctypes.data, out.ctypes.data], grid, block), [Buffer(data), Buffer(out)])
    return out[:LANES] if scalar else out, kernel


def expected(name: str, kind: str, data: np.ndarray) -> np.ndarray:
    out = np.zeros(COUNT, TYPES[kind])
    getattr(host(), f"r_{name}")(ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(out.ctypes.data), COUNT)
    return out


def differing(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Indices whose bits differ; any NaN equals any other."""
    same = got.view(f"u{got.itemsize}") == want.view(f"u{want.itemsize}")
    if got.dtype.kind == "f":
        same |= np.isnan(got) & np.isnan(want)
    return np.flatnonzero(~same.reshape(len(same), -1).all(1))


ROWS = [("v_", *row) for row in BY_VECTOR] + [("s_", *row) for row in BY_SCALAR]


def wrong(data: np.ndarray) -> dict[str, str]:
    """Each expression whose value is another than on this machine: bit for bit, but for a NaN's payload."""
    found = {}
    for prefix, name, kind in ROWS:
        got, _ = executed(prefix + name, kind, data)
        want = expected(name, kind, data)[: len(got)]
        for i in differing(got, want)[:1]:
            found[prefix + name] = f"{got[i]} for {want[i]} of {data[i]}"
    return found
