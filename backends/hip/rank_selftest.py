"""The self-test of several GPUs: what ranks rely on between them, tried before a model is opened (rank_selftest.hip).

What each GPU must do by itself is selftest.py's.
"""

import ctypes
import functools
from collections.abc import Sequence

import torch

from kog_triton.backends.cuda.rank_kernel import missing_of
from kog_triton.backends.hip.driver import HipRankKernel, number_of
from kog_triton.backends.hip.objects import code_object
from kog_triton.backends.hip.peers import uncached
from kog_triton.backends.hip.selftest import HEADER, answer
from kog_triton.errors import DeviceError
from kog_triton.schedule.hip import THREADS
from kog_triton.schedule.topology import Gpu

ADVICE = "choose --gpus 1, and report this"
ROUNDS = 100
WAIT_NS = 4_000_000_000  # for words; for the host a quarter
# Bits of rank_selftest.hip, each of which explains those below: of the first GPU that noted it, and of whom.
WRONG = {
    1: "words of GPU {sender} did not reach GPU {reader}",
    2: "words of GPU {sender} came to GPU {reader} in pieces",
    4: "GPU {reader} did not hear the host, or the host GPU {reader}, while it ran",
}


def header(ranks: int) -> str:
    """What stands before rank_selftest.hip."""
    return f'#define KOG_WORD_SCOPE "sys"\n{HEADER}namespace kog {{ constexpr int kRanks = {ranks}; }}\n'


@functools.cache
def argument_of(ranks: int) -> type[ctypes.Structure]:
    """The kernel's argument."""

    class RankTest(ctypes.Structure):
        _fields_ = (
            ("words", ctypes.c_void_p * ranks),
            ("mailbox", ctypes.c_void_p),
            ("found", ctypes.c_void_p),
            ("limit", ctypes.c_uint64),
            *((name, ctypes.c_int32) for name in ("rank", "blocks", "rounds", "unused")),
        )

    return RankTest


@functools.cache
def check_ranks(devices: tuple[torch.device, ...], gpu: Gpu) -> None:
    """Of GPUs that reach each other; once for a process. DeviceError if ranks there cannot be trusted."""
    code = code_object(header(len(devices)), "rank_selftest.hip", gpu.arch)
    kernel = HipRankKernel(code, "kog_rank_selftest", 0, devices)
    found = run(kernel, devices, gpu.num_blocks, ROUNDS)
    kernel.close()  # as in selftest.py
    for bit, what in WRONG.items():
        for reader, blocks in enumerate(found):
            of = [senders for senders, wrong in blocks if wrong & bit]
            if of:
                sender = min(s for s in range(len(devices)) if any(one >> s & 1 for one in of))
                said = what.format(sender=sender, reader=reader)
                raise DeviceError(
                    f"the hip backend's self-test fails on {len(devices)} x {gpu.name}: {said} ({len(of)} of "
                    f"{gpu.num_blocks} blocks, {ROUNDS} rounds): {ADVICE}"
                )


def run(kernel: HipRankKernel, devices: Sequence[torch.device], blocks: int, rounds: int) -> list[list[list[int]]]:
    """Of every rank's every block: a bit for each rank of which something is wrong, and what, bit by bit. DeviceError
    for a GPU whose kernel cannot be launched."""
    senders = len(devices) * blocks
    count = senders + -senders % 4 + 4 * senders
    words = [uncached(count, d, number_of(d, rank)) for rank, d in enumerate(devices)]
    found = [torch.zeros(blocks, 2, dtype=torch.int32, device=d) for d in devices]
    pinned = devices[0].type == "cuda"
    mailbox = torch.zeros(1 + len(devices), dtype=torch.int64, pin_memory=pinned)
    if pinned:  # others write a rank's words as soon as their kernels run
        for device in devices:
            torch.cuda.synchronize(device)
    launched = kernel.launch(blocks, THREADS, arguments(words, found, mailbox, blocks, rounds))
    answer(mailbox, launched.query, rounds, ADVICE, words, found, mailbox)
    if missing := missing_of(launched):
        rank, why = min(missing.items())
        raise DeviceError(f"the hip backend's self-test cannot run on GPU {rank}: {why}")
    return [one.tolist() for one in found]


def arguments(
    words: Sequence[torch.Tensor], found: Sequence[torch.Tensor], mailbox: torch.Tensor, blocks: int, rounds: int
) -> list[ctypes.Structure]:
    """Of every rank's launch."""
    kind = argument_of(len(words))
    where = (ctypes.c_void_p * len(words))(*(t.data_ptr() for t in words))
    return [
        kind(where, mailbox.data_ptr(), own.data_ptr(), WAIT_NS, rank, blocks, rounds, 0)
        for rank, own in enumerate(found)
    ]
