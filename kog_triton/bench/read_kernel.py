"""A Triton kernel that reads a buffer once and keeps nothing but a sum: bandwidth by plain loads."""

# mypy: ignore-errors
# Device code is not Python: Triton's compiler checks its types.

import torch
import triton
import triton.language as tl

BLOCK = 16384  # words of one step of a program: 32 a thread of 16 warps, in 16-byte loads


@triton.jit
def read_kernel(data, out, num_steps, BLOCK: tl.constexpr):
    """Programs take blocks in turn. The sum is stored only if it is one value of 2**32, so that
    the loads stay and no store competes with them."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(tl.program_id(0), num_steps, tl.num_programs(0)):
        total += tl.load(data + step * BLOCK + offsets, eviction_policy="evict_first")
    value = tl.sum(total)
    tl.store(out, value, mask=value == 0x12345678)


def read_all(data: torch.Tensor, out: torch.Tensor, programs_per_sm: int) -> None:
    """One pass over int32 `data`: a multiple of BLOCK words, fewer than 2**31."""
    sms = torch.cuda.get_device_properties(data.device).multi_processor_count
    read_kernel[(sms * programs_per_sm,)](data, out, data.numel() // BLOCK, BLOCK=BLOCK, num_warps=16, num_stages=2)
