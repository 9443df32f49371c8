"""The self-test of a GPU: what the kernel relies on, tried in a few rounds before a model is opened (selftest.hip).

Beside it `kog_triton.stage_check` compares every stage's numbers with the reference's, on a small model.
"""

import ctypes
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kog_triton.backends.hip.driver import HipKernel, number_of
from kog_triton.backends.hip.objects import code_object
from kog_triton.errors import DeviceError
from kog_triton.schedule.hip import THREADS
from kog_triton.schedule.topology import Gpu

ROUNDS = 100
ROW_WORDS = 64
XCD_CUS = 40  # of CDNA 3, at most: 38 are used
WAIT_NS = 1_000_000_000
POLL_S = 1e-5
# The host's own limit. A kernel that runs ends by itself: each of 100 rounds waits a second for the host at most, and
# waits for words end with the first that is in vain, of 4 s at most (rank_selftest.py).
DEADLINE_S = 120.0
ADVICE = "choose --backend triton, and report this"
HEADER = f"namespace kog {{ constexpr int kThreads = {THREADS}, kConsumers = kThreads; }}\n"
# Bits of selftest.hip, each of which explains those below.
WRONG = {
    4: "the kernel did not hear the host, or the host the kernel, while it ran",
    1: "words of some blocks did not reach others",
    2: "blocks read old rows of each other",
}

_unended: list[Any] = []  # what a kernel that did not end may still write


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
    blocks, found = gpu.num_blocks, run(kernel, device, gpu.num_blocks, ROUNDS)
    kernel.close()  # not one that failed: that may wait for what runs
    bits = 0
    for _, wrong in found:
        bits |= wrong
    for bit, what in WRONG.items():
        if bits & bit:
            count = sum(bool(wrong & bit) for _, wrong in found)
            raise DeviceError(
                f"the hip backend's self-test fails on {gpu.name}: {what} ({count} of {blocks} blocks, {ROUNDS} "
                f"rounds): {ADVICE}"
            )
    xcds = [xcd for xcd, _ in found]
    if gpu.num_sms > XCD_CUS and len(set(xcds)) == 1:
        raise DeviceError(
            f"the hip backend's self-test says nothing on {gpu.name}: all {blocks} blocks lie on XCD {xcds[0]}, and "
            f"{gpu.num_sms} CUs are of several, so no words went from one to another: {ADVICE}"
        )
    return xcds


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
    answer(tensors["mailbox"], launched.query, rounds, ADVICE, tensors)
    found: list[list[int]] = tensors["found"].tolist()
    return found


def argument(tensors: Mapping[str, torch.Tensor], blocks: int, rounds: int) -> SelfTest:
    return SelfTest(*(t.data_ptr() for t in tensors.values()), WAIT_NS, blocks, rounds)


def answer(mailbox: torch.Tensor, ended: Callable[[], bool], rounds: int, advice: str, *memory: Any) -> None:
    """The host's part: to say how far all kernels say that they are, until they have ended. DeviceError if they do not
    by DEADLINE_S; the memory is kept then."""
    deadline = time.monotonic() + DEADLINE_S
    while not ended():
        mailbox[0] = mailbox[1:].min()
        time.sleep(POLL_S)
        if time.monotonic() > deadline:
            _unended.append(memory)
            heard = ", ".join(str(number) for number in mailbox[1:].tolist())
            raise DeviceError(
                f"the hip backend's self-test has not ended in {DEADLINE_S:g} s: the host waits for its kernel, and "
                f"has heard of {heard} of {rounds} rounds: {advice}"
            )


def xcds_in_words(xcds: list[int]) -> str:
    """How many blocks each XCD has."""
    counts = sorted(Counter(xcds).items())
    if len(counts) == 1:
        return f"{len(xcds)} blocks on XCD {xcds[0]}, and nothing was tried between XCDs"
    return f"{len(xcds)} blocks on {len(counts)} XCDs: " + ", ".join(f"{count} on {xcd}" for xcd, count in counts)
