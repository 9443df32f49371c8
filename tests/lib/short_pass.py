"""The kernels of a pass of short prompts on a CPU (cuda_host/short_pass.cpp): a library a kernel."""

import ctypes
import re
import subprocess
from functools import cache

import torch

from kog_triton.backends.cuda.layout import short_pass as lay
from kog_triton.backends.cuda.layout.prompt import ARRANGE_THREADS, render_product
from kog_triton.backends.cuda.products import group_tables
from kog_triton.backends.cuda.prompt_texts import ALL
from kog_triton.schedule.lowering import layer_matrices
from tests.lib.compiled import made_once, version_of
from tests.lib.cuda_walk import HERE, INCLUDE, ROOT, FiberBackend

BETWEEN = {  # entry: the call's name in C++, threads, shared bytes of so many tokens
    "kog_join": ("Join", lay.JOIN_THREADS, lambda tokens: 256),
    "kog_send": ("Send", lay.JOIN_THREADS, lambda tokens: 256),
    "kog_meet": ("Meet", lay.JOIN_THREADS, lambda tokens: 256),
    "kog_heads": ("Heads", lay.HEAD_THREADS, lambda tokens: 256),
    "kog_attend": ("Attend", lay.ATTEND_THREADS, lay.attend_bytes),
    "kog_gate": ("Gate", lay.GATE_THREADS, lambda tokens: 256),
    "kog_place": ("Place", lay.PLACE_THREADS, lambda tokens: 256),
}
MOST = 1_000_000
PASS_ROUNDS = 3000  # that a pass waits for another rank


def _compiled(source, header, call, entry, threads, shared, include=INCLUDE):
    cu = ROOT / "backends/cuda" / source
    command = [
        "g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-Wno-attributes",
        f'-DPASS="{cu}"', f"-DCALL=kog::{call}", f"-DENTRY={entry}", f"-DTHREADS={threads}", f"-DSHARED={shared}",
        f"-I{HERE}", f"-I{include}",
    ]  # fmt: skip
    used = [cu, HERE / "short_pass.cpp", *sorted(HERE.rglob("*.h")), *sorted((include / "kog").rglob("*.h"))]
    parts = [version_of("g++"), header.encode(), " ".join(command).encode()]

    def make(draft):
        text = draft.with_suffix(".h")
        text.write_text(header)
        generated = f'-DGENERATED="{text}"'
        subprocess.run([*command, generated, str(HERE / "short_pass.cpp"), "-o", str(draft)], check=True)

    loaded = ctypes.CDLL(str(made_once([*parts, *(p.read_bytes() for p in used)], make)))
    loaded.kog_run.restype = ctypes.c_long
    return loaded


def run(library, call, blocks, seed=0):
    assert library.kog_run(ctypes.byref(call), blocks, seed, ctypes.c_long(MOST)) == 0


@cache
def between(entry, tokens, dtype):
    call, threads, shared = BETWEEN[entry]
    header = lay.render_short_pass(tokens, dtype)
    return _compiled("short_pass.cu", header, call, entry, threads, shared(tokens))


@cache
def product(kernel, dtype, entry="kog_product", include=INCLUDE):
    """The kernel that leaves parts, with its product of a warpgroup by definition, or what arranges its tokens."""
    header = render_product(kernel, dtype, parts=True)
    header, count = re.subn(r"KOG_DEVICE void multiply\(.*?\n}", "", header, flags=re.S)
    assert count == 1
    header += f"""#include <kog/prompt/hopper.h>
namespace kog {{
inline void multiply(float (&sums)[{kernel.tokens // 2}], u32 a, u32 b, u32 c, u32 d, u64 x) {{
  multiply_group<kF16>(sums, a, b, c, d, x);
}}
}}
"""
    if entry == "kog_arrange":
        return _compiled("prompt.cu", header, "Arrange", entry, ARRANGE_THREADS, 256)
    call, threads, shared = "Product", kernel.threads, kernel.shared_bytes
    return _compiled("prompt.cu", header, call, entry, threads, shared, include)


def ready_of(dtype):
    """Makes launches ready, each compiled when it first runs; the stream is a seed."""

    def ready(kernel, entry, blocks, threads, call):
        def queue(seed):
            if entry == "kog_product":
                library = product(kernel, dtype)
                assert threads == kernel.threads
            else:
                library = between(entry, kernel.tokens, dtype)
                assert threads == BETWEEN[entry][1]
            run(library, call, blocks, seed)

        return queue

    return ready


class PassBackend(FiberBackend):
    """FiberBackend with passes of short prompts, on a GPU of few multiprocessors; `passes` notes what each has run."""

    prompt_kernels = ALL
    _most_blocks = 7

    def __init__(self, weights, options, **others):
        self.passes, self.kept = [], []
        super().__init__(weights, options, **others)

    def _moves_outputs(self, lowering):
        return False  # the library's prompts go by copies (test_rank_outputs.py)

    def _open_short(self, *given):
        self.wait_ns = PASS_ROUNDS
        short = super()._open_short(*given)
        right = short.queue

        def queue(prompts):
            self.passes.append([p.slot for p in prompts])
            right(prompts)

        short.queue = queue
        return short

    def _groups_of(self, matrices):
        lowering = self.layout.lowering
        table, at = group_tables(lowering, {s.name: s for s in layer_matrices(lowering.schedule)})
        kept = torch.from_numpy(table)
        self.kept.append(kept)
        return lambda stage, layer: kept[at[stage, layer][0]].data_ptr()

    def _short_kernels(self, device):
        return ready_of(self.spec.dtype)
