"""Whether a model fits a GPU, before its weights are loaded."""

from dataclasses import dataclass

import torch

from kog_triton.errors import DeviceError

GIB = 1 << 30
# Beside weights and cache: parts of products and tokens on their way into them (100 MB for 2,048 tokens of an 8B
# model), the library's graphs, logits, and what torch's allocator keeps. An allowance, not a measurement; what packing
# the largest matrix takes for a moment is not in it.
WORKSPACE = 1 << 29


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that opening a model takes: of its weights, of each position of a slot, and of `words` for exchanges."""

    weights: int
    position: int
    num_slots: int
    max_context: int
    words: int = 0

    @property
    def total(self) -> int:
        return self._fixed + self.num_slots * self.max_context * self.position

    def longest_context(self, free: int) -> int:
        """Positions a slot that `free` bytes leave room for; 0 or fewer: none."""
        return (free - self._fixed) // (self.num_slots * self.position)

    @property
    def _fixed(self) -> int:
        return self.weights + self.words + WORKSPACE

    def check(self, free: int, why: str = "are free", where: str = "") -> None:
        """DeviceError with what fits, if this does not; `why` there are no more than `free` bytes, and `where`."""
        if self.total <= free:
            return
        asked = f"{where}{self.weights / GIB:.1f} GiB of weights and {self.max_context:,} positions a slot"
        here = f"need {self.total / GIB:.1f} GiB, and {free / GIB:.1f} {why}"
        longest = self.longest_context(free)
        if longest < 1:
            raise DeviceError(f"{asked} {here}: not even the weights fit, choose a smaller model")
        raise DeviceError(f"{asked} {here}: choose max_model_len {longest} or less, or fewer slots")


def check_memory(plan: MemoryPlan, device: torch.device, share: float = 1.0, where: str = "") -> None:
    """As `MemoryPlan.check`, of what is free on a GPU now and what torch keeps for this process; and of `share` of
    all its memory, as vLLM's gpu_memory_utilization bounds a model. An error begins with `where`."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    plan.check(free + kept, where=where)
    plan.check(int(share * total), f"is what gpu_memory_utilization {share:g} allows", where)
