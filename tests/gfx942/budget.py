"""What the gfx942 object of the Triton kernel could keep on its way, and issue, on an MI300X: a budget, no measurement.

python -m tests.gfx942.budget [MODEL ..]
"""

import argparse
from collections.abc import Sequence

from tests.lib.gfx942.gates import CUS, LDS_BYTES, Gates, gates_of
from tests.lib.gfx942.triton_backend import KERNEL
from tests.lib.gfx942.triton_cases import FULL_SIZE, MORE_SIZES, compiled

BANDWIDTH = 4.2e12  # bytes/s that AMD's roofline tool reads on an MI300X (ROCm issue 5070); nobody here has measured it
LATENCIES = (0.6, 1.0, 1.5, 2.0)  # us from a load to its data, out of HBM: unknown to us, so a parameter
CLOCK = 2.1e9  # Hz, the peak engine clock in AMD's data sheet
CYCLES = 4  # of a SIMD of 16 lanes for an instruction of 64
LOAD_BYTES = 64 * 16  # of one wide load of a wave


def needed_bytes(latency: float) -> float:
    """Bytes that a CU must have on their way for the bandwidth, at a latency in us."""
    return BANDWIDTH * latency * 1e-6 / CUS


def issue_slots(token_us: float) -> float:
    """Instructions that one wave could issue in that time, alone on its SIMD."""
    return token_us * 1e-6 * CLOCK / CYCLES


def in_flight(gates: Gates) -> int:
    """Bytes that a workgroup has on their way at most, in straight code."""
    return gates.most_in_flight * LOAD_BYTES * gates.waves


def exceeded(gates: Gates, weights: int, layers: int) -> list[str]:
    """What does not suffice for a token of `weights` bytes at the assumed bandwidth: slots, LDS, or bytes in flight."""
    slots = issue_slots(weights / BANDWIDTH * 1e6)
    wrong = {"issue slots": gates.instructions * layers > slots, "LDS": gates.lds > LDS_BYTES} | {
        f"bytes in flight at {latency:.1f} us": in_flight(gates) < needed_bytes(latency) for latency in LATENCIES
    }
    return [name for name, one in wrong.items() if one]


def main(argv: Sequence[str] | None = None) -> int:
    sizes = FULL_SIZE | MORE_SIZES
    parser = argparse.ArgumentParser(prog="python -m tests.gfx942.budget", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(sizes)}; {', '.join(FULL_SIZE)}")
    asked = parser.parse_args(argv).models or [*FULL_SIZE]
    if unknown := [name for name in asked if name not in sizes]:
        parser.error(f"no object of {', '.join(unknown)}: have {', '.join(sizes)}")
    print(
        f"Assumed: {BANDWIDTH / 1e12} TB/s, {CUS} CUs with one workgroup each, {CLOCK / 1e9} GHz, {CYCLES} cycles an"
        " instruction of a wave, every instruction of the kernel once a layer."
        " Nothing of this was measured on AMD hardware."
    )
    beyond = False
    for name in asked:
        case, made = sizes[name], compiled(name)
        gates = gates_of(made.code_object, KERNEL, made.lds, made.num_warps)
        weights = case.spec.bytes_per_token
        token_us = weights / BANDWIDTH * 1e6
        slots, used = issue_slots(token_us), gates.instructions * case.spec.num_layers
        held = in_flight(gates)
        print(f"{name}: {weights / 1e9:.2f} GB of weights, {token_us:.0f} us a token at that bandwidth")
        print(f"  issue slots of a wave   {used:,} of {slots:,.0f} ({used / slots:.0%})")
        print(f"  LDS of a workgroup      {gates.lds:,} of {LDS_BYTES:,} bytes")
        print(f"  registers               {gates.vgprs} of 512, {gates.groups_per_cu} workgroups fit a CU")
        print(f"  bytes in flight, a CU   {held:,} at most, in straight code; needed at a latency of")
        for latency in LATENCIES:
            print(f"    {latency:.1f} us  {needed_bytes(latency):8,.0f}  ({held / needed_bytes(latency):.1f} times)")
        missed = exceeded(gates, weights, case.spec.num_layers)
        print(f"  beyond the budget       {', '.join(missed) or 'nothing'}")
        beyond |= bool(missed)
    return int(beyond)


if __name__ == "__main__":
    raise SystemExit(main())
