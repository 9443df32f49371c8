"""Shared words and fences: the one file with instructions of a vendor; sizes that depend on one are data elsewhere.

Words that blocks exchange are read past the L1 (and, on AMD, past an XCD's own L2) and written through.
A word is its own flag, so they need no order; one that nobody waits for, as of a split that is not in use,
is taken to land before its successor is waited for, a layer and several exchanges later. What is not
self-announcing, the KV cache, is ordered by `fence`, which pairs with itself: a block fences after its
writes and before it publishes, another after it has seen that publication and before it reads.
"""

import triton
import triton.language as tl
from triton.language.target_info import current_target


@triton.constexpr_function
def is_rdna():
    """Whether it is compiled for AMD's gfx11, whose instructions and warps of 32 are not those of gfx9."""
    target = current_target()
    return target is not None and target.backend == "hip" and target.arch.startswith("gfx11")


@triton.jit
def load_shared(ptr, S: tl.constexpr, mask=None, other=None):
    """Words another block, or the host, may be writing. Triton drops `volatile` on gfx942 and honors .cv instead."""
    if S.vendor == "nvidia":
        return tl.load(ptr, mask=mask, other=other, volatile=True)
    else:
        return tl.load(ptr, mask=mask, other=other, cache_modifier=".cv")


@triton.jit
def load_uncached(ptr, S: tl.constexpr):
    """One word that another block may have written; polls take `load_shared`."""
    return tl.load(ptr, cache_modifier=".cg" if S.vendor == "nvidia" else ".cv")


@triton.jit
def load_once(ptr, S: tl.constexpr):
    """What a token reads once: evicted first; on AMD, where Triton drops policies, non-temporal, as it makes `.cg`."""
    if S.vendor == "amd":
        return tl.load(ptr, cache_modifier=".cg")
    else:
        return tl.load(ptr, eviction_policy="evict_first")


@triton.jit
def store_shared(ptr, value, mask=None):
    tl.store(ptr, value, mask=mask, cache_modifier=".wt")


@triton.jit
def assembly(TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, args, WIDE: tl.constexpr = False):
    """int32, or int64: what instructions of the vendor's make of `args`. None is left out, or goes before another."""
    if WIDE:
        return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, args, tl.int64, False, 1)
    else:
        return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, args, tl.int32, False, 1)


@triton.jit
def arithmetic(TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, args):
    """As `assembly`, of instructions that do nothing else: int32, computed where and as often as the compiler likes."""
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, args, tl.int32, True, 1)


@triton.jit
def meet(S: tl.constexpr):
    """All threads of the block are here, and see what any of them stored."""
    if S.vendor == "amd":
        # s_barrier does not wait for other waves' stores on gfx942: each wave drains its own, which gfx11 counts apart.
        STORES: tl.constexpr = "\ns_waitcnt_vscnt null, 0x0" if is_rdna() else ""
        WAIT: tl.constexpr = "s_waitcnt vmcnt(0)" + STORES + "\nv_mov_b32 $0, $1"
        assembly(WAIT, "=v,v", (tl.arange(0, 1),))
    tl.debug_barrier()


@triton.constexpr_function
def asks_by_barrier(S):
    """Whether a block learns by `any_set` what its threads have found: AMD has no barrier that reduces."""
    return S.vendor != "amd"


@triton.jit
def any_set(xs, S: tl.constexpr):
    """1 if in a tuple of int32 tensors any element of any of the block's threads is not zero, else 0; a barrier.

    On NVIDIA the barrier itself reduces, where a maximum takes three and two ways through shared memory
    (benchmarks/triton-log.md#reducing-barrier). The pieces of assembly share a scope of registers, so that no branch
    may come between them.
    """
    COUNT: tl.constexpr = len(xs)
    if S.vendor == "nvidia":
        NAMES: tl.constexpr = "{\n.reg .b32 any;\n.reg .pred here, found;\n"
        REDUCE: tl.constexpr = "bar.red.or.pred found, 0, here;\nselp.b32 $0, 1, 0, found;\n}"
        assembly(NAMES + "mov.b32 any, 0;\nmov.b32 $0, 0;", "=r", ())
        for i in tl.static_range(COUNT):
            assembly("or.b32 any, any, $1;\nmov.b32 $0, 0;", "=r,r", (xs[i],))
        return assembly("setp.ne.s32 here, any, 0;\n" + REDUCE, "=r", ())
    else:
        found = tl.max(xs[0])
        for i in tl.static_range(1, COUNT):
            found = tl.maximum(found, tl.max(xs[i]))
        return found


@triton.jit
def pin(x, S: tl.constexpr):
    """int32 x, computed once and in the layout it has: what follows may convert it, not compute it again in another."""
    if S.vendor == "nvidia":
        return assembly("mov.b32 $0, $1;", "=r,r", (x,))
    elif S.vendor == "amd":
        return assembly("v_mov_b32 $0, $1", "=v,v", (x,))
    else:
        return x


@triton.jit
def bytes_of(a, b, SELECT: tl.constexpr, S: tl.constexpr):
    """Four of the eight bytes of a and b, numbered from a's lowest; SELECT has the number of the lowest last."""
    if S.vendor == "nvidia":
        select = tl.full((1, 1), SELECT, tl.int32)
        return arithmetic("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", (a, b, select))
    else:
        word = tl.zeros_like(a)
        for i in tl.static_range(4):
            source = a if (SELECT >> (4 * i) & 4) == 0 else b
            word |= (source >> (8 * (SELECT >> (4 * i) & 3)) & 255) << (8 * i)
        return word


# `prmt` picks bytes by the codes' three low bits: 0, 1, 2, 3, 4, 6, 8, 12, and those with a minus. Of signs it makes
# bytes of ones or zeros, which choose.
_E2M1 = """{
.reg .b32 codes, up, down, raised, signs;
shr.b32 codes, $1, SHIFT;
and.b32 codes, codes, 0x7777;
prmt.b32 up, 0x03020100, 0x0c080604, codes;
prmt.b32 down, 0xfdfeff00, 0xf4f8fafc, codes;
shl.b32 raised, $1, 4;
prmt.b32 signs, raised, $1, SIGNS;
lop3.b32 $0, signs, down, up, 0xca;
}"""


E2M1_TEXTS = (  # of the first four codes and of the last
    _E2M1.replace("SHIFT", "0").replace("SIGNS", "0xd9c8"),
    _E2M1.replace("SHIFT", "16").replace("SIGNS", "0xfbea"),
)


@triton.constexpr_function
def e2m1_text(half):
    return E2M1_TEXTS[half]


@triton.jit
def bytes_of_e2m1(w, HALF: tl.constexpr, S: tl.constexpr):
    """The first or the last four E2M1 codes of each word as signed bytes, twice what they stand for."""
    if S.vendor == "nvidia":
        return arithmetic(e2m1_text(HALF), "=r,r", (w,))
    else:
        word = tl.zeros_like(w)
        for i in tl.static_range(4):
            code = (w >> (16 * HALF + 4 * i)) & 15
            exponent = (code >> 1) & 3
            twice = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << tl.maximum(exponent - 1, 0))
            word |= (tl.where(code > 7, -twice, twice) & 255) << (8 * i)
        return word


@triton.jit
def dot4(a, b, total, S: tl.constexpr):
    """total + the products of the words' four signed bytes, int32."""
    if S.vendor == "nvidia":
        return arithmetic("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", (a, b, total))
    elif S.vendor == "amd":
        # Wait states behind a dot product, which LLVM does not put around assembly (gfx90a, gfx942).
        RDNA: tl.constexpr = "v_dot4_i32_iu8 $0, $1, $2, $3 neg_lo:[1,1,0]"
        CDNA: tl.constexpr = "v_dot4_i32_i8 $0, $1, $2, $3\ns_nop 2"
        return arithmetic(RDNA if is_rdna() else CDNA, "=v,v,v,v", (a, b, total))
    else:
        for i in tl.static_range(4):
            total += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return total


@triton.constexpr_function
def converts_e4m3(S):
    """Whether an instruction makes float16 of E4M3; the interpreter works as if it had one."""
    target = current_target()
    return target is None or (S.vendor == "nvidia" and target.arch >= 89)


@triton.jit
def first_half(w):
    """The low half of each word, float16 (words.f16_low masks it first: fewer instructions where all weights pass)."""
    return w.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def second_half(w):
    """The high half of each word, float16."""
    return (w >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def two_halves(a, b):
    """float16 a and b as one word, a in its low half."""
    first = a.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | (b.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def rounded_to_halves(a, b, S: tl.constexpr):
    """float32 a and b as float16 in one word, a in its low half."""
    if S.vendor == "nvidia":
        return arithmetic("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", (a, b))
    else:
        return two_halves(a.to(tl.float16), b.to(tl.float16))


@triton.jit
def halves_of_e4m3(w, S: tl.constexpr):
    """The four E4M3 codes of each word, two words of two float16 values."""
    if S.vendor == "nvidia":
        APART: tl.constexpr = "{\n.reg .b16 first, last;\nmov.b32 {first, last}, $2;\n"
        BOTH: tl.constexpr = "cvt.rn.f16x2.e4m3x2 $0, first;\ncvt.rn.f16x2.e4m3x2 $1, last;\n}"
        TEXT: tl.constexpr = APART + BOTH
        return tl.inline_asm_elementwise(TEXT, "=r,=r,r", [w], (tl.int32, tl.int32), True, 1)
    else:
        pairs = ()
        for i in tl.static_range(2):
            codes = w >> (16 * i)
            # Sign, exponent and mantissa where float16 has them, whose exponent is 8 more for the same value.
            a = (codes & 128) << 8 | (codes & 127) << 7
            b = (codes & 0x8000) << 16 | (codes & 0x7F00) << 15
            a, b = first_half(a), second_half(b)
            pairs = pairs + (two_halves(a * 256, b * 256),)
        return pairs


@triton.jit
def multiply_halves(a, b, onto, S: tl.constexpr):
    """onto + a * b of words of two float16 values."""
    if S.vendor == "nvidia":
        return arithmetic("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", (a, b, onto))
    else:
        first = first_half(a) * first_half(b) + first_half(onto)
        return two_halves(first, second_half(a) * second_half(b) + second_half(onto))


@triton.jit
def add_halves(a, b):
    """a + b of words of two float16 values, on NVIDIA."""
    return arithmetic("add.rn.f16x2 $0, $1, $2;", "=r,r,r", (a, b))


@triton.jit
def sum_of_halves(w, S: tl.constexpr):
    """The sum of the two float16 values of each word along the last dimension, float32."""
    AXIS: tl.constexpr = len(w.shape) - 1
    if S.vendor == "nvidia":
        APART: tl.constexpr = "{\n.reg .b16 a, b;\n.reg .f32 c, d;\nmov.b32 {a, b}, $1;\n"
        SUM: tl.constexpr = "cvt.f32.f16 c, a;\ncvt.f32.f16 d, b;\nadd.rn.f32 $0, c, d;\n}"
        total = tl.reduce(w, AXIS, add_halves)
        return tl.inline_asm_elementwise(APART + SUM, "=r,r", [total], tl.float32, True, 1)
    else:
        first, second = tl.sum(first_half(w), axis=AXIS), tl.sum(second_half(w), axis=AXIS)
        return first.to(tl.float32) + second.to(tl.float32)


@triton.jit
def uniform(value, S: tl.constexpr):
    """An int32 that all threads have alike, where LLVM for AMD cannot know it, in a scalar register.

    An address that it chooses else differs by thread to LLVM, which then loads in loops over threads. And a reduction
    before a loop of such reductions shares the code behind them with the loop (Triton 3.7.1), which begins with a
    barrier: LLVM parts the loop so that threads meet there whose neighbors have yet to write: tests/gfx942 saw waves
    at different barriers.
    """
    if S.vendor == "amd":
        # A wait state behind whatever gave the value, which LLVM does not put around assembly (gfx942).
        return assembly("s_nop 0\nv_readfirstlane_b32 $0, $1", "=s,v", (value,))
    else:
        return value


@triton.jit
def pin_address(ptr, S: tl.constexpr):
    """The pointer, computed here: addresses that compilers compute long before would each keep registers."""
    if S.vendor == "nvidia":
        at = assembly("mov.b64 $0, $1;", "=l,l", (ptr.to(tl.int64),), WIDE=True)
        return tl.multiple_of(at.to(ptr.dtype), 16)
    else:
        return ptr


@triton.jit
def fence(word, S: tl.constexpr):
    """Everything this block wrote is visible to a block that fences after seeing a later word of it."""
    meet(S)
    if S.vendor == "amd":
        # Nobody reads it. LLVM (Triton 3.7.1) leaves out the wait for an atomic's write-back where it knows of nothing
        # of the thread's on its way; of `meet`'s wait it knows nothing, of its own it does.
        tl.store(word + 1, 0)
    tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit
def order(word, S: tl.constexpr):
    """As `fence`, without a way to memory and back where a vendor has an instruction for it."""
    if S.vendor == "nvidia":
        meet(S)
        assembly("fence.acq_rel.gpu;\nmov.b32 $0, $1;", "=r,r", (tl.arange(0, 1),))
        tl.debug_barrier()
    else:
        fence(word, S)


@triton.constexpr_function
def loop_stages(S):
    """Steps of a loop that Triton may keep on their way in shared memory: on AMD that would take all 64 KB of it."""
    return 3 if S.vendor == "nvidia" else 1


@triton.jit
def dot(a, b, S: tl.constexpr, onto=None):
    """a @ b in float32, with `onto` added. Triton's interpreter multiplies the bits of bfloat16, so it gets float32."""
    if S.vendor == "cpu":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), onto)
    else:
        return tl.dot(a, b, onto)


@triton.jit
def once(x, S: tl.constexpr):
    """x, of 16 bits, computed once: on AMD Triton would compute x again in an operand's layout, of which every wave has
    a copy (benchmarks/triton-log.md#operands-twice).

    A chunk's own keys and values so spilled 1,620 bytes of a tiny model on gfx1100, for 16, and took 245 registers on
    gfx942, for 192. Assembly that may have effects is not repeated.
    """
    if S.vendor == "amd":
        return tl.inline_asm_elementwise("", "=v,0", (x,), x.dtype, False, 2)
    else:
        return x


@triton.jit
def clock(S: tl.constexpr):
    """A clock that all blocks share, in nanoseconds on NVIDIA; the interpreter has none.

    AMD's counter does not follow the core's clock, but its rate differs by card and is the driver's to know:
    100 MHz is assumed, which bounds waits well enough and is no measurement of time.
    """
    if S.vendor == "nvidia":
        return assembly("mov.u64 $0, %globaltimer;", "=l", (), WIDE=True)
    elif S.vendor == "amd":
        RDNA: tl.constexpr = "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)"
        READ: tl.constexpr = RDNA if is_rdna() else "s_memrealtime $0"
        return 10 * assembly(READ + "\ns_waitcnt lgkmcnt(0)", "=s", (), WIDE=True)
    else:
        return tl.zeros((), tl.int64)


@triton.constexpr_function
def stamps_tokens(S):
    """Whether every token goes to the host with the clock's time: where that is nanoseconds on any card."""
    return S.vendor == "nvidia"


@triton.constexpr_function
def calls_cheaply(S):
    """Whether code may stand apart and be called: on AMD a call takes a stack, and where matrices are multiplied in
    tensor memory (sm_100) Triton 3.7.1 compiles them in the kernel itself alone."""
    target = current_target()
    tensor_memory = target is not None and target.backend == "cuda" and 100 <= target.arch < 120
    return S.vendor == "nvidia" and not tensor_memory


@triton.jit
def ticks(S: tl.constexpr):
    """The clock in units of 1,024 ns, int32: it wraps, so only differences mean something."""
    return (clock(S) >> 10).to(tl.int32)


@triton.jit
def expired(since, tries, limit, S: tl.constexpr):
    """1 if a wait has lasted `limit` that began at `since`: in ticks, in the interpreter in tries.

    Every thread reads the clock at a moment of its own, so a block's may disagree.
    """
    lasted = tries if S.vendor == "cpu" else ticks(S) - since
    return (lasted >= limit).to(tl.int32)


@triton.jit
def stamp(p, it, point: tl.constexpr, S: tl.constexpr):
    """Write down when this block reached a point of layer run `it`; nothing unless the kernel is profiled."""
    if S.profile > 0:  # known at compile time, unlike what follows
        inside = it < S.profile
        at = (it * S.num_blocks + tl.program_id(0)) * 16 + point
        tl.store(p.profile + at, clock(S), mask=inside)
