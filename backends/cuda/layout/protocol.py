"""What host and kernel say to each other: words of the mailbox, why a launch ends, which stage to run alone.

Defined here for both: `declarations` is the same as C++, for the generated header.
"""

from enum import IntEnum

from kog_triton.backends.token_words import OUTCOME_SHIFT, Outcome


class Word(IntEnum):
    """64-bit words of the mailbox, in pinned memory that the GPU sees.

    CONTROL  the host's: Outcome.YIELD ends the launch behind the next token that has logits
    OUTCOME  and SLOT: why the launch ended, and whose step was its last
    STEPS    and TIME: the heartbeat, steps of this launch and when the last one ended
    """

    CONTROL = 0
    OUTCOME = 2
    SLOT = 3
    STEPS = 4
    TIME = 5


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


MAILBOX_WORDS = 8


def declarations() -> list[str]:
    """The enums above as C++: Mailbox::kControl, kYield, StageId::kEmbed."""
    return [
        f"struct Mailbox {{ static constexpr int {_members(Word)}; }};",
        f"enum Outcome : int {{ {_members(Outcome)} }};",
        f"constexpr int kOutcomeShift = {OUTCOME_SHIFT};",
        f"enum class StageId : int {{ {_members(StageId)} }};",
    ]


def _members(kind: type[IntEnum]) -> str:
    return ", ".join(f"k{_camel(member.name)} = {member.value}" for member in kind)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
