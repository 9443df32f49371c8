"""A wait of the kernel that expired, in plain words: words.py says what the kernel writes down."""

from collections.abc import Sequence

from kog_triton.backends.triton.kernel.words import WAITS
from kog_triton.schedule.triton import Tiles

MASK = WAITS.index("sample mask")


def mask_was_late(errors: Sequence[Sequence[int]]) -> bool:
    """Whether a block gave up on the host's mask of a token. All blocks are then in that token's pass."""
    return any(record[0] == MASK for record in errors[1:])


def describe_wait(errors: Sequence[Sequence[int]], tiles: Tiles, beat: int | None = None) -> str:
    """One line of `Pointers.error`: rank, block, stage, layer, word, what it held, what was wanted and the
    steps that the launch had ended by its heartbeat, if it has one; "" if all came.

    Of the wait that expired first, unless one was for the host: what that block then owed, others had
    begun to wait for before.
    """
    if not errors[0][0]:
        return ""
    block = next((b for b, e in enumerate(errors[1:]) if e[0] == MASK), errors[0][0] - 1)
    number, layer, wanted, found, seen = errors[block + 1][:5]
    after = ""
    if beat is not None:
        after = f", after {beat} steps" if beat >= 0 else f", after {-beat} steps of prompts"
    stage, exchange = WAITS[number].split()
    head = f"a wait of the triton kernel expired: rank 0, block {block}, stage {stage}"
    if stage == "sample":
        what = {"mask": "the host's mask of token", "all_reduce": "sums of round", "argmax": "candidates of pass"}
        return f"{head}, for {what[exchange]} {wanted}{after}"
    where = head if stage in ("mix", "lm_head") else f"{head}, layer {layer}"
    if not found:
        return f"{where}, for words of {exchange} that came after all{after}"
    word = found - 1 - tiles.region(exchange)
    said = f"seen {seen & 0xFFFFFFFF:#010x}, wanted phase {wanted}"
    return f"{where}, for word {word} of {exchange}: {said}{after}"
