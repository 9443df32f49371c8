"""Module outputs of a prompt's pass on several GPUs, brought from each to all by kernels (rank_outputs.cu).

Nothing of it waits on the host, and no GPU's launches stand behind another's: each GPU's pass can be a CUDA graph. By
torch's copies (prefill/ranks.py) a layer's four took the host as long as its products.

A place of every rank's memory takes the outputs of one exchange, [all S, T, hidden] in the order of ranks. There are
two and, for what arrives late, two more for each layer of delay: whoever stores into one again has found the number of
the exchange before it of every rank, stored behind that rank's reading of all that is due by then. A pass ends with an
exchange of nothing, so that the next one finds all places free: passes come one behind the other (prefill/ranks.py's
RankRun).
"""

from collections.abc import Callable, Sequence
from ctypes import Structure

import torch

from kog_triton.backends.cuda.layout.rank_outputs import BLOCKS, THREADS, VALUES, AwaitCall, PushCall, takes
from kog_triton.backends.prefill.forward import Outputs
from kog_triton.backends.prefill.library import CHUNK, on_device
from kog_triton.backends.prefill.upload import upload
from kog_triton.schedule.schedule import Schedule

Tensor = torch.Tensor
Queue = Callable[[int], None]  # puts a launch on a stream
# Makes a launch of a function ready on a rank's GPU: blocks, threads and argument, which may change from call to call.
Ready = Callable[[int, str, int, int, Structure], Queue]
LAST = (1 << 16) - 1  # the number of an exchange within its pass that no module has


def places_of(schedule: Schedule) -> int:
    return 2 + 2 * schedule.spec.delay


def outputs_bytes(schedule: Schedule) -> int:
    """Of one GPU."""
    values = schedule.num_shards * CHUNK * schedule.spec.hidden_size
    return 2 * values * places_of(schedule) + 8 * (schedule.num_ranks * BLOCKS + 2) + 4


class RankEnd(Outputs):
    """One rank's end. A pass calls `send` and then `all`, each as often on every rank."""

    def __init__(self, rank: int, schedule: Schedule, memory: "Sequence[EndMemory]", ready: Ready, limit: int) -> None:
        self._own, self.index = memory[rank], 0
        self._places = places_of(schedule)
        ranks = len(memory)
        self._push = PushCall(
            gave_up=self._own.gave_up.data_ptr(), pass_number=self._own.number.data_ptr(), ranks=ranks
        )
        self._await = AwaitCall(
            arrived=self._own.arrived.data_ptr(),
            gave_up=self._own.gave_up.data_ptr(),
            limit=limit,
            pass_number=self._own.number.data_ptr(),
            ranks=ranks,
        )
        for to, other in enumerate(memory):
            self._push.arrived[to] = other.arrived[rank].data_ptr()
        self._rank, self._memory = rank, memory
        self._pushes = ready(rank, "kog_push", BLOCKS, THREADS, self._push)
        self._awaits = ready(rank, "kog_await", 1, THREADS, self._await)

    def begin(self) -> None:
        """What comes next is the first exchange of a pass."""
        self.index = 0

    def send(self, o: Tensor) -> Tensor:
        assert o.is_contiguous() and o.dtype.itemsize == 2
        self.index += 1
        self._push.index, self._push.source = self.index, o.data_ptr()
        self._push.count = o.numel() // VALUES
        place = self.index % self._places
        for to, other in enumerate(self._memory):
            self._push.to[to] = other.every[place].data_ptr() + self._rank * o.nbytes
        self._pushes(self._stream())
        return o

    def all(self, own: Tensor) -> Tensor:
        ranks, (shards, tokens, hidden) = len(self._memory), own.shape
        flat = self._own.every[self.index % self._places]
        every = flat[: ranks * own.numel()].view(own.dtype).view(ranks * shards, tokens, hidden)
        self._await.index, self._await.every = self.index, every.data_ptr()
        self._await.rows, self._await.width = ranks * shards * tokens, hidden
        self._awaits(self._stream())
        return every

    def leave(self) -> None:
        """The last exchange, of nothing: this rank's part."""
        self._push.index, self._push.count = LAST, 0
        self._pushes(self._stream())

    def left(self) -> None:
        """Behind `leave` of all ranks."""
        self._await.index, self._await.rows = LAST, 0
        self._awaits(self._stream())

    def _stream(self) -> int:
        device = self._own.number.device
        if device.type != "cuda":
            return 0
        return torch.cuda.current_stream(device).cuda_stream


class EndMemory:
    """What all ranks write of one rank's memory.

    every    16 bits [places, values of all ranks' outputs of CHUNK tokens]
    arrived  int64 [ranks, BLOCKS]
    gave_up  int64 [2]: see Await
    number   int32 [1], of the pass; its own GPU's alone
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        values = schedule.num_shards * CHUNK * schedule.spec.hidden_size
        self.every = torch.zeros(places_of(schedule), values, dtype=torch.int16, device=device)
        self.arrived = torch.zeros(schedule.num_ranks, BLOCKS, dtype=torch.int64, device=device)
        self.gave_up = torch.zeros(2, dtype=torch.int64, device=device)
        self.number = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        held = (self.every, self.arrived, self.gave_up, self.number)
        return sum(t.nbytes for t in held)


class PushedExchange:
    """prefill.ranks.RankExchange, by the kernels; `limit` of a wait in nanoseconds."""

    meets = True

    def __init__(self, schedule: Schedule, devices: Sequence[torch.device], ready: Ready, limit: int) -> None:
        assert takes(schedule)
        self._memory = [EndMemory(schedule, device) for device in devices]
        self.ends = [RankEnd(rank, schedule, self._memory, ready, limit) for rank in range(len(devices))]
        self._devices, self._number, self._open = devices, 0, False
        self._told = 0  # the last exchange that was told to have been waited for in vain

    def outputs(self, rank: int) -> Outputs:
        return self.ends[rank]

    def begin(self) -> None:
        """A pass of all ranks, in the order of their current streams; behind the end of one that was called off."""
        if self._open:
            self.end()
        self._number, self._open = self._number + 1, True
        number = torch.tensor([self._number], dtype=torch.int32)
        for end, memory in zip(self.ends, self._memory, strict=True):
            upload(number, memory.number)
            end.begin()

    def deliver(self) -> None:
        """The kernels do it."""

    def end(self) -> None:
        """Of a pass, on all ranks. Where one of them failed, this number is what others wait for, too."""
        self._open = False
        for act in (RankEnd.leave, RankEnd.left):
            for end, device in zip(self.ends, self._devices, strict=True):
                with on_device(device):
                    act(end)

    def gave_up(self) -> str:
        """What a pass has waited for in vain that was not told before; waits for GPUs. "" if all came."""
        each = [(memory.gave_up.tolist(), rank) for rank, memory in enumerate(self._memory)]
        new = [(number, rank, word) for (number, word), rank in each if number >> 16 > self._told >> 16]
        if not new:
            return ""
        self._told = max(new)[0]
        number, rank, word = min(new)  # of what others gave up for
        where = "its end" if number & LAST == LAST else f"exchange {number & LAST}"
        return f"a wait of a prompt's pass expired: rank {rank}, {where}: nothing from rank {word // BLOCKS}"

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)
