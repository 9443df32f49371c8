"""The clocks of all ranks' GPUs beside each other, by a ping-pong between two kernels (include/kccl/clocks.h)."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.layout.collectives import MOST_RANKS, REPORT_WORDS
from kog_triton.backends.cuda.peers import LIMIT_NS, Comm, check_reports
from kog_triton.backends.cuda.rank_kernel import RankKernel

ROUNDS = 256  # the quickest counts: its way there and back is what the reading is uncertain by
WORDS = 2 * MOST_RANKS  # of a rank (kClockWords)


class Argument(ctypes.Structure):
    """The kernel's (kccl_clocks.cu)."""

    _fields_ = (("comm", Comm), ("rounds", ctypes.c_uint64), ("readings", ctypes.c_uint64))


def open_clocks(devices: Sequence[torch.device], arch: str) -> RankKernel:
    """The kernel, compiled, for `read_clocks`."""
    return RankKernel(compile_cubin("", "kccl_clocks.cu", arch), "kccl_clocks", 0, devices)


def read_clocks(kernel: RankKernel, devices: Sequence[torch.device]) -> np.ndarray:
    """int64 [ranks - 1, ROUNDS, 3], ns: rank 0's clock as it asks, the other's as it answers, rank 0's as it hears it.
    RunError for a wait that expired."""
    words = [torch.zeros(WORDS, dtype=torch.int32, device=d) for d in devices]
    reports = [torch.zeros(REPORT_WORDS, dtype=torch.int32, device=d) for d in devices]
    shape = len(devices), ROUNDS, 2
    readings = [torch.zeros(shape, dtype=torch.int64, device=d) for d in devices]
    arguments = []
    for rank in range(len(devices)):
        comm = Comm(limit=LIMIT_NS, ranks=len(devices), rank=rank)
        for i, (own, report) in enumerate(zip(words, reports, strict=True)):
            comm.words[i], comm.reports[i] = own.data_ptr(), report.data_ptr()
        arguments.append(Argument(comm, ROUNDS, readings[rank].data_ptr()))
    kernel.launch(1, 32, arguments).synchronize()
    check_reports([report.tolist() for report in reports])
    return joined_readings([one.cpu().numpy() for one in readings])


def joined_readings(each: Sequence[np.ndarray]) -> np.ndarray:
    """Of what every rank wrote, int64 [ranks, rounds, 2]: int64 [ranks - 1, rounds, 3] as in `read_clocks`."""
    rows = []
    for rank in range(1, len(each)):
        asked, heard = each[0][rank].T
        rows.append(np.stack([asked, each[rank][rank, :, 0], heard], 1))
    return np.stack(rows)
