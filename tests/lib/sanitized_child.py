"""A process to run under compute-sanitizer: a tiny model on kernels of one kind; prints what came of it.
Half of the kinds are in float16, half in bfloat16.

argv: a case of CASES, edits of EDITS joined by "+" or "none", and a folder for planted sources and the kernels.
"""

import functools
import hashlib
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kog_triton.backends import BackendOptions, watchdog
from kog_triton.backends.cuda import toolchain
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.gpus import open_gpus
from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.layout import header
from kog_triton.backends.cuda.layout.layout import Layout, lay_out
from kog_triton.backends.cuda.layout.prompt import ProductKernel, render_product, takes
from kog_triton.backends.cuda.layout.unpack import render_unpack
from kog_triton.backends.cuda.memory import HALF, allocate
from kog_triton.backends.cuda.products import ArenaProducts
from kog_triton.backends.cuda.unpacking import Unpacking
from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.model.spec import DType, ModelSpec
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.schedule import build
from tests.lib.cuda_planting import plant
from tests.lib.lowering_cases import ArrayWeights, lanes
from tests.lib.narrow_stages import CASES as UNPACKED
from tests.lib.narrow_stages import FEW, FEW_APART
from tests.lib.narrow_stream import NarrowWeights, narrow_spec, random_weights
from tests.lib.product_cases import dealt
from tests.lib.ring_walker import spec_of

PATIENCE = 200  # instrumented code is that much slower, or a little less
PARTIALS = "partials = reinterpret_cast<float*>(scratch + (kPartialBytes > 0 ? kScratchBytes : 0));\n"
IN_WARP = "in_warp = thread % kWarpThreads;\n"
LOADS = "    for (int f = 0; f < kFragments; f++) w[f] = Fragment::load(from + f * kFragmentOfAll<Weights>);\n"
RELEASE = "    if (mine) ring.release(b);\n"
UNPACKS = "int warp = thread / 32, lane = thread % 32;\n"
STORES = "*reinterpret_cast<ThreadWords*>(to + step * kWarps * kFragmentBytes) = wide_words("
ONE_ARRIVES = "if (b.in_warp == 0) barrier_arrive(&b.empty[slot]);\n"
BAD_STORE = "*(volatile u32*)(1ull << 46) = 1;\n"
SCALES = "    if constexpr (Weights::kScaleRows > 0) {\n      const u8* record = ring.weights(b)"
BESIDE = "  beside.scale = row_scale;\n"
RELEASE_STAGE = "KOG_DEVICE void release(int index) {"
STAGE_CAME = "    if (half == 0) wait_barrier(shared.full + stage.index, stage.phase);\n"
EDITS = {
    "memcheck": (
        ("block.h", IN_WARP, IN_WARP + "if (thread == 0) *(volatile u32*)(1ull << 46) = 1;\n"),
    ),
    "racecheck": (
        ("block.h", PARTIALS, PARTIALS + "if (thread % 32 == 0) partials[0] += thread;\n"),
    ),
    "synccheck": (
        ("block.h", IN_WARP, IN_WARP + "if (in_warp < 16) __syncwarp(0xffff0000u);\n"),
    ),
    # A warp gives its chunk back to the producer before it has read it.
    "early release": (
        ("narrow.h", RELEASE, ""),
        ("narrow.h", "#pragma unroll\n" + LOADS, RELEASE + "#pragma unroll\n" + LOADS),
    ),
    # No fault: of a warp that is done with a chunk each lane arrives for itself. racecheck follows
    # mbarriers by lane, and takes 31 of 32 for unordered where one speaks for all.
    "all arrive": (
        ("ring.h", ONE_ARRIVES, "barrier_arrive(&b.empty[slot]);\n"),
        ("ring.h", "barrier_init(&b.empty[i], kWarps);", "barrier_init(&b.empty[i], 32 * kWarps);"),
        ("prompt.cu", "if (threadIdx.x % 128 == 0) barrier_arrive(shared.empty + index);",
         "barrier_arrive(shared.empty + index);"),
        ("prompt.cu", "barrier_init(shared.empty + i, kGroups);", "barrier_init(shared.empty + i, 128 * kGroups);"),
    ),
    # Where scales of narrow weights are read; and bytes that are multiplied before all warps have staged theirs.
    "narrow memcheck": (("narrow.h", SCALES, "    if (b.thread == 0) " + BAD_STORE + SCALES),),
    "narrow racecheck": (("inputs.h", "  sync_staged<Stage::kParts == kWarps>();\n", ""),),
    # The same in products of prompts, whose stages of weights and scales are given back before they are read.
    "narrow prompt memcheck": (
        ("prompt/pieces.h", BESIDE, BESIDE + "  if (threadIdx.x == 0) " + BAD_STORE),
    ),
    "narrow prompt racecheck": (
        ("prompt.cu", RELEASE_STAGE, RELEASE_STAGE + "}\n  KOG_DEVICE void release_early(int index) {"),
        ("prompt.cu", STAGE_CAME, STAGE_CAME + "    if (half == 0) release_early(stage.index);\n"),
    ),
    # The kernel that unpacks has no Block: it stores where nothing is, or leaves out a thread's values.
    "unpack memcheck": (
        ("prompt/unpack.h", UNPACKS, UNPACKS + "if (thread == 0) *(volatile u32*)(1ull << 46) = 1;\n"),
    ),
    "unpack initcheck": (
        ("prompt/unpack.h", STORES, "if (thread > 0) " + STORES),
    ),
}  # fmt: skip

GREEDY = SamplingParams(temperature=0)
ALL_RULES = SamplingParams(temperature=1, seed=3, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.5, logprobs=3)
PLAIN, LANES = spec_of(dtype=DType.F16), lanes(2, dtype=DType.F16)
PLAIN_BF16 = spec_of(dtype=DType.BF16)
NARROW = {name: FORMATS[name] for name in ("fp8-block", "int4-g128")}
PROMPT, LONG = (5, 17, 60), tuple((3 + 7 * i) % 100 for i in range(19))


def left(cubin: bytes) -> bytes:
    """A kernel, left in the folder that the process was given, where racecheck's reports are looked up."""
    path = Path(sys.argv[3], f"{hashlib.sha256(cubin).hexdigest()}.cubin")
    path.write_bytes(cubin + b"\0")  # cupy takes the last byte off, which the driver does not miss
    return cubin


class Watched(CudaBackend):
    """Leaves every kernel that it loads."""

    def _compile(self, source: str, layout: Layout) -> bytes:
        return left(super()._compile(source, layout))


def opened(spec: ModelSpec, num_blocks: int, chunk: int = 0, columns: Sequence[int] = ()) -> CudaBackend:
    """Prompts in chunks of so many positions, a token at a time if 0; these kernels of columns."""
    kind = type("Sized", (Watched,), {"chunk_positions": chunk, "column_counts": columns})
    options = BackendOptions(device="nvidia", prefill="kernel", num_slots=max(columns, default=1))
    backend = kind(random_weights(spec), options, num_blocks)
    backend.wait_ns *= PATIENCE
    backend.settle()
    assert (backend.chunks.kernel is not None) == bool(chunk)
    for count in columns:
        while not backend.columns.ready(count):
            time.sleep(0.1)
    return backend


def ask(backend: CudaBackend, *prompts: Sequence[int], params: SamplingParams = GREEDY, count: int = 3) -> None:
    """Requests that are posted at once; the last one under `params`."""
    mailbox = Mailbox()
    for slot, prompt in enumerate(prompts):
        one = params if slot == len(prompts) - 1 else GREEDY
        mailbox.post(Request(slot, tuple(prompt), one, one.seed or 0, count))
    backend.generate(mailbox)
    for slot in range(len(prompts)):
        steps = mailbox.read(slot)
        failures = [str(step.error) for step in steps if isinstance(step, Failure)]
        print(slot, failures or [step.token for step in steps], flush=True)


def one_token(fault: str) -> None:
    backend = opened(PLAIN, 4)
    if "initcheck" in fault:
        gains = backend.memory.gains
        held = torch.empty_like(gains)
        held[..., 1:] = gains[..., 1:]  # one of a row is enough: each that is read is told, which takes long
        gains.set_(held)
    ask(backend, PROMPT)
    ask(backend, PROMPT, params=ALL_RULES)
    out = backend.run_stage("qkv_proj", 0, {"x": torch.ones(1, 1, PLAIN.hidden_size)})["q"]
    print("stage", float(torch.as_tensor(out).double().abs().sum()), flush=True)


def several_columns(fault: str) -> None:
    backend = opened(PLAIN_BF16, 4, columns=(8,))
    ask(backend, *(LONG[i : i + 1 + i % 3] for i in range(8)), params=ALL_RULES)
    assert backend.columns.kernels


def chunks(fault: str) -> None:
    """A prompt whose last chunk is not full, and one that goes on behind what is cached."""
    backend = opened(PLAIN_BF16, 4, chunk=8)
    ask(backend, LONG)
    mailbox = Mailbox()
    mailbox.post(Request(0, (*LONG, 1, 2, 3, 4), GREEDY, 0, 2, cached=len(LONG)))
    backend.generate(mailbox)
    print([getattr(step, "token", step) for step in mailbox.read(0)], flush=True)


def lane_kernels(fault: str) -> None:
    """A Laneformer with a mean head and delayed outputs on each kernel there is for it."""
    backend = opened(LANES, 8, chunk=8, columns=(2,))
    ask(backend, LONG[:2], params=ALL_RULES)
    ask(backend, LONG)
    ask(backend, LONG[:2], LONG[2:3], count=7)
    assert backend.columns.kernels


def joins(fault: str) -> None:
    """Contexts of many splits, joined by their readers and, longer, by the blocks that made them."""
    header.split_least, header.MERGED_LENGTH = lambda spec: 1, 7
    spec = PLAIN_BF16.replace(hidden_size=40, num_kv_heads=1, windows=(3, 0, 6))
    backend = opened(spec, 5, chunk=8, columns=(2,))
    assert backend.layout.splits > header.MERGED
    ask(backend, LONG[:2], count=9)
    ask(backend, LONG)
    ask(backend, LONG[:2], LONG[2:9], count=6)


def profile(fault: str) -> None:
    recording = opened(PLAIN, 4).profile(PROMPT, 3)
    print("profile", recording.ticks.shape, bool((recording.ticks > 0).any()), flush=True)


def unpack(fault: str) -> None:
    """Matrices of every kind of code, scale and offset, unpacked for prompts."""
    (device,), gpu = open_gpus(1)
    for name in ("int4 g128", "int4 g128, zero points", "int4 g32, minimums (Q4_1)", "mxfp4", "fp8 blocks",
                 "fp8 channels", "int8 channels"):  # fmt: skip
        how, sizes = UNPACKED[name]
        spec = narrow_spec(how, **sizes)
        lowering = lower(build(spec), gpu, 4)
        memory = allocate(lay_out(lowering, 64), NarrowWeights(spec, ArrayWeights(spec)), 1, device)
        unpacking = Unpacking(
            lowering,
            memory.weights,
            memory.biases,
            lambda kind, spec=spec: Kernel(
                left(compile_cubin(render_unpack(kind, spec.dtype), "unpack.cu", gpu.arch)), "kog_unpack", 0, device
            ),
            layer_matrices(lowering.schedule),
        )
        sums = [
            int(unpacking.run(layer, stage.name).long().sum())
            for layer in range(spec.num_layers)
            for stage in layer_matrices(lowering.schedule)
        ]
        print(name, sums, flush=True)


def narrow(fault: str) -> None:
    """A token at a time: FP8 in blocks, whose codes are unpacked, and int4, which meets bytes."""
    for name, how in NARROW.items():
        print(name, flush=True)
        ask(opened(narrow_spec(how, **FEW | {"num_layers": 1}), 4), PROMPT)


def narrow_columns(fault: str) -> None:
    """Two requests together, and eight of int4, and a prompt in chunks. Warps that shared a part of K would all put the
    same scales."""
    for (name, how), count, chunk in zip(NARROW.items(), (2, 8), (8, 0), strict=True):
        print(name, flush=True)
        backend = opened(narrow_spec(how, **FEW_APART), 4, chunk=chunk, columns=(count,))
        ask(backend, *(LONG[i : i + 1 + i % 2] for i in range(count)), count=2)
        assert backend.columns.kernels
        if chunk:
            ask(backend, LONG[: chunk + 2], count=1)


class Compiled:
    """A kernel of products, compiled once it is launched."""

    def __init__(self, compile: Callable[[], Kernel]) -> None:
        self.queued = lambda *launch: compile().queued(*launch)


def narrow_prompt(fault: str) -> None:
    """Products of prompts of 16 and of 40 tokens with narrow weights, by tiles of two sizes: one block's, whose ring
    wraps, and those that all blocks share and join."""
    (device,), gpu = open_gpus(1)
    as_it_is = set(fault.split("+")) <= {"none", "all arrive"}
    for name, how in NARROW.items():
        spec = narrow_spec(how, **FEW_APART)
        lowering, weights = lower(build(spec), gpu, 4), random_weights(spec)
        memory = allocate(lay_out(lowering, 64), weights, 1, device)

        def load(kernel: ProductKernel, entry: str, shared: int, spec: ModelSpec = spec) -> Compiled:
            def compile() -> Kernel:
                text = render_product(kernel, spec.dtype)
                return Kernel(left(compile_cubin(text, "prompt.cu", gpu.arch)), entry, shared, device)

            return Compiled(functools.cache(compile))

        products = ArenaProducts(lowering, memory.weights, HALF[spec.dtype], load, memory.biases)
        all_blocks = products._most
        for stage_name in ("o_proj", "down_proj"):
            stage = lowering.schedule.stage(stage_name)
            assert takes(lowering, stage)
            w = dealt(weights, stage, 0).to(HALF[spec.dtype]).double()
            for tokens, blocks in itertools.product((16, 40), (all_blocks, 1)):
                torch.manual_seed(tokens)
                x = torch.randn(1, tokens, stage.cols).to(HALF[spec.dtype])
                products._most = blocks
                products._ready.clear()
                got = products.product(0, stage_name, x.to(device), None).cpu().double()
                off = float((got - x.double() @ w.mT).norm() / got.norm())
                assert off < 4e-3 or not as_it_is, (name, stage_name, tokens, off)
                print(name, stage_name, tokens, float(got.sum()), flush=True)


CASES: dict[str, Callable[[str], None]] = {
    "one-token": one_token,
    "columns": several_columns,
    "chunks": chunks,
    "lanes": lane_kernels,
    "joins": joins,
    "profile": profile,
    "unpack": unpack,
    "narrow": narrow,
    "narrow columns": narrow_columns,
    "narrow prompt": narrow_prompt,
}


def plant_all(folder: Path, edits: Sequence[tuple[str, str, str]]) -> None:
    """Edits of headers and of sources: what is compiled from here on has them."""
    toolchain.INCLUDE = plant(folder, *(edit for edit in edits if edit[0].endswith(".h")))
    sources = folder / "sources"
    sources.mkdir()
    for path in toolchain.FOLDER.glob("*.cu"):
        shutil.copy(path, sources)
    for source, before, after in edits:
        if source.endswith(".cu"):
            text = (sources / source).read_text()
            assert text.count(before) == 1, f"{source}: {before!r} stands there {text.count(before)}x"
            (sources / source).write_text(text.replace(before, after))
    toolchain.FOLDER = sources


def main(case: str, fault: str, folder: str) -> None:
    edits = [edit for name in fault.split("+") for edit in EDITS.get(name, ())]
    if edits:
        plant_all(Path(folder), edits)
    watchdog.SILENCE_S *= PATIENCE
    CASES[case](fault)
    torch.cuda.synchronize()  # racecheck tells of races once the host waits so; the end of the process loses them


if __name__ == "__main__":
    main(*sys.argv[1:])
