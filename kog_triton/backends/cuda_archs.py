"""The GPUs that CUDA kernels are compiled for. "auto" takes them on Hopper alone, since they have run nowhere else."""

from kog_triton.backends import Availability

HOPPER = "sm_90a"
ARCHS = (HOPPER, "sm_100a", "sm_120a")


def not_compiled_for(name: str, arch: str) -> Availability | None:
    """Why nothing is compiled for a GPU of this name; None if it is one of ARCHS."""
    if arch in ARCHS:
        return None
    return Availability(False, f"{name} is {arch}, and it takes {', '.join(ARCHS)}", "choose --backend triton")
