"""Words that carry their own readiness (schedule/wire.py defines them), and the polls that wait for them.

A poll is bounded: it gives up after `limit` tries, writes down what it waited for, and clears `alive`, after
which no poll of the block waits and the block leaves at the end of the token.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.sync import load_shared, store_shared

LINE: tl.constexpr = tl.constexpr(128)  # words that one warp reads at once, 16 bytes a thread
POLLED: tl.constexpr = tl.constexpr(256)  # as many as a block has threads


@triton.jit
def index(WORDS: tl.constexpr):
    """0 .. WORDS - 1 as [WORDS / LINE, LINE]: the shape in which vectors meet tiles."""
    WIDE: tl.constexpr = min(WORDS, LINE)
    return tl.arange(0, WORDS // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]


@triton.jit
def low(w, S: tl.constexpr):
    """The first 16-bit value of each word, float32."""
    if S.f16:
        return (w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(w, S: tl.constexpr):
    """The second 16-bit value of each word, float32."""
    if S.f16:
        return (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def half_bits(x, S: tl.constexpr):
    """float32 rounded to the model's 16-bit type, its bits in int32."""
    if S.f16:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        b = x.to(tl.int32, bitcast=True)
        nearest = ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where(x != x, 0x7FC0, nearest)


@triton.jit
def pack_pair(first, second, phase, S: tl.constexpr):
    a, b = half_bits(first, S), half_bits(second, S)
    nan: tl.constexpr = 0x7E00 if S.f16 else 0x7FC0
    a = tl.where(first != first, nan, (a + ((a >> 1) & 1)) & 0xFFFE)
    return (b << 16) | a | phase


@triton.jit
def unpack_first(w, S: tl.constexpr):
    return low(w & -2, S)


@triton.jit
def pack_f32(x, phase):
    b = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    return (b & -2) | phase


@triton.jit
def unpack_f32(w):
    return (w & -2).to(tl.float32, bitcast=True)


@triton.jit
def load_polled(ptr, mask, phase, S: tl.constexpr):
    """Words at `ptr` [m, n] that a poll tests, in copies [copies, m, n] if they are few; `settle` takes one.

    Triton may repeat a load of fewer elements than threads in a second layout, volatile or not, and then use
    words that no poll has tested. So there are always at least POLLED of them.
    """
    if ptr.numel >= POLLED:
        return load_shared(ptr, mask, phase, S)
    else:
        copies = tl.zeros((POLLED // ptr.numel, 1, 1), tl.int32)
        return load_shared(ptr[None, :, :] + copies, mask[None, :, :] & (copies == 0), phase, S)


@triton.jit
def settle(w):
    """The words [m, n] of a poll that has seen them all fresh."""
    if len(w.shape) == 3:
        return tl.max(w, axis=0)
    else:
        return w


@triton.jit
def wait(ptr, mask, phase, alive, where, p, S: tl.constexpr):
    """Words at `ptr` [n] once all carry `phase`; masked ones are zero but for the phase."""
    w = load_polled(ptr[:, None], mask[:, None], phase, S)
    bad = tl.max((w ^ phase) & 1)
    tries = 0
    while (bad != 0) & (tries < p.limit * alive):
        w = load_polled(ptr[:, None], mask[:, None], phase, S)
        bad = tl.max((w ^ phase) & 1)
        tries += 1
    return tl.max(settle(w), axis=1), report(bad, alive, where, p)


@triton.jit
def wait_planes(
    base, half, phase, alive, where, p, S: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr
):
    """A vector's even and odd planes once all carry `phase`: 2 * CHUNKS tensors of WORDS words."""
    w = load_planes(base, half, phase, S, WORDS, CHUNKS)
    bad = stale(w, phase, 2 * CHUNKS)
    tries = 0
    while (bad != 0) & (tries < p.limit * alive):
        w = load_planes(base, half, phase, S, WORDS, CHUNKS)
        bad = stale(w, phase, 2 * CHUNKS)
        tries += 1
    out = ()
    for i in tl.static_range(2 * CHUNKS):
        out = out + (settle(w[i]),)
    return out, report(bad, alive, where, p)


@triton.jit
def load_planes(base, half, phase, S: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr):
    w = ()
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + index(WORDS)
        w = w + (
            load_polled(base + j, j < half, phase, S),
            load_polled(base + half + j, j < half, phase, S),
        )
    return w


@triton.jit
def wait_pairs(
    base, count, phase, alive, where, p, S: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr
):
    """`count` pair words once all carry `phase`, as even and odd planes: 2 * CHUNKS tensors of WORDS float32."""
    w = load_pairs(base, count, phase, S, WORDS, CHUNKS)
    bad = stale(w, phase, CHUNKS)
    tries = 0
    while (bad != 0) & (tries < p.limit * alive):
        w = load_pairs(base, count, phase, S, WORDS, CHUNKS)
        bad = stale(w, phase, CHUNKS)
        tries += 1
    xs = ()
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + index(WORDS)
        word = tl.where(j < count, settle(w[c]), 0)
        xs = xs + (unpack_first(word, S), high(word, S))
    return xs, report(bad, alive, where, p)


@triton.jit
def load_pairs(base, count, phase, S: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr):
    w = ()
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + index(WORDS)
        w = w + (load_polled(base + j, j < count, phase, S),)
    return w


@triton.jit
def stale(w, phase, COUNT: tl.constexpr):
    """1 if any word of COUNT tensors lacks the phase."""
    any_bad = w[0] ^ phase
    for i in tl.static_range(1, COUNT):
        any_bad = any_bad | (w[i] ^ phase)
    return tl.max(any_bad & 1)


@triton.jit
def report(bad, alive, where, p):
    """alive, or 0 after a wait that expired: the first to expire says where (stage, layer, block)."""
    if (bad != 0) & (alive != 0):
        tl.atomic_cas(p.error, 0, where + 1)
    return tl.where(bad != 0, 0, alive)


@triton.jit
def publish_planes(base, half, row, value, rows, phase):
    """float32 values of consecutive rows into a vector's planes; every value a word."""
    store_shared(base + (row & 1) * half + (row >> 1), pack_f32(value, phase), row < rows)


@triton.jit
def publish_pairs(base, row, value, rows, phase, S: tl.constexpr, N: tl.constexpr):
    """N values of rows row .. row + N - 1 (row even) as pair words."""
    first, second = tl.split(tl.reshape(value, (N // 2, 2)))
    j = row // 2 + tl.arange(0, N // 2)
    store_shared(base + j, pack_pair(first, second, phase, S), 2 * j < rows)
