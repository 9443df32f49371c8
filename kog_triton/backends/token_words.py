"""A token as a kernel tells the host: one 64-bit word, zero before the request begins, that says by itself whether it
has come and what it means for its request.

    outcome << 56 | number << 32 | id        number: 1 for the first token of the answer

`declarations` is the same as C++, for a generated header.
"""

from enum import IntEnum

OUTCOME_SHIFT = 24  # above the number, in the word's upper half
NUMBER_MASK = (1 << OUTCOME_SHIFT) - 1


class Outcome(IntEnum):
    """Why a request or a launch ends; only a kernel decides it.

    RUNNING          it goes on
    STOP             the token is a stop id
    LENGTH           the token is the last that was asked for
    YIELD            of a launch: the host wants to speak; all requests go on. Also the host's word that says so
    FAILED           a wait expired
    NOT_FINITE       there is no token: NaN or +inf among the logits
    NOTHING_ALLOWED  there is no token: every id is banned
    """

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    YIELD = 3
    FAILED = 4
    NOT_FINITE = 5
    NOTHING_ALLOWED = 6


def read_word(word: int, number: int) -> tuple[Outcome, int] | None:
    """Outcome and id of token `number`; None while it is not there. The id is none if the outcome says so."""
    if word >> 32 & NUMBER_MASK != number:
        return None
    return Outcome(word >> 32 + OUTCOME_SHIFT), word & 0xFFFFFFFF
