"""Arguments of the kernels that bring module outputs from each GPU to all (rank_outputs.cu), and their header."""

import ctypes

MOST_RANKS, BLOCKS, THREADS = 8, 64, 512
P, I64, INT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int


class PushCall(ctypes.Structure):
    _fields_ = (
        ("source", P),
        ("count", I64),
        *((n, P * MOST_RANKS) for n in ("to", "arrived")),
        ("pass_number", P),
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
