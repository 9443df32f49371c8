"""What the compiler made of the megakernel for a target, without that GPU: registers, spills, instructions.

Triton carries its own assemblers, so any machine can ask for any target:

    compile_report(named_shape("llama-3.2-1b"), "sm_90").spilled_bytes == 0
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kog_triton.backends.triton.kernel.decode import decode_kernel
from kog_triton.backends.triton.kernel.pointers import Pointers
from kog_triton.backends.triton.kernel.shared_step import shared_kernel
from kog_triton.backends.triton.kernel.stage import stage_kernel
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.schedule import build
from kog_triton.schedule.triton import lower_tiles

TARGETS = (
    "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100",
)  # fmt: skip
# Triton's names of the pointers' types; HALVES have the model's own 16-bit type.
FLOATS = ("gains", "biases", "qk_gains", "rope", "bias", "logits", "chunk")
HALVES = ("kv", "half_weights", "half_embed", "half_chunk")
LONGS = ("wide", "mailbox", "profile")
NUMBERS = ("layer", "position", "token")  # of a stage


@dataclass(frozen=True)
class CompileReport:
    """One compilation of a kernel."""

    target: str
    num_threads: int  # of a block
    registers: int  # of a thread; on AMD vector registers, accumulators included
    spilled_bytes: int  # of a thread, in memory
    shared_bytes: int  # of a block
    instructions: Counter[str]  # machine instructions by full name
    ttgir: str  # Triton's GPU intermediate code

    def count(self, pattern: str) -> int:
        """Machine instructions whose name matches a regular expression."""
        return sum(n for name, n in self.instructions.items() if re.fullmatch(pattern, name))


def compile_report(spec: ModelSpec, target: str, **sizes: Any) -> CompileReport:
    """What the compiler made of the kernel of a model for a target; `sizes` are those of `compile_kernel`."""
    compiled, num_warps = compile_kernel(spec, target, **sizes)
    amd = target.startswith("gfx")
    registers, spilled, instructions = (_read_amd if amd else _read_nvidia)(compiled.asm)
    shared, ttgir = compiled.metadata.shared, compiled.asm["ttgir"]
    threads = num_warps * warp_size(target)
    return CompileReport(target, threads, registers, spilled, shared, instructions, ttgir)


def warp_size(target: str) -> int:
    return 64 if target.startswith("gfx9") else 32


def compile_kernel(
    spec: ModelSpec,
    target: str,
    num_blocks: int = 128,
    max_context: int = 4096,
    rules: bool = False,
    chunks: bool = False,
    stage: str = "",
    ones: bool = False,
    columns: int = 1,
    large: Collection[str] = Pointers._fields,
) -> tuple[Any, int]:
    """Triton's compiled kernel of a model for a target, sm_80 .. or gfx90a .. , and the warps of a block.

    With `rules`, the one that knows every sampling rule; with `chunks`, the one that runs prompts in chunks; with a
    `stage`, that of run_stage, with `ones` for a layer, position and token of 1, which Triton compiles in. `large`: the
    pointers to 2 GiB and more, of whose accesses Triton makes other instructions for AMD.
    """
    vendor = "amd" if target.startswith("gfx") else "nvidia"
    tiles = lower_tiles(build(spec), num_blocks, max_context, vendor)
    half = "*fp16" if tiles.f16 else "*bf16"
    types = dict.fromkeys(Pointers._fields, "*i32") | {"limit": "i32"}
    types |= dict.fromkeys(HALVES, half)
    types |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(LONGS, "*i64")
    signature: dict[str, Any] = {"p": Pointers(**types)}
    if stage:
        signature |= {"x": "*fp32", "out": "*fp32"} | ({} if ones else dict.fromkeys(NUMBERS, "i32"))
        known = dict.fromkeys(NUMBERS, 1) if ones else {}
        known |= {"STAGE": stage, "S": tiles}
    elif columns > 1:
        known = {"S": tiles, "COLUMNS": columns, "RULES": rules}
    else:
        known = {"S": tiles, "RULES": rules, "CHUNKS": chunks}
    aligned = [["tt.divisibility", 16]]
    facts = {
        (0, i): aligned if name in large else [*aligned, ["tt.pointer_range", 32]]
        for i, name in enumerate(Pointers._fields)
        if name != "limit"
    }
    source = ASTSource(
        fn=stage_kernel if stage else shared_kernel if columns > 1 else decode_kernel,
        signature=signature | dict.fromkeys(known, "constexpr"),
        constexprs={(len(signature) + i,): value for i, value in enumerate(known.values())},
        attrs=facts,
    )
    machine = (
        GPUTarget("cuda", int(target[3:]), 32) if vendor == "nvidia" else GPUTarget("hip", target, warp_size(target))
    )
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: machine))
    num_warps = tiles.sizes.warps
    options = {"num_warps": num_warps, "enable_fp_fusion": True}  # as the backend launches it
    return triton.compile(source, target=machine, options=options), num_warps


def _read_nvidia(asm: dict[str, Any]) -> tuple[int, int, Counter[str]]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        usage, sass = (
            subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers, stack = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", sass, re.M)
    return registers, stack, Counter(names)


def _read_amd(asm: dict[str, Any]) -> tuple[int, int, Counter[str]]:
    """Instruction names carry their cache bits: "global_load_dword sc0 sc1"."""
    text = asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])  # type: ignore[index]

    names = Counter[str]()
    for line in text.splitlines():
        found = re.match(r"\t([a-z]\w+)\s+([^;]*)", line)
        if found and not line.startswith("\t."):
            bits = re.findall(r"\b(?:sc0|sc1|nt)\b|(?<= )glc\b|(?<= )slc\b", found[2])
            names[" ".join([found[1], *bits])] += 1
    return number("vgpr_count"), number("private_segment_fixed_size"), names
