"""Read bandwidth of this GPU by method, as `kog bench` measures it: the floor of every token.

    python benchmarks/micro/read_bandwidth.py

Without a GPU it measures the CPU's memory instead, and says so.
"""

import torch

from kog_triton.bench.bandwidth import measure_bandwidth
from kog_triton.bench.machine import gpu_row


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure_bandwidth(device, gpu_row(), 1)
    print(torch.cuda.get_device_name() if device.type == "cuda" else "CPU, no GPU seen")
    for name, rate in found["methods"].items():
        print(f"  {name:<8}{rate / 1e12:8.3f} TB/s")
    for name, why in found["absent"].items():
        print(f"  {name:<8}  absent: {why}")
    if found["datasheet"]:
        share = found["measured"] / found["datasheet"]
        print(
            f"  datasheet {found['datasheet'] / 1e12:.3f} TB/s; the best method reaches {share:.1%}"
        )


if __name__ == "__main__":
    main()
