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
    Fault(
        "backends/cuda/memory.py",
        "w = [w[0].of_rows(*schedule.head_rows(rank))]",
        "w = [w[0].of_rows(*schedule.head_rows(0))]",
        "cuda/test_cuda_rank_narrow.py",
        "every rank scores the first ids of a narrow head",
    ),
    Fault(
        "backends/cuda/memory.py",
        "scales[0][0, slice(*schedule.head_rows(rank))]",
        "scales[0][0]",
        "cuda/test_cuda_rank_narrow.py",
        "a rank's rows of a narrow head have the first rank's scales",
    ),
    Fault(
        "backends/cuda/narrow_weights.py",
        "groups[0].unflatten(-1, (shards, -1)).transpose(0, 1)",
        "groups[0][:, : groups.shape[-1] // shards].expand(shards, -1, -1)",
        "cuda/test_cuda_rank_narrow.py",
        "all ranks multiply with the scales of the first part of K",
    ),
    Fault(
        "schedule/cuda_weights.py",
        "how.group_cols and stage.cols % how.group_cols",
        "False",
        "cuda/test_cuda_rank_narrow.py",
        "scale groups that ranks cut are taken",
    ),
)
