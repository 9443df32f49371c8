"""What `--prefill` can mean on a GPU: what it cannot run is refused by name."""

from dataclasses import replace

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda_archs import HOPPER
from kog_triton.errors import DeviceError
from kog_triton.schedule.topology import Gpu


def prompts_of(gpu: Gpu, options: BackendOptions) -> BackendOptions:
    """The options with the prompts that this GPU can run: the products of prompt.cu are Hopper's own instructions
    (wgmma), without which prompts go in chunks. DeviceError where the library is asked for."""
    if gpu.arch == HOPPER or options.prefill in ("kernel", "decode"):
        return options
    if options.prefill == "library":
        raise DeviceError(
            f"the products of prompts are for Hopper GPUs, and {gpu.name} is {gpu.arch}: choose --prefill kernel"
        )
    return replace(options, prefill="kernel")
