"""A GPU as data. A new GPU is one row; figures are the vendor's datasheet unless the comment says otherwise.

What the portable kernel (triton.py) takes at once depends on the vendor: SIZES, of GPUs without a row too.
"""

from dataclasses import dataclass

from kog_triton.errors import DeviceError

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
VENDORS = ("nvidia", "amd")


@dataclass(frozen=True)
class Gpu:
    name: str
    vendor: str  # "nvidia" or "amd"
    arch: str  # what a compiler calls it
    num_sms: int  # SMs or CUs
    num_blocks: int  # blocks of a persistent kernel: one a SM, all resident
    warp_size: int
    bandwidth: float  # bytes / s, datasheet
    shared_bytes: int  # shared memory (LDS) that one block may have
    memory_bytes: int
    l2_bytes: int
    dies: int = 1  # parts with an L2 of their own (XCDs)
    aliases: tuple[str, ...] = ()  # how drivers spell it


GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        # 128 of 132 blocks: power-of-two shapes divide evenly, and 128 blocks already stream
        # at the full rate (4.58 TB/s, the same as 132: benchmarks/cuda-log.md#limits).
        Gpu(
            "h200",
            "nvidia",
            "sm_90a",
            132,
            128,
            32,
            4.8e12,
            227 * KB,
            141 * 10**9,
            60 * MB,
            aliases=("NVIDIA H200",),
        ),
        Gpu(
            "h100",
            "nvidia",
            "sm_90a",
            132,
            128,
            32,
            3.35e12,
            227 * KB,
            80 * 10**9,
            50 * MB,
            aliases=("NVIDIA H100 80GB HBM3",),
        ),
        Gpu(
            "a100",
            "nvidia",
            "sm_80",
            108,
            108,
            32,
            2.039e12,
            163 * KB,
            80 * 10**9,
            40 * MB,
            aliases=("NVIDIA A100-SXM4-80GB",),
        ),
        Gpu(
            "l40s",
            "nvidia",
            "sm_89",
            142,
            142,
            32,
            864e9,
            99 * KB,
            48 * 10**9,
            96 * MB,
            aliases=("NVIDIA L40S",),
        ),
        # 256 of 304 CUs, 32 an XCD: what public descriptions of Kog's engine use.
        Gpu(
            "mi300x",
            "amd",
            "gfx942",
            304,
            256,
            64,
            5.3e12,
            64 * KB,
            192 * 10**9,
            4 * MB,
            dies=8,
            aliases=("AMD Instinct MI300X",),
        ),
    )
}


@dataclass(frozen=True)
class Sizes:
    """What the portable kernel takes at once on one vendor's GPUs."""

    tile_bytes: int  # one tile of weights on its way
    wide_tile_bytes: int  # the same of models whose residual stream is wide (tiles.WIDE)
    step_bytes: int  # of a chunk of a prompt and the weights it meets, at one step along K
    steps: int  # of those on their way in shared memory
    warps: int  # of a block
    unlowered: int = 0  # values of a vector whose layouts the compiler fails to convert


SIZES: dict[str, Sizes] = {
    # Tiles of 32 KB are 5 % slower, but for Qwen3-8B, 4,096 wide, they give 236 tokens/s and 64 KB 224;
    # Laneformer-2B, 3,072 wide, wants 64. 16 warps, which leave 128 registers a thread, are 30 % slower
    # than 8, with 255 (H200: benchmarks/triton-log.md#three-models, benchmarks/triton-log.md#warps).
    "nvidia": Sizes(64 * KB, 32 * KB, 32 * KB, steps=4, warps=8),
    # Half as many warps hold a tile: 64 KB take more than all registers (gfx942, Llama-3.2-1B: 1,036
    # bytes spilled, none with 32 KB). Triton 3.7.1 leaves a conversion of as many values as threads unlowered
    # where logits are edited (gfx942, SmolLM2-360M's vocabulary over 304 blocks).
    "amd": Sizes(32 * KB, 32 * KB, 16 * KB, steps=2, warps=4, unlowered=256),
    # Triton's interpreter, which has no warps.
    "cpu": Sizes(64 * KB, 64 * KB, 32 * KB, steps=1, warps=1),
}


def find_gpu(name: str) -> Gpu:
    """The row of a GPU by its short name or by the name its driver reports; DeviceError if unknown."""
    for gpu in GPUS.values():
        if name.lower() == gpu.name or any(name.startswith(alias) for alias in gpu.aliases):
            return gpu
    raise DeviceError(
        f"no GPU named {name!r}: have {', '.join(GPUS)} (a new one is a row in topology.py)"
    )
