"""KCCL's all-reduce on GPUs that reach each other's memory, in one process: what `kog bench kccl` times of ours."""

import ctypes
from dataclasses import dataclass

import torch

from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.gpus import check_peers, reach_all
from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.layout.collectives import (
    MOST_RANKS,
    POLICIES,
    REPORT,
    REPORT_WORDS,
    Policy,
    channel_words,
)
from kog_triton.errors import RunError

HELPERS = 32  # threads of a block that stream; others reduce (kccl_bench.cu)
# Vectors of a rank that 512 threads of a block reduce sooner than 256: measured of the phase bit over four GPUs
# (benchmarks/cuda-log.md#all-reduce-threads).
WIDE = range(512, 1025)
MOST_BLOCKS, MOST_HELD = 128, 16  # blocks of a GPU; vectors that a thread asks for in one poll
SLOT_BYTES, RING_SLOTS = 16384, 3
WEIGHT_BYTES = 1 << 30  # that are streamed over and over: many times an L2
LIMIT_NS = 2_000_000_000


class Comm(ctypes.Structure):
    """kccl::Comm (include/kccl/comm.h)."""

    _fields_ = (
        ("words", ctypes.c_uint64 * MOST_RANKS),
        ("reports", ctypes.c_uint64 * MOST_RANKS),
        ("limit", ctypes.c_uint64),
        ("ranks", ctypes.c_int32),
        ("rank", ctypes.c_int32),
    )


class Argument(ctypes.Structure):
    """The kernel's (kccl_bench.cu)."""

    _fields_ = (
        ("comm", Comm),
        *((n, ctypes.c_uint64) for n in ("epoch", "uses", "found", "times", "weights", "slots")),
        ("vectors", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Timed:
    """Of dependent all-reduces in one kernel: their mean on the slowest GPU, and what a GPU streamed beside."""

    microseconds: float
    gigabytes_per_s: float


def source_header(policy: Policy, ranks: int, vectors: int) -> str:
    """What stands before kccl_bench.cu."""
    threads = threads_for(vectors)
    held = max(1, min(MOST_HELD // ranks, -(-vectors // threads)))
    values = {"POLICY": policy.name, "RANKS": ranks, "THREADS": threads, "VECTORS": held}
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


def threads_for(vectors: int) -> int:
    """Of a block, those that reduce so many vectors of each rank."""
    return 512 if vectors in WIDE else 256


def time_all_reduces(name: str, gpus: int, floats: int, uses: int, streams: bool) -> Timed:
    """`uses` dependent all-reduces of float32 [floats] by one of POLICIES, in one launch a GPU.

    `streams`: beside a stream of weights. DeviceError as `check_peers`; RunError for a wait that expired, with what
    was waited for, and for sums that are wrong.
    """
    check_peers(gpus)
    reach_all(gpus)
    policy = POLICIES[name]
    vectors = floats // policy.values
    blocks = min(MOST_BLOCKS, vectors)
    cubin = compile_cubin(source_header(policy, gpus, vectors), "kccl_bench.cu")
    devices = [torch.device("cuda", i) for i in range(gpus)]
    words = channel_words(policy, gpus, vectors)
    empty = -1 if policy.empty else 0  # as int32
    ranks = [_Rank(d, words, empty, blocks, floats, streams) for d in devices]
    kernels = []
    for device in devices:
        with torch.cuda.device(device):  # whose context takes the module
            kernels.append(Kernel(cubin, "kccl_bench", RING_SLOTS * SLOT_BYTES, device))
    epoch = 0
    for count in (max(1, uses // 10), uses):  # the first warms up
        arguments = []
        for rank, mine in enumerate(ranks):
            comm = Comm(limit=LIMIT_NS, ranks=gpus, rank=rank)
            for i, other in enumerate(ranks):
                comm.words[i], comm.reports[i] = other.words.data_ptr(), other.report.data_ptr()
            arguments.append(mine.argument(comm, epoch, count, vectors))
        for kernel, argument in zip(kernels, arguments, strict=True):
            kernel.launch(blocks, threads_for(vectors) + HELPERS, argument)
        for device in devices:
            torch.cuda.synchronize(device)
        check_reports([rank.report.tolist() for rank in ranks])
        epoch += count
    for kernel in kernels:
        kernel.close()
    want = torch.arange(floats, dtype=torch.float32) + (gpus - 1) / 2 * gpus
    for rank, mine in enumerate(ranks):
        if not torch.equal(mine.found.cpu(), want.expand(blocks, floats)):
            raise RunError(f"{name}: sums on GPU {rank} are wrong")
    seconds = [rank.times[:, 0].max().item() / 1e9 for rank in ranks]
    rates = [r.times[:, 1].sum().item() / s / 1e9 for r, s in zip(ranks, seconds, strict=True)]
    return Timed(max(seconds) / uses * 1e6, min(rates))


def check_reports(reports: list[list[int]]) -> None:
    """RunError naming the first rank whose wait expired, and for what it waited; for ranks that left without one."""
    told = [dict(zip(REPORT, report, strict=False)) for report in reports]
    for rank, report in enumerate(told):
        if report["expired"]:
            raise RunError(
                f"GPU {rank} waited in vain for word {report['place']} of GPU {report['from']}: "
                f"saw {report['seen'] & 0xFFFFFFFF:#x}, wanted {report['wanted'] & 0xFFFFFFFF:#x}"
            )
    if any(report["leave"] for report in told):
        raise RunError("GPUs left, and none says what it waited for")


class _Rank:
    """One GPU's memory."""

    def __init__(self, device: torch.device, words: int, empty: int, blocks: int, floats: int, streams: bool) -> None:
        self.words = torch.full((words,), empty, dtype=torch.int32, device=device)
        self.report = torch.zeros(REPORT_WORDS, dtype=torch.int32, device=device)
        self.found = torch.zeros(blocks, floats, device=device)
        self.times = torch.zeros(blocks, 2, dtype=torch.int64, device=device)
        size = WEIGHT_BYTES if streams else 0
        self.weights = torch.zeros(size, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # peers write the words of a rank as soon as their kernels run

    def argument(self, comm: Comm, epoch: int, uses: int, vectors: int) -> Argument:
        tensors = (self.found, self.times, self.weights)
        addresses = (t.data_ptr() for t in tensors)
        return Argument(comm, epoch, uses, *addresses, self.weights.numel() // SLOT_BYTES, vectors)
