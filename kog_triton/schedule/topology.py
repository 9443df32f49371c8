"""A GPU as data. A new GPU is one row; figures are the vendor's datasheet unless the comment says otherwise."""

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
        # at the full rate (4.58 TB/s, the same as 132: benchmarks/README.md, "limits").
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


def find_gpu(name: str) -> Gpu:
    """The row of a GPU by its short name or by the name its driver reports; DeviceError if unknown."""
    for gpu in GPUS.values():
        if name.lower() == gpu.name or any(name.startswith(alias) for alias in gpu.aliases):
            return gpu
    raise DeviceError(
        f"no GPU named {name!r}: have {', '.join(GPUS)} (a new one is a row in topology.py)"
    )
