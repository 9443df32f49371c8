"""Read bandwidth of this GPU by method, as `kog bench` measures it: the floor of every token.

    python benchmarks/micro/read_bandwidth.py [--json FILE]

Without a GPU it measures the CPU's memory instead, and says so.
"""

import torch
from figures import arguments, finish

from kog_triton.bench.bandwidth import measure_bandwidth
from kog_triton.bench.machine import gpu_row


def main() -> None:
    args = arguments("read_bandwidth", "Read bandwidth of this GPU by method.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure_bandwidth(device, gpu_row(), 1)
    rates = {name: rate / 1e12 for name, rate in found["methods"].items()}
    notes = ["read" if device.type == "cuda" else "read by the CPU, no GPU seen"]
    notes += [f"{name} absent: {why}" for name, why in found["absent"].items()]
    if found["datasheet"]:
        share = found["measured"] / found["datasheet"]
        notes.append(f"datasheet {found['datasheet'] / 1e12:.3f}, the best reaches {share:.1%}")
    finish("read_bandwidth", "TB/s", rates, args.json, "; ".join(notes))


if __name__ == "__main__":
    main()
