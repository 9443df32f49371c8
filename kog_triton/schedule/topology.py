"""A GPU as data: what its driver says of it, and rows of names and of figures that no driver gives.

A row plans for a GPU that is not here and names one that is; figures are the vendor's datasheet unless the comment says
otherwise. A new GPU runs without a row (`describe`). What the portable kernel (triton.py) takes at once depends on the
vendor: SIZES, of GPUs without a row too.
"""

from dataclasses import dataclass, replace

from kog_triton.errors import DeviceError

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
VENDORS = ("nvidia", "amd")
# Bytes / s that a multiprocessor is taken to read where neither a row nor the driver says it: those of an H200.
USUAL_RATE = 4.8e12 / 128


@dataclass(frozen=True)
class Gpu:
    name: str
    vendor: str  # "nvidia" or "amd"
    arch: str  # what a compiler calls it
    num_sms: int  # SMs or CUs
    num_blocks: int  # blocks of a persistent kernel: one a SM, all resident
    bandwidth: float  # bytes / s, datasheet
    shared_bytes: int  # shared memory (LDS) that one block may have
    memory_bytes: int
    l2_bytes: int
    dies: int = 1  # parts with an L2 of their own (XCDs)
    aliases: tuple[str, ...] = ()  # how drivers spell it
    proven: bool = False  # this project has run on it
    share: str = ""  # which part of it this process may use, in words; "" is all

    @property
    def block_rate(self) -> float:
        """Bytes / s that a block reads when all do."""
        return self.bandwidth / self.num_blocks


@dataclass(frozen=True)
class Seen:
    """What a driver says of the GPU, or of the part of it, that this process may use; 0 is what it does not say.

    memory_clock  Hz, of which memory makes two transfers each
    percent       of its multiprocessors that MPS gives this process
    """

    name: str
    vendor: str
    arch: str
    num_sms: int
    shared_bytes: int
    memory_bytes: int
    l2_bytes: int = 0
    memory_clock: float = 0
    bus_bits: int = 0
    percent: float = 100


def _hopper(name: str, sms: int, blocks: int, rate: float, gb: int, *aliases: str) -> Gpu:
    l2 = 50 * MB
    return Gpu(name, "nvidia", "sm_90a", sms, blocks, rate, 227 * KB, gb * 10**9, l2, 1, aliases)


def _cdna3(name: str, blocks: int, rate: float, gb: int, dies: int) -> Gpu:
    """38 CUs an XCD."""
    alias = f"AMD Instinct {name.upper()}"
    return Gpu(name, "amd", "gfx942", 38 * dies, blocks, rate, 64 * KB, gb * 10**9, 4 * MB, dies, (alias,))


GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        # 128 of 132 blocks: power-of-two shapes divide evenly, and 128 blocks already stream
        # at the full rate (4.58 TB/s, the same as 132: benchmarks/cuda-log.md#limits).
        replace(
            _hopper("h200", 132, 128, 4.8e12, 141, "NVIDIA H200"), l2_bytes=60 * MB, proven=True
        ),
        _hopper("h100", 132, 128, 3.35e12, 80, "NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5"),
        _hopper("h100-pcie", 114, 114, 2.0e12, 80, "NVIDIA H100 PCIe"),
        _hopper("h100-nvl", 132, 128, 3.9e12, 94, "NVIDIA H100 NVL"),
        _hopper("h800", 132, 128, 3.35e12, 80, "NVIDIA H800"),
        _hopper("h20", 78, 78, 4.0e12, 96, "NVIDIA H20"),
        _hopper("gh200", 132, 128, 4.0e12, 96, "NVIDIA GH200"),
        Gpu(
            "b200", "nvidia", "sm_100a", 148, 148, 8e12, 227 * KB, 180 * 10**9, 126 * MB,
            aliases=("NVIDIA B200",),
        ),
        Gpu(
            "rtx-5090", "nvidia", "sm_120a", 170, 170, 1.792e12, 99 * KB, 32 * 10**9, 96 * MB,
            aliases=("NVIDIA GeForce RTX 5090",),
        ),
        Gpu(
            "rtx-pro-6000", "nvidia", "sm_120a", 188, 188, 1.792e12, 99 * KB, 96 * 10**9, 128 * MB,
            aliases=("NVIDIA RTX PRO 6000 Blackwell",),
        ),
        Gpu(
            "a100", "nvidia", "sm_80", 108, 108, 2.039e12, 163 * KB, 80 * 10**9, 40 * MB,
            aliases=("NVIDIA A100-SXM4-80GB",),
        ),
        Gpu(
            "l40s", "nvidia", "sm_89", 142, 142, 864e9, 99 * KB, 48 * 10**9, 96 * MB,
            aliases=("NVIDIA L40S",),
        ),
        # 256 of 304 CUs, 32 an XCD: what public descriptions of Kog's engine use.
        _cdna3("mi300x", 256, 5.3e12, 192, 8),
        _cdna3("mi325x", 256, 6e12, 256, 8),
        _cdna3("mi300a", 228, 5.3e12, 128, 6),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What the portable kernel takes at once on one vendor's GPUs."""

    tile_bytes: int  # one tile of weights on its way
    wide_tile_bytes: int  # the same of models whose residual stream is wide (tiles.WIDE)
    small_tile_bytes: int  # the same of models whose layers are small (triton._best_tile)
    step_bytes: int  # of a chunk of a prompt and the weights it meets, at one step along K
    steps: int  # of those on their way in shared memory
    warps: int  # of a block
    unlowered: int = 0  # values of a vector whose layouts the compiler fails to convert


SIZES: dict[str, Sizes] = {
    # Tiles of 32 KB are 5 % slower, but for Qwen3-8B, 4,096 wide, they give 236 tokens/s and 64 KB 224;
    # Laneformer-2B, 3,072 wide, wants 64. 16 warps, which leave 128 registers a thread, are 30 % slower
    # than 8, with 255 (H200: benchmarks/triton-log.md#three-models, benchmarks/triton-log.md#warps).
    "nvidia": Sizes(64 * KB, 32 * KB, 32 * KB, 32 * KB, steps=4, warps=8),
    # Half as many warps hold a tile: 64 KB take more than all registers (gfx942, Llama-3.2-1B: 1,036
    # bytes spilled, none with 32 KB). Triton 3.7.1 leaves a conversion of as many values as threads unlowered
    # where logits are edited (gfx942, SmolLM2-360M's vocabulary over 304 blocks).
    "amd": Sizes(32 * KB, 32 * KB, 32 * KB, 16 * KB, steps=2, warps=4, unlowered=256),
    # Triton's interpreter has no warps; what is summed when depends on their number, and is to be what NVIDIA's do.
    "cpu": Sizes(64 * KB, 64 * KB, 64 * KB, 32 * KB, steps=1, warps=8),
}


def find_gpu(name: str) -> Gpu:
    """The row of a GPU by its short name or by the name its driver reports; DeviceError if unknown."""
    gpu = GPUS.get(name.lower()) or _row_of(name)
    if gpu is None:
        raise DeviceError(f"no GPU named {name!r}: have {', '.join(GPUS)} (a new one is a row in topology.py)")
    return gpu


def check_device(name: str) -> None:
    """DeviceError unless it is "" for any, "cpu", a vendor or the short name of a GPU."""
    if name not in ("", "cpu", *VENDORS, *GPUS):
        raise DeviceError(f"no device {name!r}: have cpu, {', '.join((*VENDORS, *GPUS))}")


def describe(seen: Seen) -> Gpu:
    """A GPU by what its driver says. Of its row come the name and what no driver says: the bandwidth of the
    datasheet, the blocks that were found best, dies, and whether this project ran on it; of one with another number of
    multiprocessors, such as a laptop's, the name alone.

    Of a part of a GPU it is the part's: blocks for its multiprocessors and, of a MIG slice, bandwidth as its memory,
    which NVIDIA cuts together (MIG User Guide, "Partitioning"); of an MPS share that of as many multiprocessors. One of
    several dies with fewer multiprocessors is taken for a partition (DPX, QPX, CPX): as large a part of dies and rate.
    """
    row = _row_of(seen.name)
    sliced, shared = " MIG " in seen.name, seen.percent < 100
    cut = row is not None and row.dies > 1 and seen.num_sms < row.num_sms
    if row and row.num_sms != seen.num_sms and not (sliced or shared or cut):
        row = replace(row, num_sms=seen.num_sms, num_blocks=seen.num_sms, bandwidth=0, dies=1, proven=False)
    whole = row.num_sms if row else seen.num_sms
    sms = max(1, min(seen.num_sms, int(whole * seen.percent / 100)))
    rate = row.bandwidth if row else 0
    rate = rate or seen.memory_clock * 2 * seen.bus_bits / 8 or USUAL_RATE * whole
    share = ""
    if sliced and row:
        rate *= min(1.0, seen.memory_bytes / row.memory_bytes)
        share = f"a MIG slice of {sms} of {whole} multiprocessors"
    elif sliced:
        share = f"a MIG slice of {sms} multiprocessors"
    elif shared or cut:
        rate *= sms / whole
        share = f"{'a partition' if cut else 'an MPS share'} of {sms} of {whole} multiprocessors"
    same = row is not None and (row.num_sms, row.arch) == (sms, seen.arch)
    return Gpu(
        row.name if row else seen.name,
        seen.vendor,
        seen.arch,
        sms,
        row.num_blocks if row and same else sms,
        rate,
        seen.shared_bytes,
        seen.memory_bytes,
        seen.l2_bytes or (row.l2_bytes if row else 0),
        max(1, row.dies * sms // whole) if row else 1,
        row.aliases if row else (),
        bool(row and same and row.proven),
        share,
    )


def _row_of(name: str) -> Gpu | None:
    """The row one of whose aliases is the name or its first words."""
    for gpu in GPUS.values():
        if any(name == alias or name.startswith(f"{alias} ") for alias in gpu.aliases):
            return gpu
    return None
