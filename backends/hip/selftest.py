"""The self-test of a GPU: what the kernel relies on, tried in a few rounds before a model is opened (selftest.hip).

Beside it `kog_triton.stage_check` compares every stage's numbers with the reference's, on a small model.
"""

import ctypes
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from kog_triton.backends.hip.driver import HipKernel, number_of
from kog_triton.backends.hip.objects import code_object
from kog_triton.errors import DeviceError
from kog_triton.schedule.hip import THREADS
from kog_triton.schedule.topology import Gpu

ROUNDS = 100
ROW_WORDS = 64
WAIT_NS = 1_000_000_000
POLL_S = 1e-5
HEADER = f"namespace kog {{ constexpr int kThreads = {THREADS}, kConsumers = kThreads; }}\n"
# Bits of selftest.hip, each of which explains those below.
WRONG = {
    4: "the kernel did not hear the host, or the host the kernel, while it ran",
    1: "words of some blocks did not reach others",
    2: "blocks read old rows of each other",
}


class SelfTest(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "rows", "mailbox", "found")),
        ("limit", ctypes.c_uint64),
        ("blocks", ctypes.c_int32),
        ("rounds", ctypes.c_int32),
    )


@functools.cache
def check_gpu(device: torch.device, gpu: Gpu, rank: int = 0) -> list[int]:
    """The XCD of every block of a grid that fills the GPU, as its XCC_ID says; once for a process. DeviceError if the
    kernel cannot be trusted there."""
    code = code_object(HEADER, "selftest.hip", gpu.arch)
    kernel = HipKernel(code, "kog_selftest", 0, device, number_of(device, rank))
    try:
        blocks, found = gpu.num_blocks, run(kernel, device, gpu.num_blocks, ROUNDS)
    finally:
        kernel.close()
    bits = 0
    for _, wrong in found:
        bits |= wrong
    for bit, what in WRONG.items():
        if bits & bit:
            count = sum(bool(wrong & bit) for _, wrong in found)
            raise DeviceError(
                f"the hip backend's self-test fails on {gpu.name}: {what} ({count} of {blocks} blocks, {ROUNDS} "
                "rounds): choose --backend triton, and report this"
            )
    return [xcd for xcd, _ in found]


def run(kernel: HipKernel, device: torch.device, blocks: int, rounds: int) -> list[list[int]]:
    """Of every block its XCD and what went wrong, bit by bit."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    tensors = {
        "words": ints(blocks),
        "rows": ints(blocks, ROW_WORDS),
        "mailbox": torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda"),
        "found": ints(blocks, 2),
    }
    launched = kernel.launch(blocks, THREADS, argument(tensors, blocks, rounds))
    answer(tensors["mailbox"], launched.query)
    found: list[list[int]] = tensors["found"].tolist()
    return found


def argument(tensors: Mapping[str, torch.Tensor], blocks: int, rounds: int) -> SelfTest:
    return SelfTest(*(t.data_ptr() for t in tensors.values()), WAIT_NS, blocks, rounds)


def answer(mailbox: torch.Tensor, ended: Callable[[], bool]) -> None:
    """The host's part: to say what the kernel says, until that has ended."""
    while not ended():
        mailbox[0] = mailbox[1]
        time.sleep(POLL_S)


def xcds_in_words(xcds: list[int]) -> str:
    """How many blocks each XCD has."""
    counts = sorted(Counter(xcds).items())
    return f"{len(xcds)} blocks on {len(counts)} XCDs: " + ", ".join(
        f"{count} on {xcd}" for xcd, count in counts
    )
