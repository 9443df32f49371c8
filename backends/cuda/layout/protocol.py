"""What host and kernel say to each other: words of the mailbox, why a launch ends, which stage to run alone.

Defined here for both: `declarations` is the same as C++, for the generated header.
"""

from enum import IntEnum


class Word(IntEnum):
    """64-bit words of the mailbox, in pinned memory that the GPU sees.

    CONTROL  the host's: Outcome.YIELD ends the launch behind the next token that has logits
    OUTCOME  and SLOT: why the launch ended, and whose step was its last
    STEPS    and TIME: the heartbeat, steps of this launch and when the last one ended
    COLUMNS  and those behind it: the outcome of each column of a kernel of several
    """

    CONTROL = 0
    OUTCOME = 2
    SLOT = 3
    STEPS = 4
    TIME = 5
    COLUMNS = 8


class Outcome(IntEnum):
    """How a launch ends; RUNNING is also a mailbox without a word of the host."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    YIELD = 3
    FAILED = 4  # a wait expired
    NOT_FINITE = 5
    NOTHING_ALLOWED = 6


class StageId(IntEnum):
    """The stages of `run_stage`, by the schedule's names in lower case."""

    EMBED = 0
    QKV_PROJ = 1
    ATTENTION = 2
    O_PROJ = 3
    GATE_UP_PROJ = 4
    DOWN_PROJ = 5
    MIX = 6
    LM_HEAD = 7


MAILBOX_WORDS = 16


def declarations() -> list[str]:
    """The enums above as C++: Mailbox::kControl, kYield, StageId::kEmbed."""
    return [
        f"struct Mailbox {{ static constexpr int {_members(Word)}; }};",
        f"enum Outcome : int {{ {_members(Outcome)} }};",
        f"enum class StageId : int {{ {_members(StageId)} }};",
    ]


def _members(kind: type[IntEnum]) -> str:
    return ", ".join(f"k{_camel(member.name)} = {member.value}" for member in kind)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
