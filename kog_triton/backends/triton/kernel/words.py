"""Words that carry their own readiness (schedule/wire.py defines them), and the polls that wait for them.

A poll is bounded in time: it gives up after `limit` and clears `alive`, after which
no poll of the block waits; its candidate then tells all blocks to leave (sample.py). A block writes down what it waited
for, int32 [1 + blocks, RECORD], whose first word is 1 + the first block that did:

    0 wait: its number in WAITS   1 layer   2 phase wanted, or the number   3 index + 1 of a missing word   4 its bits
    5, 6 the words waited for: index, count   7 .. 10 more runs of them: index, count, stride, runs

Indices count from the start of the words arena. Words that carry a number (waits of "sample") are not looked for.

Where requests share a step the phase is None: all blocks have met since the words were written, so nobody waits for
them, and a pair is stored as a matrix reads it.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.sync import (
    any_set,
    asks_by_barrier,
    expired,
    load_shared,
    load_uncached,
    meet,
    store_shared,
    ticks,
    uniform,
)
from kog_triton.model.spec import DType
from kog_triton.schedule import wire

LINE: tl.constexpr = tl.constexpr(128)  # words that one warp reads at once, 16 bytes a thread
POLLED: tl.constexpr = tl.constexpr(256)  # as many as a block has threads
# Tries of a wait, of which one reads the clock (benchmarks/triton-log.md#reducing-barrier).
CLOCK_EVERY: tl.constexpr = tl.constexpr(16)
RECORD: tl.constexpr = tl.constexpr(16)  # words that say what a block waited for in vain
# Of pairs in bf16 (schedule/wire.py)
PAIR_SCALE: tl.constexpr = tl.constexpr(wire.SCALE[DType.BF16])
PAIR_UNIT: tl.constexpr = tl.constexpr(1 / wire.SCALE[DType.BF16])
PAIR_ROTATION: tl.constexpr = tl.constexpr(wire.PAIR_ROTATION)
FINE_SCALE: tl.constexpr = tl.constexpr(wire.FINE_SCALE)
FINE_UNIT: tl.constexpr = tl.constexpr(1 / wire.FINE_SCALE)
EXPONENT_TOP: tl.constexpr = tl.constexpr(wire.EXPONENT_TOP)
# The stage that waits and the exchange it waits for; an error names a wait by its number here.
WAITS = (
    "attention qkv", "attention splits", "o_proj attention", "o_proj delayed", "o_proj attention_out",
    "down_proj mlp", "down_proj delayed", "down_proj mlp_out", "mix part", "mix y", "lm_head part", "sample all_reduce",
    "sample mask", "sample argmax", "meeting arrivals",
)  # fmt: skip
WAIT_NUMBERS = {reason: i for i, reason in enumerate(WAITS)}


@triton.constexpr_function
def wait_number(reason):
    return WAIT_NUMBERS[reason]


@triton.jit
def index(WORDS: tl.constexpr):
    """0 .. WORDS - 1 as [WORDS / LINE, LINE]: the shape in which vectors meet tiles."""
    WIDE: tl.constexpr = min(WORDS, LINE)
    return tl.arange(0, WORDS // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]


@triton.constexpr_function
def plane_tiles(S):
    """Tensors of each plane of the residual stream, which all stages that read it take in one shape."""
    return S.stages[0].k_tiles


@triton.jit
def plane_index(c: tl.constexpr, S: tl.constexpr):
    """`index` of the words in tensor `c` of a plane of the residual stream."""
    T: tl.constexpr = S.stages[0]  # a value of Triton's own: 3.6 takes no other as an argument
    return index_of(T, c)


@triton.jit
def index_of(T: tl.constexpr, K: tl.constexpr):
    """`index` of the words that meet tile K of a stage."""
    return T.first_word(K) + index(T.widths[K])


@triton.jit
def f16_low(w):
    return (w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def f16_high(w):
    return (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def low(w, S: tl.constexpr):
    """The first 16-bit value of each word, float32."""
    return f16_low(w) if S.f16 else (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(w, S: tl.constexpr):
    """The second 16-bit value of each word, float32."""
    return f16_high(w) if S.f16 else (w & -65536).to(tl.float32, bitcast=True)


@triton.jit
def in_range(x, S: tl.constexpr):
    """x where the model's type holds it, else NaN: an infinity could pass unseen, as a key's that weighs nothing."""
    LEAST: tl.constexpr = 65520.0 if S.f16 else 3.3961775292304957e38  # that rounds to infinity
    return tl.where(tl.abs(x) < LEAST, x, float("nan"))


@triton.jit
def f16_bits(x):
    """float32 rounded to float16, its bits in int32; what that cannot hold is a NaN."""
    x = tl.where(tl.abs(x) < 65520.0, x, float("nan"))
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def half_bits(x, S: tl.constexpr, FINE: tl.constexpr):
    """float32 rounded to the model's 16-bit type, or FINE_SCALE times it to float16, its bits in int32; what float16
    cannot hold is a NaN."""
    if FINE:
        return f16_bits(x * FINE_SCALE)
    elif S.f16:
        return f16_bits(x)
    else:
        b = x.to(tl.int32, bitcast=True)
        nearest = ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where(x != x, 0x7FC0, nearest)


@triton.jit
def rotate_left(w, BY: tl.constexpr):
    w = w.to(tl.uint32, bitcast=True)
    return ((w << BY) | (w >> (32 - BY))).to(tl.int32, bitcast=True)


@triton.constexpr_function
def fine_pairs(S, stage):
    return S.fine_pairs(stage)


@triton.jit
def as_operand(w, S: tl.constexpr, FINE: tl.constexpr):
    """A word as a matrix reads it, without the phase; its values are the pair's times FINE_SCALE, in bfloat16
    PAIR_SCALE."""
    return w & -2 if S.f16 or FINE else rotate_left(w, PAIR_ROTATION) | EXPONENT_TOP


@triton.jit
def with_phase(w, phase):
    """A word, whose lowest bit is free, that says it is fresh; or the word as it is, which nobody waits for."""
    return w if phase is None else w | phase


@triton.jit
def pack_pair(first, second, phase, S: tl.constexpr, FINE: tl.constexpr):
    """Two float32 as a word (schedule/wire.py); what is too large for it is a NaN in float16."""
    if FINE:
        return pack_f16(first * FINE_SCALE, second * FINE_SCALE, phase)
    elif S.f16:
        return pack_f16(first, second, phase)
    else:
        a, b = half_bits(first * PAIR_SCALE, S, False), half_bits(second * PAIR_SCALE, S, False)
        a = tl.where((a & EXPONENT_TOP) != 0, a, a & 0x8000)  # readers set the bit
        w = rotate_left((b << 16) | a, 32 - PAIR_ROTATION) & -2
        return as_operand(w, S, False) if phase is None else w | phase


@triton.jit
def operand_of(w, phase, S: tl.constexpr, FINE: tl.constexpr):
    """`as_operand` of a word that was written with this phase."""
    return w if phase is None else as_operand(w, S, FINE)


@triton.jit
def unscaled(x, S: tl.constexpr, FINE: tl.constexpr):
    """What operands, or sums over them, stand for."""
    if FINE:
        return x * FINE_UNIT
    else:
        return x if S.f16 else x * PAIR_UNIT


@triton.jit
def unpack_pair(w, phase, S: tl.constexpr, FINE: tl.constexpr):
    """The two values of a word, float32."""
    both = operand_of(w, phase, S, FINE)
    if FINE:
        return unscaled(f16_low(both), S, FINE), unscaled(f16_high(both), S, FINE)
    else:
        return unscaled(low(both, S), S, FINE), unscaled(high(both, S), S, FINE)


@triton.jit
def pack_f16(first, second, phase):
    """Two float32 as a word of two float16; what is too large for it is a NaN."""
    a, b = f16_bits(first), f16_bits(second)
    void = (a & 0x7FFF) > 0x7BFE  # the greatest float16 rounds up on 15 bits
    w = ((b << 16) | tl.where(void, 0x7E00, a + ((a >> 1) & 1))) & -2
    return with_phase(w, phase)


@triton.jit
def pack_f32(x, phase):
    return with_phase(tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True)) & -2, phase)


@triton.jit
def unpack_f32(w):
    return (w & -2).to(tl.float32, bitcast=True)


@triton.jit
def nth(values, i):
    """Of a tensor with one dimension."""
    at = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(at == i, values, 0), axis=0)


# ---- polls ----
#
# A poll takes tuples: pointers, masks, and gives words. Triton may repeat a load of fewer elements than threads in a
# second layout, volatile or not, and then use words that no poll has tested. So there are always at least POLLED
# of them: a smaller tensor is read in copies, of which `settle` takes one.


@triton.jit
def load_polled(ptr, mask, wanted, S: tl.constexpr):
    """Words at `ptr` [m, n] that a poll tests, in copies [copies, m, n] if they are few; none misses a masked one."""
    other = wanted if ptr.dtype.element_ty == tl.int32 else wanted << 32
    if ptr.numel >= POLLED:
        return load_shared(ptr, S, mask, other)
    else:
        copy = tl.zeros((POLLED // ptr.numel, 1, 1), tl.int32)
        return load_shared(ptr[None, :, :] + copy, S, mask[None, :, :] & (copy == 0), other)


@triton.jit
def blank(ptr):
    """Zeros in the shape of such words."""
    COPIES: tl.constexpr = (POLLED // ptr.numel, ptr.shape[0], ptr.shape[1])
    return tl.zeros(ptr.shape if ptr.numel >= POLLED else COPIES, ptr.dtype.element_ty)


@triton.jit
def settle(w):
    """The words [m, n] of a poll that has seen them all fresh."""
    return tl.max(w, axis=0) if len(w.shape) == 3 else w


@triton.constexpr_function
def same(shape, other):
    return list(shape) == list(other)


@triton.jit
def missing(ws, wanted):
    """Where any of the tensors lacks what is wanted, 1, else 0: int32 words a phase, int64 ones a number above.

    A tensor for each shape; those of one shape follow each other in `ws`.
    """
    COUNT: tl.constexpr = len(ws)
    if ws[0].dtype == tl.int64:
        return (((ws[0] >> 32) != wanted).to(tl.int32),)
    else:
        found = ()
        lacking = ws[0] ^ wanted
        for i in tl.static_range(1, COUNT):
            if same(ws[i].shape, ws[i - 1].shape):
                lacking = lacking | (ws[i] ^ wanted)
            else:
                found = found + (lacking & 1,)
                lacking = ws[i] ^ wanted
        return found + (lacking & 1,)


@triton.jit
def poll_state(lacking, since, tries, limit, S: tl.constexpr):
    """0 if no word is missing, 1 if the block is to ask again, 2 if a thread that misses one has waited long enough.

    Threads may differ in whether they have, so the block agrees on it too.
    """
    COUNT: tl.constexpr = len(lacking)
    if asks_by_barrier(S):
        state = any_set(lacking, S)
        if (state != 0) & ((tries % CLOCK_EVERY == 0) | (limit == 0)):
            late = expired(since, tries, limit, S)
            state += any_set([wanted * late for wanted in lacking], S)
    else:  # in one maximum
        late = expired(since, tries, limit, S)
        state = tl.max(lacking[0] * (1 + late))
        for i in tl.static_range(1, COUNT):
            state = tl.maximum(state, tl.max(lacking[i] * (1 + late)))
    return state


@triton.jit
def poll(ptrs, masks, wanted, alive, p, S: tl.constexpr):
    """The words at tensors of pointers once none is missing, and 0; or as they are when the time is up, and 2."""
    COUNT: tl.constexpr = len(ptrs)
    if wanted is None:
        ws = ()
        for i in tl.static_range(COUNT):
            ws = ws + (load_polled(ptrs[i], masks[i], 0, S),)
        return ws, alive * 0
    else:
        ws = [blank(ptr) for ptr in ptrs]
        since, tries, state = ticks(S), alive * 0, alive * 0 + 1
        while state == 1:
            ws = ()
            for i in tl.static_range(COUNT):
                ws = ws + (load_polled(ptrs[i], masks[i], wanted, S),)
            tries += 1
            state = poll_state(missing(ws, wanted), since, tries, p.limit * alive, S)
        return ws, state


@triton.jit
def poll_on(w, ptr, mask, wanted, alive, p, S: tl.constexpr):
    """As `poll`, of one tensor whose words `w` were asked for before."""
    since, tries = ticks(S), alive * 0
    state = uniform(poll_state(missing((w,), wanted), since, tries, p.limit * alive, S), S)
    while state == 1:
        w = load_polled(ptr, mask, wanted, S)
        tries += 1
        state = poll_state(missing((w,), wanted), since, tries, p.limit, S)
    return w, state


# ---- waits ----


@triton.jit
def wait_all(ptrs, masks, base, count, phase, alive, reason: tl.constexpr, layer, p, S: tl.constexpr):
    """The words at tensors of pointers, some of the `count` from `base` on, once all carry `phase`; and alive."""
    ws, bad = poll(ptrs, masks, phase, alive, p, S)
    if (bad != 0) & (alive != 0):
        record_timeout(base, count, phase, reason, layer, p)
    return ws, tl.where(bad != 0, 0, alive)


@triton.jit
def wait_tagged(ptr, mask, number, alive, reason: tl.constexpr, p, S: tl.constexpr):
    """int64 words once all carry `number` in their upper halves: the lower ones, zero where masked, and alive."""
    ws, bad = poll((ptr,), (mask,), number.to(tl.int64), alive, p, S)
    if (bad != 0) & (alive != 0):
        record_timeout(p.words, 0, number, reason, 0, p)
    return ws[0] & 0xFFFFFFFF, tl.where(bad != 0, 0, alive)


@triton.jit
def wait_planes(base, phase, alive, reason: tl.constexpr, layer, p, S: tl.constexpr):
    """The planes of a vector as wide as the residual stream, once all its words carry `phase`."""
    HALF: tl.constexpr = S.hidden_size // 2
    ptrs, masks = (), ()
    for c in tl.static_range(plane_tiles(S)):
        j = plane_index(c, S)
        ptrs = ptrs + (base + j, base + HALF + j)
        masks = masks + (j < HALF, j < HALF)
    ws, alive = wait_all(ptrs, masks, base, 2 * HALF, phase, alive, reason, layer, p, S)
    return [settle(w) for w in ws], alive


@triton.jit
def wait_pair_words(base, phase, alive, reason: tl.constexpr, layer, p, S: tl.constexpr, T: tl.constexpr):
    """Words of a vector that stage T reads once all carry `phase`, as its tiles meet them; more are anything."""
    K_TILES: tl.constexpr = T.k_tiles
    COUNT: tl.constexpr = T.cols // 2
    ptrs, masks = (), ()
    for c in tl.static_range(K_TILES):
        j = index_of(T, c)
        ptrs, masks = ptrs + (base + j,), masks + (j < COUNT,)
    ws, alive = wait_all(ptrs, masks, base, COUNT, phase, alive, reason, layer, p, S)
    return [settle(w) for w in ws], alive


@triton.jit
def wait_pairs(base, phase, alive, reason: tl.constexpr, layer, p, S: tl.constexpr, STAGE: tl.constexpr):
    """Such words as operands of STAGE's tiles, zeros after the last."""
    T: tl.constexpr = S.stages[STAGE]
    FINE: tl.constexpr = fine_pairs(S, STAGE)
    ws, alive = wait_pair_words(base, phase, alive, reason, layer, p, S, T)
    K_TILES: tl.constexpr = T.k_tiles
    xs = ()
    for c in tl.static_range(K_TILES):
        xs = xs + (tl.where(index_of(T, c) < T.cols // 2, operand_of(ws[c], phase, S, FINE), 0),)
    return xs, alive


# ---- what an expired wait says ----


@triton.jit
def timeout_record(p):
    """Where this block writes down its wait."""
    return p.error + RECORD * (tl.program_id(0) + 1)


@triton.jit
def offset(base, p):
    return ((base.to(tl.int64) - p.words.to(tl.int64)) >> 2).to(tl.int32)


@triton.jit
def record_timeout(base, count, wanted, reason: tl.constexpr, layer, p):
    """Write down that of `count` words from `base` on some did not come in time."""
    NUMBER: tl.constexpr = wait_number(reason)
    own = timeout_record(p)
    tl.atomic_cas(p.error, 0, tl.program_id(0) + 1)
    tl.store(own, NUMBER)
    tl.store(own + 1, layer)
    if wanted is not None:
        tl.store(own + 2, wanted)
    tl.store(own + 5, offset(base, p))
    tl.store(own + 6, count)


@triton.jit
def record_more(base, count, stride, runs, p):
    """Write down more words of that wait: `runs` runs of `count` words from `base` on, `stride` words apart."""
    own = timeout_record(p)
    tl.store(own + 7, offset(base, p))
    tl.store(own + 8, count)
    tl.store(own + 9, stride)
    tl.store(own + 10, runs)


@triton.jit
def diagnose_timeout(p, S: tl.constexpr):
    """Find a word that this block still misses. Done when the kernel leaves: beside a wait, registers are dear."""
    own = timeout_record(p)
    meet(S)  # one thread wrote the record
    wanted = tl.load(own + 2)
    first = tl.load(own + 5)
    find_missing(own, first, tl.load(own + 6), wanted, p, S)
    for run in range(tl.load(own + 10)):
        at = tl.load(own + 7) + run * tl.load(own + 9)
        find_missing(own, at, tl.load(own + 8), wanted, p, S)


@triton.jit
def find_missing(own, first, count, wanted, p, S: tl.constexpr):
    """Into the record: a word of [first, first + count) that lacks the phase, its index plus one, and its bits."""
    for i in range(first, first + count):
        w = load_uncached(p.words + i, S)
        if (w ^ wanted) & 1:
            tl.store(own + 3, i + 1)
            tl.store(own + 4, w)


@triton.jit
def publish_pairs(base, row, value, rows, phase, S: tl.constexpr, COLUMNS: tl.constexpr, FINE: tl.constexpr):
    """Values of rows `row` on (row even), before row `rows`, as words of two, of every column."""
    PAIRS: tl.constexpr = value.numel // 2
    first, second = tl.split(tl.reshape(value, (PAIRS, 2)))
    i, column = in_columns(PAIRS // COLUMNS, COLUMNS)
    j = row // 2 + i
    to = base + column * S.total_words + j
    store_shared(to, pack_pair(first, second, phase, S, FINE), 2 * j < rows)


@triton.jit
def in_columns(N: tl.constexpr, COLUMNS: tl.constexpr):
    """Of COLUMNS * N values, one column's after the other's: the place in a column, and the column."""
    i = tl.arange(0, COLUMNS * N)
    if COLUMNS == 1:
        return i, 0
    else:
        return i % N, i // N
