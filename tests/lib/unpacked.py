"""unpack.cu's own source on a CPU, one thread of the GPU's after the other."""

import ctypes
import subprocess

from kog_triton.backends.cuda.layout.unpack import render_unpack
from kog_triton.backends.cuda.unpacking import Unpacking
from kog_triton.schedule.lowering import layer_matrices
from tests.lib.compiled import made_once, version_of
from tests.lib.cuda_walk import HERE, INCLUDE

RUN = """
#include <kog/prompt/unpack.h>
extern "C" void run(const kog::Unpack* p, int blocks, int threads) {
  static_assert(sizeof(kog::Unpack) == kog::kUnpackBytes);
  for (int i = 0; i < blocks * threads; i++) kog::unpack_fragment(*p, i / threads, i % threads);
}
"""


class HostUnpack:
    """In the place of driver.Kernel; `include` may be a copy with errors."""

    def __init__(self, weights, dtype, include=INCLUDE):
        text = render_unpack(weights, dtype) + RUN
        headers = [*sorted(include.rglob("*.h")), *sorted(HERE.rglob("*.h"))]

        def make(draft):
            source = draft.with_suffix(".cpp")
            source.write_text(text)
            command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
            command += ["-Wno-unknown-pragmas", f"-I{HERE}", f"-I{include}"]
            subprocess.run([*command, str(source), "-o", str(draft)], check=True)

        parts = [version_of("g++"), text.encode(), *(h.read_bytes() for h in headers)]
        self._run = ctypes.CDLL(str(made_once(parts, make))).run

    def queued(self, blocks, threads, argument):
        return lambda stream: self._run(ctypes.byref(argument), blocks, threads)


def unpacking_of(lowering, memory, include=INCLUDE, rank=0):
    """Of a narrow model in a CPU's memory."""
    dtype = lowering.schedule.spec.dtype
    return Unpacking(
        lowering,
        memory.weights,
        memory.biases,
        lambda kind: HostUnpack(kind, dtype, include),
        layer_matrices(lowering.schedule),
        rank,
    )
