"""The expressions of hip/expressions.inc with their inputs as constants: what LLVM folds them to, with no hardware.

Where clang has a builtin of AMD's for an instruction, LLVM folds that builtin; where an instruction stands in assembly,
what C++ says it means. What is left as code, LLVM does not offer.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from tests.lib.compiled import made_once, version_of
from tests.lib.gfx942 import clang
from tests.lib.gfx942.differential import ROWS as ROWS_OF_KERNELS
from tests.lib.gfx942.differential import SPECIAL, differing, executed, inputs

ROWS = 8  # inputs of each expression
HEAD = """
#define ATTRIBUTE __attribute__((device))
#pragma clang force_cuda_host_device begin
#include "meanings.h"
template <int N> struct Unsigned;
template <> struct Unsigned<2> { typedef u16 type; };
template <> struct Unsigned<4> { typedef u32 type; };
template <> struct Unsigned<8> { typedef u64 type; };
#define JOINED(NAME, ROW) NAME##_##ROW
#define FOLDED(NAME, ROW, TYPE, EXPRESSION)                                                            \\
    extern "C" __attribute__((device, used)) Unsigned<sizeof(TYPE)>::type JOINED(NAME, ROW)() {        \\
        const Input x = VALUES;                                                                        \\
        NAMES                                                                                          \\
        const TYPE y = EXPRESSION;                                                                     \\
        return __builtin_bit_cast(Unsigned<sizeof(TYPE)>::type, y);                                    \\
    }
#define BOTH(NAME, TYPE, EXPRESSION) FOLDED(f_##NAME, ROW, TYPE, EXPRESSION)
#define EACH(NAME, TYPE, HERE, THERE) FOLDED(f_##NAME, ROW, TYPE, HERE) FOLDED(g_##NAME, ROW, TYPE, THERE)
#define VECTOR(NAME, TYPE, HERE, THERE) FOLDED(f_##NAME, ROW, TYPE, THERE)
#define SCALAR(NAME, TYPE, HERE, THERE) FOLDED(f_##NAME, ROW, TYPE, THERE)
"""
CPP_TYPES = {"u4": "u32", "u8": "u64", "f4": "float", "f8": "double", "f2": "_Float16"}


def _constant(value: np.generic) -> str:
    code = value.dtype.str[1:]
    assert code in SPECIAL
    bits = int(value.view(f"u{value.itemsize}"))
    suffix = {2: "u16", 4: "u32", 8: "u64"}[value.itemsize]
    return f"__builtin_bit_cast({CPP_TYPES[code]}, ({suffix}){bits:#x}ul)"


def rows() -> np.ndarray:
    """Inputs, of which the first ROWS are folded."""
    return inputs(2)


def folded() -> dict[tuple[str, int], int]:
    """Bits of each expression f_... (and what it means, g_...) for each row, as far as LLVM folds it to a constant."""
    source = [HEAD]
    for k, row in enumerate(rows()[:ROWS]):
        values = ", ".join(_constant(row[name]) for name in row.dtype.names)
        source += [f"#undef ROW\n#undef VALUES\n#define ROW {k}\n#define VALUES {{{values}}}\n"]
        source += ['#include "expressions.inc"\n']
    text = "".join(source)

    def make(draft: Path) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".hip") as file:
            file.write(text)
            file.flush()
            command = [clang.CLANG, *clang.DEVICE, "-emit-llvm", "-S", *clang.BOTH]
            done = subprocess.run([*command, file.name, "-o", str(draft)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]

    sources = [path.read_bytes() for path in sorted(clang.HIP.iterdir())]
    ir = made_once([version_of(clang.CLANG), text.encode(), *sources], make).read_text()
    found = re.findall(r"^define [^\n]*@([fg]_\w+)_(\d+)\(\)[^\n]*\{\n\s*ret i(\d+) (-?\d+)\n\}", ir, re.M)
    return {(name, int(k)): int(value) % (1 << int(bits)) for name, k, bits, value in found}


def wrong() -> tuple[dict[str, str], set[str]]:
    """Kernels whose executed results are not what LLVM folds to, and those that were held to at least one constant."""
    data, constants = rows(), folded()
    found: dict[str, str] = {}
    held = set()
    for prefix, name, kind in ROWS_OF_KERNELS:
        got, _ = executed(prefix + name, kind, data)
        for form in ("f_", "g_"):
            for k in range(ROWS):
                bits = constants.get((form + name, k))
                if bits is None:
                    continue
                want = np.frombuffer(bits.to_bytes(got[k : k + 1].nbytes, "little"), got.dtype)
                held.add(prefix + name)
                if len(differing(got[k : k + 1], want.reshape(got[k : k + 1].shape))):
                    found[prefix + name] = f"{got[k]} for {want} of {data[k]}"
    return found, held
