"""Products of prompts: which kernel computes one, its header, and how its tiles are dealt to the GPU's blocks."""

import ctypes
from dataclasses import dataclass

from kog_triton.backends.cuda.layout.batches import THREADS
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.schedule import Stage

FRAG_K, FRAGMENT_ROWS, LEAST_PARTS = 32, 8, 4
VALUES = 8  # of 16 bits that are loaded and stored at once
ARRANGE_THREADS = 256


class ProductCall(ctypes.Structure):
    """kog::Product (include/kog/prompt/walk.h)."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("arena", "groups", "x", "y", "partials", "arrived")),
        *((n, ctypes.c_int) for n in ("tokens", "padded", "rows", "row_tiles", "token_tiles")),
        *((n, ctypes.c_int) for n in ("steps", "whole", "slab_shift", "ring_slot")),
        ("ring_slot_step", ctypes.c_int),
    )


class ArrangeCall(ctypes.Structure):
    """kog::Arrange (prompt.cu)."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((n, ctypes.c_int) for n in ("tokens", "padded", "cols", "parts", "steps")),
    )


@dataclass(frozen=True)
class ProductKernel:
    """One compiled kernel of prompt.cu.

    tokens   of a tile
    groups   warpgroups that multiply, 64 rows each
    blocks   K blocks of 32 values a stage of the ring
    step_us  of a tile's stage when all multiprocessors multiply, one H200
    join_us  what it adds that blocks share tiles, likewise
    """

    tokens: int
    groups: int
    blocks: int
    stages: int
    step_us: float
    join_us: float

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        """Ring and barriers, tokens on their way out, a word, and what aligns them to 1,024 bytes."""
        stage = (self.rows + self.tokens) * self.blocks * 64
        return self.stages * (stage + 16) + self.groups * min(self.tokens, 64) * 128 + 16 + 1024

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


def takes(lowering: CudaLowering, stage: Stage) -> bool:
    """Whether the kernels read this stage: fragments of 8 rows by 32 values, K in four parts or more."""
    tiling = lowering.tilings[stage.name]
    whole = stage.rows % VALUES == 0 and stage.cols % VALUES == 0
    cut = tiling.fragment_rows == FRAGMENT_ROWS and tiling.k_parts >= LEAST_PARTS
    return whole and cut and lowering.frag_k == FRAG_K


def deal(rows: int, padded_k: int, tokens: int, most: int) -> Dealt:
    """The fastest way by the figures above on a GPU of `most` multiprocessors; a function of its arguments alone, so
    that equal prompts get equal bits."""
    fits = [k for k in KERNELS if k.tokens >= tokens][:1] if tokens <= 128 else []
    ways = [way for k in fits or KERNELS[-2:] for way in _ways(k, rows, padded_k, tokens, most)]
    return min(ways, key=lambda way: _us(way, most))


def _ways(kernel: ProductKernel, rows: int, padded_k: int, tokens: int, most: int) -> list[Dealt]:
    row_tiles, token_tiles = -(-rows // kernel.rows), -(-tokens // kernel.tokens)
    tiles, steps = row_tiles * token_tiles, padded_k // (32 * kernel.blocks)
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


def render_product(
    kernel: ProductKernel, dtype: DType, unpacked: bool = False, parts: bool = False
) -> str:
    """The header of prompt.cu.

    unpacked  a launch before writes the weights (unpack.cu)
    parts     the sums of each part of a tile stay where they are, for what comes next to add (short_pass.h)
    """
    numbers = {
        "kTokens": kernel.tokens,
        "kGroups": kernel.groups,
        "kBlocks": kernel.blocks,
        "kStages": kernel.stages,
        "kSharedBytes": kernel.shared_bytes,
        "kProductBytes": ctypes.sizeof(ProductCall),
        "kArrangeBytes": ctypes.sizeof(ArrangeCall),
        "kArrangeThreads": ARRANGE_THREADS,
    }
    f16 = dtype is DType.F16
    return "\n".join(
        [
            f"namespace kog {{ constexpr int kConsumers = {THREADS}; }}",
            "#include <kog/ptx.h>",
            "namespace kog {",
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            f"constexpr bool kF16 = {str(f16).lower()}, kUnpacked = {str(unpacked).lower()};",
            f"constexpr bool kParts = {str(parts).lower()};",
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
