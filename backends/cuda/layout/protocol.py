"""What host and kernel share: the kernels' arguments, words of the mailbox, why a launch ends, which stage to run.

Declared here once: the host uses these classes, `declarations` gives the generated header their C++.
"""

import ctypes
from enum import IntEnum
from typing import Any

from kog_triton.backends.cuda.layout.collectives import MOST_RANKS
from kog_triton.backends.token_words import OUTCOME_SHIFT, Outcome

MAX_REQUESTS = 16  # requests that one launch serves
# Tensors that a launch reads and writes, and what the kernel sees them as.
TENSORS = {
    "weights": "const u8*",  # ring slots, those of all blocks side by side
    "embed": "const u16*",  # [vocab, hidden, up to 4]; of a narrow one its rows' bytes
    "gains": "const float*",  # [2 * layers + 1, lanes or 1, hidden, up to 4]
    "biases": "const float*",  # [layers, kBiasRows]: stage by stage, lane by lane; gate and up woven
    "qk_gains": "const float*",  # [layers, 2, head_dim]
    "rope": "const float*",  # [positions, 2, head_dim / 2]
    "cache": "u16*",  # [slots, *Layout.cache_shape]
    "streams": "const float*",  # [slots, lanes, hidden, up to 4]: of a prompt's last token, behind all layers
    "words": "u32*",  # zero at launch
    "logits": "float*",  # [rows, vocab], if asked for
    "tokens": "int*",  # [slots, positions + 1]: the prompts, and what bad words look back on
    "request": "const u32*",  # [slots, request_words.capacity]
    "counts": "u32*",  # [slots, vocab]: of a penalized request's ids (edit.h)
    "scores": "float*",  # [1 + columns, vocab]: logits of one token edited, raw ones of each column
    "masks": "u64*",  # mapped: [slots, ceil(vocab / 32)], see request_words.mask_words
    "logprobs": "u64*",  # mapped: [slots, positions + 1, RECORD_WORDS], see logprob_words
    "states": "int*",  # [slots, 2]: the next position and its token
    "mailbox": "u64*",  # mapped, see Word
    "outbox": "u64*",  # mapped: [slots, positions + 1, 2], number and token, and the time
    "error": "u32*",  # [0] set by the first wait that expires, [1 ..] what it waited for
    "profile": "u64*",  # [tokens, blocks, warps, layers + 1, points, names.stamp_words], if stamps are kept
    "clocks": "u64*",  # [tokens + 1, blocks, 2], with it: ticks and nanoseconds (pair_clocks)
}
ITEM_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "int": 4, "float": 4}


class Pointers(ctypes.Structure):
    """The argument of a launch, by value: TENSORS, then

    limit         nanoseconds that a wait may take, by the GPU's clock
    most_steps    tokens of any request after which the launch yields
    positions     that a slot holds
    plane         values of the cache from a head's keys to its values, and from one head's to the next's
    num_requests  requests that this launch serves
    order         their slots, the one that is due first
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        ("limit", ctypes.c_int64),
        ("most_steps", ctypes.c_int64),
        ("positions", ctypes.c_int32),
        ("plane", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("order", ctypes.c_int32 * MAX_REQUESTS),
    )


class RankPointers(Pointers):
    """The argument of a launch that is one of several ranks'. Behind Pointers, so that those lie where they did:

    peers   every rank's `words`, as this rank's GPU reaches them
    errors  every rank's `error`
    rank    this launch's
    """

    _fields_ = (
        ("peers", ctypes.c_uint64 * MOST_RANKS),
        ("errors", ctypes.c_uint64 * MOST_RANKS),
        ("rank", ctypes.c_int32),
    )


class StageCall(ctypes.Structure):
    """The argument of a stage that runs alone, by value.

    x, out  [lanes, hidden, up to 4]: the residual streams, or the head's input; and behind the stage
    which   a StageId
    """

    _fields_ = (
        ("p", Pointers),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("which", "layer", "token", "position")),
    )


def item_bytes(name: str) -> int:
    """Of one of TENSORS: bytes of an element, as the kernel reads it."""
    return ITEM_BYTES[TENSORS[name].removeprefix("const ").removesuffix("*")]


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


def declarations(ranks: int) -> list[str]:
    """What stands above as C++: Pointers, StageCall, Mailbox::kControl, kYield, StageId::kEmbed."""
    return [
        *(_structure(Pointers) if ranks == 1 else _structure(RankPointers, "Pointers")),
        *(_structure(StageCall) if ranks == 1 else []),
        f"struct Mailbox {{ static constexpr int {_members(Word)}; }};",
        f"enum Outcome : int {{ {_members(Outcome)} }};",
        f"constexpr int kOutcomeShift = {OUTCOME_SHIFT};",
        f"enum class StageId : int {{ {_members(StageId)} }};",
    ]


def _structure(kind: type[ctypes.Structure], name: str = "") -> list[str]:
    """An argument as C++, and that its members lie where ctypes has them."""
    pointers = TENSORS | {"x": "const float*", "out": "float*"}
    pointers |= dict.fromkeys(("peers", "errors"), "u32*")
    numbers = {ctypes.c_int64: "i64", ctypes.c_int32: "int", Pointers: "Pointers"}
    name = name or kind.__name__
    members, checks = "", {f"sizeof({name})": ctypes.sizeof(kind)}
    own = vars(kind)["_fields_"]
    inherited = () if kind.__base__ is ctypes.Structure else vars(kind.__base__)["_fields_"]
    for member, kept, *_ in (*inherited, *own):
        held: Any = kept
        length = getattr(held, "_length_", 0)
        to = pointers.get(member, "").removesuffix("*")
        text = f"Memory<{to}>" if to else numbers[held._type_ if length else held]
        members += f"{text} {member}{f'[{length}]' if length else ''}; "
        checks[f"KOG_OFFSET({name}, {member})"] = getattr(kind, member).offset
        checks[f"sizeof({name}::{member})"] = getattr(kind, member).size
    asserts = [f'static_assert({x} == {n}, "{n} for the host (protocol.py)");' for x, n in checks.items()]
    return [f"struct {name} {{ {members}}};", *asserts]


def _members(kind: type[IntEnum]) -> str:
    return ", ".join(f"k{_camel(member.name)} = {member.value}" for member in kind)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
