"""Machine code of the CUDA kernel without a GPU: what NVRTC or nvcc makes of a layout, and what stands in its loops.

NVRTC where both are, as for the engine (backends/cuda/jit.py): of one release they give registers differently. A
kernel is compiled once for all tests that judge it (compiled.py); they are skipped where neither compiler is there.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kog_triton.backends.cuda import toolchain
from kog_triton.backends.cuda_archs import HOPPER
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from tests.lib import nvrtc
from tests.lib.compiled import made_once, version_of
from tests.lib.cuda_walk import INCLUDE, ROOT, header
from tests.lib.slow import some_always

SHAPES = ("llama-3.2-1b", "laneformer-2b", "qwen3-0.6b", "qwen2.5-coder-1.5b", "qwen3-8b")
LONGEST_LOOP = 1000  # instructions
WEIGHTS = r"\b[HI]MMA"  # what multiplies them
WORDS = r"\bLDG.*STRONG\.(GPU|SYS)"  # what asks for other blocks' words


def one_always(names):
    """Shapes whose kernels are compiled: one and the odd one always, the others with the slow tests."""
    names = list(names)
    return some_always(names, *({"llama-3.2-1b", "odd"} & set(names)))


def spec_named(name):
    """Of one of SHAPES, as it is measured."""
    spec = named_shape(name)
    return spec.replace(dtype=DType.F16) if spec.num_lanes > 1 else spec


def tool(name):
    """A disassembler of the CUDA toolkit, or the one that Triton's package brings."""
    found = shutil.which(name)
    if found is None:
        triton = pytest.importorskip("triton")
        path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
        found = str(path) if path.exists() else None
    return found or pytest.skip(f"{name} is not there")


def sass_of(layout, entry="decode.cu"):
    """The kernel compiled for the layout's GPU and disassembled, with its encodings."""
    source = header.render(layout) + (ROOT / "backends/cuda" / entry).read_text()
    return sass_of_text(source, layout.lowering.gpu.arch)


def sass_of_text(source, arch=HOPPER):
    library = nvrtc.load()
    nvcc = None if library else shutil.which("nvcc")
    if nvcc is None and library is None:
        pytest.skip("neither the wheel nvidia-cuda-nvrtc nor nvcc is there")
    dump, flags = tool("cuobjdump"), toolchain.flags_for(arch)
    headers = [path.read_bytes() for path in sorted(INCLUDE.rglob("*.h"))]

    def make(draft: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            text, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
            if nvcc:
                text.write_text(source)
                command = [nvcc, "-cubin", *flags, str(text), "-o", str(cubin)]
                subprocess.run(command, check=True, capture_output=True)
            else:
                cubin.write_bytes(nvrtc.compile_cubin(library, source, flags))
            sass = subprocess.run([dump, "-sass", str(cubin)], check=True, capture_output=True)
            draft.write_bytes(sass.stdout)

    compiler = version_of(nvcc) if nvcc else nvrtc.version(library)
    parts = [compiler, version_of(dump), " ".join((*toolchain.FLAGS, arch)).encode(), source.encode(), *headers]
    return made_once(parts, make).read_text()


def machine_code(layout, entry="decode.cu"):
    """(address, instruction) of the kernel."""
    return instructions(sass_of(layout, entry))


def instructions(text):
    return [(int(at, 16), what) for at, what in re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", text, re.M)]


def innermost(code, has):
    """Bodies of the smallest loops that contain an instruction matching `has`."""
    return [[w for a, w in code if r[0] <= a <= r[1]] for r in innermost_at(code, has)]


def innermost_at(code, has):
    """(first, last) address of each of those loops.

    Loops of thousands are left out: code that a far jump shares with a loop seems to be one.
    """
    loops = set()
    for at, what in code:
        to = re.search(r"\bBRA(?:\.\S+)? .*?(0x[0-9a-f]+)", what)
        if to and 0 < at - int(to.group(1), 16) < 16 * LONGEST_LOOP:
            loops.add((int(to.group(1), 16), at))
    places = [at for at, what in code if re.search(has, what)]
    held = sorted(r for r in loops if any(r[0] <= at <= r[1] for at in places))
    return [r for r in held if not any(o != r and r[0] <= o[0] and o[1] <= r[1] for o in held)]


def straight(code, has, apart=60):
    """Stretches of code outside those loops, from one instruction matching `has` to the last near it."""
    loops = innermost_at(code, has)
    found = []
    for n, (at, what) in enumerate(code):
        if re.search(has, what) and not any(first <= at <= last for first, last in loops):
            if not found or n - found[-1][1] > apart:
                found.append([n, n])
            found[-1][1] = n
    return [[what for _, what in code[first : last + 1]] for first, last in found]


def is_local(what):
    return re.search(r"\b(LDL|STL)\b", what)


def assert_no_loop_spills(code, in_weights=0, in_polls=0):
    """Neither loops that multiply weights, keys or values, nor what is laid out in place of one, nor loops that ask
    for other blocks' words, nor the one that fills the ring.

    in_weights  loads and stores that one of the first may have
    in_polls    that one of those that ask may have
    """
    weights, taken = innermost(code, WEIGHTS), straight(code, WEIGHTS)
    # A loop of batches, which begins with the words of their rows, waits for none.
    polls = [body for body in innermost(code, WORDS) if not any(re.search(WEIGHTS, w) for w in body)]
    fills = [body for body in innermost(code, r"SYNCS\.ARRIVE") if any("UBLKCP" in w for w in body)]
    assert len(weights) + len(taken) >= 6  # five matrix stages and attention
    assert any("MUFU.EX2" in what for body in weights for what in body)
    assert len(polls) >= 8 and len(fills) == 1
    for loops, most in ((weights, in_weights), (polls, in_polls), (taken + fills, 0)):
        for body in loops:
            assert len([what for what in body if is_local(what)]) <= most
