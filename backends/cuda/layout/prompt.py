"""Products of prompts: which kernel computes one, its header, and how its tiles are dealt to the GPU's blocks."""

import ctypes
import functools
from dataclasses import dataclass, replace

from kog_triton.backends.cuda.layout.batches import THREADS
from kog_triton.backends.cuda.layout.header import render_weights
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import WARPS, CudaLowering
from kog_triton.schedule.cuda_weights import StreamWeights
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.packing import PLACE_BYTES
from kog_triton.schedule.schedule import Stage
from kog_triton.schedule.topology import KB

FRAG_K, FRAGMENT_ROWS, LEAST_PARTS = 32, 8, 4
COPIED = 16  # bytes, of which a copy is a multiple, and where it begins
MOST_SHARED = 227 * KB  # of a block of Hopper's
WIDE = StreamWeights(None, FRAG_K)
VALUES = 8  # of 16 bits that are loaded and stored at once
ARRANGE_THREADS = 256


class ProductCall(ctypes.Structure):
    """kog::Product (include/kog/prompt/walk.h)."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("arena", "groups", "x", "y", "partials", "arrived")),
        ("row_scales", ctypes.c_void_p),
        *((n, ctypes.c_int) for n in ("tokens", "padded", "rows", "row_tiles", "token_tiles")),
        *((n, ctypes.c_int) for n in ("steps", "whole", "slab_shift", "ring_slot")),
        ("ring_slot_step", ctypes.c_int),
    )


class ArrangeCall(ctypes.Structure):
    """kog::Arrange (prompt.cu)."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((n, ctypes.c_int) for n in ("tokens", "padded", "cols", "slab_shift", "steps")),
        ("pack_shift", ctypes.c_int),
    )


@dataclass(frozen=True)
class ProductKernel:
    """One compiled kernel of prompt.cu.

    tokens   of a tile
    groups   warpgroups that multiply, 64 rows each
    blocks   K blocks of 32 values that are multiplied at once
    stages   of the ring
    step_us  of a tile's stage when all multiprocessors multiply, one H200; of narrow weights taken for bf16's
    join_us  what it adds that blocks share tiles, likewise
    halves   of a stage of the ring, of `blocks` each
    weights  how those lie that it reads
    """

    tokens: int
    groups: int
    blocks: int
    stages: int
    step_us: float
    join_us: float
    halves: int = 1
    weights: StreamWeights = WIDE

    @property
    def stage_blocks(self) -> int:
        return self.blocks * self.halves

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        """Ring and barriers, tokens on their way out, a word, and what aligns them to 1,024 bytes."""
        return self.stages * (self.stage_bytes + 16) + self.fixed_bytes

    @property
    def stage_bytes(self) -> int:
        """Weights with their scales, which end where a copy may, and tokens."""
        weights, fragments = self.weights, self.stage_blocks // self.weights.pack
        scales = -(-fragments * weights.record_bytes // COPIED) * COPIED
        group = fragments * weights.warp_bytes + scales
        return self.rows // FRAGMENT_ROWS * group + self.tokens * self.stage_blocks * 64

    @property
    def fixed_bytes(self) -> int:
        return self.groups * self.stored * 128 + 16 + 1024

    @property
    def stored(self) -> int:
        """Tokens of a warpgroup that are on their way out at once: fewer where a third stage then fits."""
        return min(self.tokens, 64 // self.halves)

    @property
    def partial_bytes(self) -> int:
        """Of a block's two parts of tiles."""
        return 2 * self.rows * self.tokens * 4


# Development runs on one H200, products of Llama-3.2-1B, Qwen3-8B and Qwen2.5-14B's kind
# (benchmarks/cuda-log.md#one-copy): a layer's four take 1.01 to 1.35 times as long as cuBLAS for 16 to 128 tokens,
# 1.10 to 1.26 for 512, 1.07 to 1.14 for 2,048 and 4,096. Sharing x between two blocks by multicast was slower (520
# for 700 TFLOP/s), as were K stages of 128 for tiles of 128 tokens (560 for 610).
KERNELS = (
    ProductKernel(16, 1, 4, 10, 0.6, 5.0),
    ProductKernel(32, 1, 4, 8, 0.6, 5.0),
    ProductKernel(64, 2, 2, 8, 0.6, 6.0),
    ProductKernel(128, 2, 2, 6, 0.45, 11.0),
    ProductKernel(256, 2, 2, 4, 0.74, 18.0),
)


@dataclass(frozen=True)
class Dealt:
    """How one product's tiles are dealt to `blocks`: the first `whole` of them whole, the rest by K steps."""

    kernel: ProductKernel
    row_tiles: int
    token_tiles: int
    steps: int
    whole: int
    blocks: int


@functools.cache
def kernels_of(weights: StreamWeights) -> tuple[ProductKernel, ...]:
    """`KERNELS` for a stage's weights. A stage of the ring is whole fragments of codes, and there are as many stages as
    fit."""
    if weights.format is None:
        return KERNELS
    return tuple(_narrow(kernel, weights) for kernel in KERNELS)


def _narrow(kernel: ProductKernel, weights: StreamWeights) -> ProductKernel:
    halves = max(1, weights.pack // kernel.blocks)
    one = replace(kernel, halves=halves, weights=weights, step_us=kernel.step_us * halves)
    return replace(one, stages=(MOST_SHARED - one.fixed_bytes) // (one.stage_bytes + 16))


def takes(lowering: CudaLowering, stage: Stage) -> bool:
    """Whether the kernels read this stage: fragments of 8 rows by 32 values, K in four parts or more."""
    tiling = lowering.tilings[stage.name]
    whole = stage.rows % VALUES == 0 and stage.cols % VALUES == 0
    cut = tiling.fragment_rows == FRAGMENT_ROWS and tiling.k_parts >= LEAST_PARTS
    return whole and cut and lowering.frag_k == FRAG_K


def product_kernels(lowering: CudaLowering) -> tuple[ProductKernel, ...]:
    """Of all kinds of a model's matrices that they read; of 16-bit weights where they read none."""
    stages = [s for s in layer_matrices(lowering.schedule) if takes(lowering, s)]
    kinds = dict.fromkeys(lowering.weights[s.name] for s in stages)
    return tuple(kernel for weights in kinds or {WIDE: None} for kernel in kernels_of(weights))


def ring_slot_steps(lowering: CudaLowering) -> tuple[int, int]:
    """Fragments a ring slot, and from one of a block's to its next, in PLACE_BYTES: a ProductCall's last fields."""
    return lowering.fragments, lowering.num_blocks * (lowering.ring_slot_bytes // PLACE_BYTES)


def deal(rows: int, padded_k: int, tokens: int, most: int, weights: StreamWeights = WIDE) -> Dealt:
    """The fastest way by the figures above on a GPU of `most` multiprocessors; a function of its arguments alone, so
    that equal prompts get equal bits."""
    kernels = kernels_of(weights)
    fits = [k for k in kernels if k.tokens >= tokens][:1] if tokens <= 128 else []
    ways = [way for k in fits or kernels[-2:] for way in _ways(k, rows, padded_k, tokens, most)]
    return min(ways, key=lambda way: _us(way, most))


def _ways(kernel: ProductKernel, rows: int, padded_k: int, tokens: int, most: int) -> list[Dealt]:
    row_tiles, token_tiles = -(-rows // kernel.rows), -(-tokens // kernel.tokens)
    tiles, steps = row_tiles * token_tiles, padded_k // (FRAG_K * kernel.stage_blocks)
    rounds = tiles // most * most
    blocks = min(most, tiles)
    ways = [Dealt(kernel, row_tiles, token_tiles, steps, tiles, blocks)]
    if rounds < tiles:
        ways.append(Dealt(kernel, row_tiles, token_tiles, steps, rounds, most))
    return ways


def _us(way: Dealt, most: int) -> float:
    tiles = way.row_tiles * way.token_tiles
    left = tiles - way.whole
    rounds = -(-way.whole // most)
    shared = left / most * way.steps * way.kernel.step_us + (way.kernel.join_us if left else 0)
    return rounds * way.steps * way.kernel.step_us + shared


def render_product(kernel: ProductKernel, dtype: DType, parts: bool = False) -> str:
    """The header of prompt.cu.

    parts  the sums of each part of a tile stay where they are, for what comes next to add (short_pass.h)
    """
    numbers = {
        "kPlaceBytes": PLACE_BYTES,
        "kTokens": kernel.tokens,
        "kGroups": kernel.groups,
        "kBlocks": kernel.blocks,
        "kHalves": kernel.halves,
        "kStages": kernel.stages,
        "kStored": kernel.stored,
        "kSharedBytes": kernel.shared_bytes,
        "kProductBytes": ctypes.sizeof(ProductCall),
        "kArrangeBytes": ctypes.sizeof(ArrangeCall),
        "kArrangeThreads": ARRANGE_THREADS,
        "kFragK": FRAG_K,
        "kWarps": WARPS,
    }
    f16 = dtype is DType.F16
    return "\n".join(
        [
            f"namespace kog {{ constexpr int kConsumers = {THREADS}; }}",
            "#include <kog/ptx.h>",
            "namespace kog {",
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            f"constexpr bool kF16 = {str(f16).lower()}, kParts = {str(parts).lower()};",
            f"constexpr bool kRowScales = {str(kernel.weights.row_scales).lower()};",
            *render_weights({"Weights": kernel.weights}),
            _multiply(kernel.tokens, "f16" if f16 else "bf16"),
            "}  // namespace kog",
            "",
        ]
    )


def _multiply(tokens: int, name: str) -> str:
    """sums += 64 rows, from registers, times `tokens` rows of shared memory, over 16 values of K."""
    count = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    what = f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{name}.{name}"
    return (
        f"KOG_DEVICE void multiply(float (&sums)[{count}], u32 a, u32 b, u32 c, u32 d, u64 x) {{\n"
        f'  asm volatile("{what} {{{sums}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 0;"\n'
        f'               : {outs} : "r"(a), "r"(b), "r"(c), "r"(d), "l"(x));\n'
        "}"
    )
