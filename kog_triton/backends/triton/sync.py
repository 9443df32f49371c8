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
def meet(S: tl.constexpr):
    """All threads of the block are here, and see what any of them stored."""
    if S.vendor == "amd":
        # s_barrier does not wait for other waves' stores on gfx942: each wave drains its own.
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [tl.arange(0, 1)], tl.int32, False, 1
        )
    tl.debug_barrier()


@triton.jit
def fence(word, S: tl.constexpr):
    """Everything this block wrote is visible to whoever fences after seeing a later word of it."""
    meet(S)
    tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit
def dot(a, b, S: tl.constexpr):
    """a @ b in float32. Triton's interpreter multiplies the bits of bfloat16, so it gets float32 operands."""
    if S.vendor == "cpu":
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def now(S: tl.constexpr):
    """Nanoseconds on a clock that all blocks share."""
    if S.vendor == "nvidia":
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        tl.static_assert(False, "the profile needs an NVIDIA GPU")


@triton.jit
def stamp(p, it, point: tl.constexpr, S: tl.constexpr):
    """Write down when this block reached a point of layer run `it`; nothing unless the kernel is profiled."""
    if S.profile > 0:  # known at compile time, unlike what follows
        inside = it < S.profile
        at = (it * S.num_blocks + tl.program_id(0)) * 16 + point
        tl.store(p.profile + at, now(S), mask=inside)
