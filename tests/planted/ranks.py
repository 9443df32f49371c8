"""Faults of the host side of several GPUs."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "backends/cuda/rank_kernel.py",
        "        meet([",
        "        ([",
        "host/test_cuda_rank_launch.py",
        "a rank's kernel begins before the others' words are empty",
    ),
    Fault(
        "backends/cuda/rank_kernel.py",
        "missing[rank] = str(error)",
        "pass",
        "host/test_cuda_rank_launch.py",
        "a rank that was not launched is not named",
    ),
    Fault(
        "backends/cuda/rank_memory.py",
        "memory.states[slot].copy_(self.first.states[slot])",
        "pass",
        "host/test_cuda_rank_launch.py",
        "ranks go on from different tokens behind a late mask",
    ),
    Fault(
        "backends/cuda/rank_memory.py",
        '{"masks": first.masks, "logprobs": first.logprobs}',
        "{}",
        "host/test_cuda_rank_launch.py",
        "a rank waits for masks that the host never writes",
    ),
    Fault(
        "backends/cuda/launcher.py",
        "(_waits_for_mask(one[1]), one[1].reported)",
        "one[1].reported",
        "host/test_cuda_rank_launch.py",
        "a late mask is blamed on a rank that waited for another",
    ),
    Fault(
        "backends/cuda/launcher.py",
        " or found is not outcome",
        "",
        "host/test_cuda_rank_launch.py",
        "ranks that end unlike each other are believed",
    ),
    Fault(
        "backends/cuda/gpus.py",
        "(gpu.name, gpu.num_sms) != (first.name, first.num_sms)",
        "gpu.name != first.name",
        "host/test_cuda_rank_launch.py",
        "ranks on unequal parts of one kind of GPU",
    ),
    Fault(
        "backends/gpu_entry.py",
        "in reversed(pairs)",
        "in pairs",
        "host/test_cuda_rank_launch.py",
        "the last rank's GPU is the current one",
    ),
    Fault(
        "backends/launch_queue.py",
        "for queue in self._queues:",
        "for queue in self._queues[:1]:",
        "host/test_cuda_rank_launch.py",
        "an engine on two GPUs stands in one line",
    ),
)
