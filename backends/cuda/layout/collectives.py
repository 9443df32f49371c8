"""KCCL's exchanges between ranks as data (include/kccl, docs/SYNC.md): the room they take, the proof of it."""

from dataclasses import dataclass

from kog_triton.errors import DeviceError
from kog_triton.schedule.exchanges import Exchange, Kernel, Mark, Reader, Who
from kog_triton.schedule.schedule import Scope

MOST_RANKS = 8
REPORT_WORDS = 8  # of a rank (include/kccl/comm.h)
REPORT = ("leave", "expired", "from", "place", "seen", "wanted")


def check_count(ranks: int) -> None:
    """DeviceError for more than collectives take."""
    if ranks > MOST_RANKS:
        raise DeviceError(f"{ranks} GPUs: collectives take {MOST_RANKS} at most")


@dataclass(frozen=True)
class Policy:
    """How a reader knows that a vector of 16 bytes is there (include/kccl/policies.h)."""

    name: str  # of the C++ class
    values: int  # of a vector
    buffers: int  # for each use that may be under way
    empty: int  # what a word holds before its first use
    mark: Mark


POLICIES = {
    "phase": Policy("PhaseWords", 4, 2, 0, Mark.PHASE),
    "epoch": Policy("EpochPairs", 2, 2, 0, Mark.NUMBER),
    # Its words are told from empty ones alone: that is a phase which falls back when they are emptied.
    "poison": Policy("PoisonWords", 4, 3, 0xFFFFFFFF, Mark.PHASE),
}


def channel_words(policy: Policy, ranks: int, vectors: int, delay: int = 0) -> int:
    """Words that a channel takes of every rank."""
    return policy.buffers * max(1, delay) * ranks * vectors * 4


def collective_kernel(
    policy: Policy, ranks: int, delay: int = 0, uses: int = 6, chosen: bool = False
) -> Kernel:
    """`uses` all-reduces of all blocks of all ranks over and over, as the schedule's walk: a lane for a rank.

    delay   how many uses later sums are fetched, before a step sends its own; 0: at once
    chosen  with a number that one block sends to all after each
    """
    buffers = policy.buffers * max(1, delay)
    steps: tuple[str, ...] = ("send", "fetch")
    readers: tuple[Reader, ...] = (Reader("fetch"),)
    if delay:
        steps = ("send",)
        readers = (
            Reader("send", layers=tuple(range(delay, uses)), delay=delay),
            Reader("send", layers=tuple(range(delay)), delay=delay - uses, tokens=1),
        )
    sums = Exchange("sums", "send", readers, 1, ranks, buffers, policy.mark, scope=Scope.ALL)
    exchanges: tuple[Exchange, ...] = (sums,)
    if chosen:
        steps += ("choose", "take")
        exchanges += (broadcast("choose", "take"),)
    return Kernel(ranks, uses, exchanges, steps, ((),))


def broadcast(producer: str, reader: str) -> Exchange:
    """A number from one block of one rank to all blocks of all ranks."""
    return Exchange(
        "chosen",
        producer,
        (Reader(reader),),
        2,
        mark=Mark.NUMBER,
        who=Who.ONE,
        scope=Scope.ALL,
    )
