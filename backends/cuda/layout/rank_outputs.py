"""Arguments of the kernels that bring module outputs from each GPU to all (rank_outputs.cu), and their header."""

import ctypes

from kog_triton.schedule.schedule import Schedule

MOST_RANKS, BLOCKS, THREADS = 8, 64, 512
VALUES = 8  # of 16 bits, stored at once
P, I64, INT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class PushCall(ctypes.Structure):
    _fields_ = (
        ("source", P),
        ("count", I64),
        *((n, P * MOST_RANKS) for n in ("to", "arrived")),
        *((n, P) for n in ("gave_up", "pass_number")),
        *((n, INT) for n in ("index", "ranks")),
    )


class AwaitCall(ctypes.Structure):
    _fields_ = (
        *((n, P) for n in ("arrived", "gave_up")),
        ("limit", I64),
        ("every", P),
        *((n, I64) for n in ("rows", "width")),
        ("pass_number", P),
        *((n, INT) for n in ("index", "ranks")),
    )


CALLS = {"kog_push": PushCall, "kog_await": AwaitCall}


def takes(schedule: Schedule) -> bool:
    """Whether the kernels move this model's outputs."""
    return schedule.num_ranks <= MOST_RANKS and schedule.spec.hidden_size % VALUES == 0


def render_rank_outputs() -> str:
    """The header of rank_outputs.cu."""
    numbers = {
        "kConsumers": THREADS,
        "kThreads": THREADS,
        "kBlocks": BLOCKS,
        "kPushBytes": ctypes.sizeof(PushCall),
        "kAwaitBytes": ctypes.sizeof(AwaitCall),
    }
    lines = (f"constexpr int {name} = {value};" for name, value in numbers.items())
    return "\n".join(["namespace kog {", *lines, "}  // namespace kog", ""])
