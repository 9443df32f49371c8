"""A libamdhip64 of several GPUs, each a GPU of the executor: rank r's kernel runs on GPU r beside all others.

As on AMD's, a kernel reaches another GPU's memory if its GPU was told to, and sees what others store there while it
runs only if the memory was asked for as fine-grained or uncached: a launch for which that does not hold breaks off.
"""

import ctypes
import threading
from collections.abc import Iterable
from typing import Any

import torch

from kog_triton.backends.cuda.layout.collectives import MOST_RANKS
from kog_triton.backends.cuda.layout.protocol import RankPointers
from kog_triton.backends.cuda.rank_memory import Ranks
from kog_triton.backends.hip import rank_selftest
from tests.lib.fake_hip import LAUNCH_FAILURE, FakeHip, by_address
from tests.lib.gfx942.executor import SYSTEM, Kernel, Launch

SEEN_BY_ALL = (1, 3)  # hipDeviceMallocFinegrained, hipDeviceMallocUncached
INVALID_VALUE, ALREADY_REACHED = 1, 704
ALIGNED = 256
# Kept to the end of the process: a tensor of an earlier test, which goes late, must not free another's at its address.
ROOMS: list[torch.Tensor] = []
TEST = "kog_rank_selftest"
PATIENCE_S = 20.0  # for the launches of all ranks, which come one behind the other


def num_ranks(name: str, argument: Any) -> int:
    """Of a launch, by its argument; 0 for one that is no rank's."""
    if name == TEST:
        sizes = {ctypes.sizeof(rank_selftest.argument_of(n)): n for n in range(2, MOST_RANKS + 1)}
        return sizes[len(argument)]
    if len(argument) != ctypes.sizeof(RankPointers):
        return 0
    return sum(address != 0 for address in RankPointers.from_buffer_copy(argument).peers)


class Together(list[Launch]):
    """Launches of ranks, `complete` once every GPU has answered to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.complete, self.answered = threading.Event(), 0


class FakeGpus(FakeHip):
    """`refused` holds the status that a rank's launch on a GPU gets, `apart` the pairs that do not reach each other."""

    def __init__(self, gpus: int, **conditions: Any) -> None:
        super().__init__(**conditions)
        self.gpus = gpus
        self.apart: set[tuple[int, int]] = set()
        self.reached: set[tuple[int, int]] = set()
        self.refused: dict[int, int] = {}
        self.memory: dict[int, tuple[int, int, torch.Tensor]] = {}  # by address: GPU, flags, bytes
        self._ranks = Together()

    def install(self, monkeypatch: Any) -> None:
        super().install(monkeypatch)
        arguments, of_test = Ranks.arguments, rank_selftest.arguments

        def alone(ranks: Ranks, *args: Any, **others: Any) -> Any:
            self._known = {}  # of this launch alone
            return arguments(ranks, *args, **others)

        def tested(words: Any, found: Any, mailbox: torch.Tensor, *args: Any) -> Any:
            self._known = by_address(
                [("mailbox", mailbox), *(("words", t) for t in words), *(("found", t) for t in found)]
            )
            return of_test(words, found, mailbox, *args)

        rank_selftest.check_ranks.cache_clear()
        monkeypatch.setattr(Ranks, "arguments", alone)
        monkeypatch.setattr(rank_selftest, "arguments", tested)

    def know(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._known = self._known | self._vectors | by_address(tensors)

    def shared_with_others(self, name: str, tensor: torch.Tensor) -> bool:
        return super().shared_with_others(name, tensor) or tensor.data_ptr() in self.memory

    def least_scope(self, name: str, tensor: torch.Tensor) -> int:
        of_ranks = self.least and tensor.data_ptr() in self.memory
        return SYSTEM if of_ranks else super().least_scope(name, tensor)

    # ---- the runtime ----

    def hipDeviceCanAccessPeer(self, can: int, number: int, peer: int) -> int:
        reaches = number != peer and (number, peer) not in self.apart
        ctypes.c_int.from_address(can).value = reaches
        return 0

    def hipDeviceEnablePeerAccess(self, peer: int, flags: int) -> int:
        pair = self.gpu, peer
        if pair in self.reached:
            return ALREADY_REACHED
        self.reached.add(pair)
        return 0

    def hipExtMallocWithFlags(self, p: int, size: int, flags: int) -> int:
        room = torch.full((size + ALIGNED,), 0xEE, dtype=torch.uint8)
        address = room.data_ptr() + -room.data_ptr() % ALIGNED
        self.memory[address] = self.gpu, flags, room
        ROOMS.append(room)
        ctypes.c_void_p.from_address(p).value = address
        return 0

    def hipFree(self, p: int) -> int:
        return 0 if self.memory.pop(p, None) else INVALID_VALUE

    def _begin(self, kernel: Kernel, launch: Launch, shared: int) -> int:
        (argument,) = launch.args
        peers = self._peers(kernel.name, argument)
        if not peers:
            return super()._begin(kernel, launch, shared)
        gpu = launch.gpu
        ranks, status = self._ranks, self.refused.get(gpu, 0)
        if not status:
            ranks.append(launch)
            if why := self._out_of_reach(gpu, peers, num_ranks(kernel.name, argument)):
                self.broken, self.why = LAUNCH_FAILURE, why
        ranks.answered += 1
        if ranks.answered == 1:
            self._start(kernel, ranks, shared)
        if ranks.answered == num_ranks(kernel.name, argument):
            ranks.complete.set()
            self._ranks = Together()
        return status

    def _run(self, kernel: Kernel, launches: list[Launch], *others: Any) -> None:
        if isinstance(launches, Together):
            launches.complete.wait(PATIENCE_S)
            if not launches or self.broken:
                return
        super()._run(kernel, launches, *others)

    @staticmethod
    def _peers(name: str, argument: Any) -> list[int]:
        """Where a rank's argument says that all ranks' words lie; nothing for one that is none."""
        ranks = num_ranks(name, argument)
        if name == TEST:
            return [*rank_selftest.argument_of(ranks).from_buffer_copy(argument).words]
        if not ranks:
            return []
        one = RankPointers.from_buffer_copy(argument)
        return [*one.peers[:ranks], *one.errors[:ranks]]

    def _out_of_reach(self, gpu: int, peers: list[int], ranks: int) -> str:
        for i, address in enumerate(peers):
            rank = i % ranks
            owner, flags, _ = self.memory.get(address, (None, 0, None))
            if owner != rank or flags not in SEEN_BY_ALL:
                return f"GPU {gpu} does not see words of rank {rank}: memory of GPU {owner}, flags {flags}"
            if rank != gpu and (gpu, rank) not in self.reached:
                return f"GPU {gpu} was not told to reach GPU {rank}"
        return ""
