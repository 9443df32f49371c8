"""Shared words and fences: the only file that knows a vendor.

Words that blocks exchange are read past the L1 (and, on AMD, past an XCD's own L2) and written through.
A word is its own flag, so they need no order. What is not self-announcing, the KV cache, is ordered by
`fence`, which pairs with itself: a block fences after its writes and before it publishes, another after
it has seen that publication and before it reads.
"""

import triton
import triton.language as tl


@triton.jit
def load_shared(ptr, mask, other, S: tl.constexpr):
    """Words another block may be writing. Triton drops `volatile` on gfx942 and honors .cv instead."""
    if S.vendor == "nvidia":
        return tl.load(ptr, mask=mask, other=other, volatile=True)
    else:
        return tl.load(ptr, mask=mask, other=other, cache_modifier=".cv")


@triton.jit
def store_shared(ptr, value, mask):
    tl.store(ptr, value, mask=mask, cache_modifier=".wt")


@triton.jit
def fence(word, S: tl.constexpr):
    """Everything this block wrote is visible to whoever fences after seeing a later word of it."""
    if S.vendor == "amd":
        # s_barrier does not wait for other waves' stores on gfx942: each wave drains its own.
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [tl.arange(0, 1)], tl.int32, False, 1
        )
    tl.debug_barrier()
    tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit
def dot(a, b, S: tl.constexpr):
    """a @ b in float32. Triton's interpreter multiplies the bits of bfloat16, so it gets float32 operands."""
    if S.vendor == "cpu":
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)
