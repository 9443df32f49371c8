"""KCCL's exchanges between ranks as data (include/kccl, docs/SYNC.md): the room they take, the proof of it."""

from dataclasses import dataclass

from kog_triton.errors import DeviceError
from kog_triton.schedule.exchanges import Mark

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
