"""Small models whose Triton kernel for gfx942 runs in the executor, and the compilation of each.

As a program, in a process of its own because the tests' own import of Triton interprets kernels:
`python -m tests.lib.gfx942.triton_cases CASE VARIANT FILE` writes a line of JSON and the code object.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from tests import ROOT
from tests.lib.compiled import made_once
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.triton_cases import lanes, plain

CONTEXT = 64
VARIANTS = ("", "rules", "chunks", "rules+chunks")
TARGET = "gfx942"


@dataclass(frozen=True)
class Case:
    """`large`: the tensors of 2 GiB and more, of whose accesses Triton makes other instructions for AMD.

    `block_n`: attention.BLOCK_N; twice as many keys are walked by one split, so with few a long prompt's are joined.
    """

    spec: ModelSpec
    num_blocks: int = 8
    max_context: int = CONTEXT
    large: tuple[str, ...] = ()
    block_n: int = 16


CASES = {
    "llama": Case(plain(2)),
    "qwen3": Case(plain(2, qk_norm=True, qkv_bias=True, dtype=DType.BF16), 16),
    "laneformer": Case(lanes((Reduce.OWN, Reduce.DELAYED), 1, Head.VOCAB_PARALLEL, lane_norms=True)),
}


def full_size(name: str) -> Case:
    return Case(named_shape(name), 304, 4096, ("weights", "half_weights"), 64)


FULL_SIZE = {"llama-3.2-1b": full_size("llama-3.2-1b")}
MORE_SIZES = {name: full_size(name) for name in ("laneformer-2b", "qwen3-8b")}
# Layers in the order of Laneformer-2B's: sums at once in a row, and late ones of two layers before.
LATE = {
    "laneformer, late by two": Case(lanes((Reduce.OWN, Reduce.OWN, Reduce.DELAYED, Reduce.DELAYED, Reduce.DELAYED), 2))
}
SMALL = CASES | LATE
# What runs in the executor for an object of full size: the same exchanges in the same order.
STANDS_FOR = {"llama-3.2-1b": "llama", "laneformer-2b": "laneformer, late by two", "qwen3-8b": "qwen3"}
ALL = SMALL | FULL_SIZE | MORE_SIZES
FULL_OBJECTS = [(name, variant) for name in FULL_SIZE | MORE_SIZES for variant in VARIANTS]
# What a kernel is made of, but for the case.
FOLDERS = ("kog_triton/backends/triton", "kog_triton/schedule", "kog_triton/model")
FILES = ("tests/lib/compile_report.py", "tests/lib/triton_cases.py", "tests/lib/ring_walker.py")


@dataclass(frozen=True)
class CompiledKernel:
    code_object: CodeObject
    lds: int  # bytes, given at launch
    num_warps: int
    triton: str


@cache
def compiled(case: str, variant: str = "") -> CompiledKernel:
    """The kernel of a case, compiled once."""

    def make(draft: Path) -> None:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.lib.gfx942.triton_cases", case, variant, str(draft)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]

    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = [path.read_bytes() for path in [*paths, *(ROOT / file for file in FILES)]]
    parts = [version("triton").encode(), repr(ALL[case]).encode(), variant.encode(), *sources]
    line, _, blob = made_once(parts, make).read_bytes().partition(b"\n")
    return CompiledKernel(CodeObject(blob), **json.loads(line))


def compile_case(name: str, variant: str, file: str) -> None:
    """Write the file that `compiled` reads."""
    import triton.language as tl

    from kog_triton.backends.triton.kernel import attention
    from tests.lib.compile_report import compile_kernel

    case, flags = (ALL[name], dict.fromkeys(variant.split("+"), True) if variant else {})
    attention.BLOCK_N = tl.constexpr(case.block_n)
    kernel, num_warps = compile_kernel(case.spec, TARGET, case.num_blocks, case.max_context, **flags, large=case.large)
    facts = {"lds": kernel.metadata.shared, "num_warps": num_warps, "triton": version("triton")}
    Path(file).write_bytes(json.dumps(facts).encode() + b"\n" + kernel.asm["hsaco"])


if __name__ == "__main__":
    compile_case(*sys.argv[1:])
