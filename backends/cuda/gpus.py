"""GPUs of one process that reach each other's memory: opened, one of them alone or several alike, or refused."""

import os
from collections.abc import Sequence

import torch

from kog_triton.backends.cuda.driver import reach
from kog_triton.backends.cuda.layout.collectives import check_count
from kog_triton.backends.device import gpu_of
from kog_triton.errors import DeviceError, first_line
from kog_triton.schedule.topology import Gpu

# What torch's allocator can be told to take, which is mapped for one GPU: peer access to a context does not cover it.
MAPPED_FOR_ONE = ("expandable_segments:true", "backend:cudamallocasync")


def open_gpus(count: int) -> tuple[list[torch.device], Gpu]:
    """The current GPU, or the first `count`, which reach each other from now on; what they are. DeviceError as
    `check_peers`, and for one that another process keeps to itself."""
    if count == 1:
        devices = [torch.device("cuda", torch.cuda.current_device())]
    else:
        check_peers(count)
        devices = [torch.device("cuda", i) for i in range(count)]
    for device in devices:
        _open(device)
    gpus = [_gpu(device) for device in devices]
    check_alike(gpus)
    reach_all(count)
    return devices, gpus[0]


def check_alike(gpus: Sequence[Gpu]) -> None:
    """DeviceError unless all are of one kind and size."""
    first, *others = gpus
    for i, gpu in enumerate(others, 1):
        if (gpu.name, gpu.num_sms) != (first.name, first.num_sms):
            raise DeviceError(
                f"GPU {i} is {gpu.name} with {gpu.num_sms} SMs and GPU 0 {first.name} with {first.num_sms}: ranks must "
                "be alike"
            )


def _gpu(device: torch.device) -> Gpu:
    gpu = gpu_of(device)
    assert gpu is not None
    return gpu


def _open(device: torch.device) -> None:
    """Make torch's context, which the driver calls need."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:  # torch's, as for a GPU whose compute mode is exclusive
        raise DeviceError(
            f"GPU {device.index} cannot be opened, another process may keep it to itself (nvidia-smi shows whose): "
            f"{first_line(error)}"
        ) from error


def check_peers(count: int) -> None:
    """DeviceError unless the first `count` GPUs are there, alike, and reach each other's memory."""
    check_count(count)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < count:
        raise DeviceError(f"{count} GPUs were asked for, and torch sees {there}")
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    for i, name in enumerate(names):
        if name != names[0]:
            raise DeviceError(f"GPU {i} is a {name} and GPU 0 a {names[0]}: ranks must be alike")
    for i in range(count):
        for peer in range(count):
            if i != peer and not torch.cuda.can_device_access_peer(i, peer):
                raise DeviceError(
                    f"GPU {i} does not reach the memory of GPU {peer}: choose GPUs that NVLink or one PCIe root "
                    "joins (CUDA_VISIBLE_DEVICES; nvidia-smi topo -p2p r)"
                )
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        asked = os.environ.get(name, "").lower()
        for what in MAPPED_FOR_ONE if count > 1 else ():
            if what in asked:
                raise DeviceError(f"{name} asks for {what}, memory that other GPUs do not reach: leave it out")


def reach_all(count: int) -> None:
    """Let kernels on each of the first `count` GPUs read and write the others' memory."""
    for i in range(count):
        for peer in range(count):
            if i != peer:
                reach(i, peer)
