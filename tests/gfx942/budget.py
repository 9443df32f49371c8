"""What the gfx942 object of the Triton kernel could keep on its way, and issue, on an MI300X: a budget, no measurement.

python -m tests.gfx942.budget
"""

import argparse
from collections.abc import Sequence

from tests.lib.gfx942.gates import CUS, LDS_BYTES, gates_of
from tests.lib.gfx942.triton_backend import KERNEL
from tests.lib.gfx942.triton_cases import FULL_SIZE, compiled

BANDWIDTH = 4.2e12  # bytes/s that AMD's roofline tool reads on an MI300X (ROCm issue 5070); nobody here has measured it
LATENCIES = (
    0.6,
    1.0,
    1.5,
    2.0,
)  # us from a load to its data, out of HBM: unknown to us, so a parameter
CLOCK = 2.1e9  # Hz, the peak engine clock in AMD's data sheet
CYCLES = 4  # of a SIMD of 16 lanes for an instruction of 64
LOAD_BYTES = 64 * 16  # of one wide load of a wave


def needed_bytes(latency: float) -> float:
    """Bytes that a CU must have on their way for the bandwidth, at a latency in us."""
    return BANDWIDTH * latency * 1e-6 / CUS


def issue_slots(token_us: float) -> float:
    """Instructions that one wave could issue in that time, alone on its SIMD."""
    return token_us * 1e-6 * CLOCK / CYCLES


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m tests.gfx942.budget", description=__doc__).parse_args(
        argv
    )
    print(
        f"Assumed: {BANDWIDTH / 1e12} TB/s, {CUS} CUs with one workgroup each, {CLOCK / 1e9} GHz, {CYCLES} cycles an"
        " instruction of a wave, every instruction of the kernel once a layer."
        " Nothing of this was measured on AMD hardware."
    )
    for name, case in FULL_SIZE.items():
        made = compiled(name)
        gates = gates_of(made.code_object, KERNEL, made.lds, made.num_warps)
        weights = case.spec.bytes_per_token
        token_us = weights / BANDWIDTH * 1e6
        slots, used = issue_slots(token_us), gates.instructions * case.spec.num_layers
        in_flight = gates.most_in_flight * LOAD_BYTES * gates.waves
        print(
            f"{name}: {weights / 1e9:.2f} GB of weights, {token_us:.0f} us a token at that bandwidth"
        )
        print(f"  issue slots of a wave   {used:,} of {slots:,.0f} ({used / slots:.0%})")
        print(f"  LDS of a workgroup      {gates.lds:,} of {LDS_BYTES:,} bytes")
        print(
            f"  registers               {gates.vgprs} of 512, {gates.groups_per_cu} workgroups fit a CU"
        )
        print(
            f"  bytes in flight, a CU   {in_flight:,} at most, in straight code; needed at a latency of"
        )
        for latency in LATENCIES:
            print(
                f"    {latency:.1f} us  {needed_bytes(latency):8,.0f}  ({in_flight / needed_bytes(latency):.1f} times)"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
