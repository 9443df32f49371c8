"""What lies between the matrix products of a prefill pass, in one Triton kernel each.

    normed   x += o, then x / rms(x) * gain in the products' type     one program a token and lane
    rotated  q | k | v: norms of heads, RoPE, keys and values to the cache          likewise; where, the host
             says, or words of the device (suffixes.py)
    gated    silu(gate) * up                                              a token's part each

torch's own operations (forward.py) make the same numbers in two to six kernels each, of
which a prompt of 32 tokens spends half its time in. Sums are float32 and results are rounded once.
Shapes: see weights.py.
"""

# mypy: ignore-errors
# Device code is not Python: Triton's compiler, or its interpreter in the tests, checks its types.

from functools import partial

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
GATED = 1024  # values of a program


@triton.jit(do_not_specialize=["tokens"])
def norm_kernel(x, o, gain, y, tokens, width, gain_step, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    if ADD:
        value += tl.load(o + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * width + at, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    own = tl.load(gain + row // tokens * gain_step + at, mask=inside, other=0.0)
    tl.store(y + row * width + at, (value * scale * own).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate_up, h, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    pair = gate_up + (row * width + at) * 2
    gate = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pair + 1, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + row * width + at, (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "tokens"])
def rotate_kernel(
    qkv, norms, rope, q, cache, words, first, tokens, eps,
    lane_step, head_step, kind_step, position_step,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    TOLD: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """A head's halves a and b rotate to a cos - b sin and a sin + b cos. TOLD: `words` tell how many tokens are no
    padding, the first one's position, and the slot's first row among those of `cache`."""
    row = tl.program_id(0).to(tl.int64)
    real = True
    if TOLD:
        real = row < tl.load(words)
        first = tl.load(words + 1)
        cache += tl.load(words + 2) * position_step
    position = first + row % tokens
    own = qkv + row * (HEADS + 2 * KV_HEADS) * 2 * HALF
    home = cache + row // tokens * lane_step + position * position_step
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    j = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS + KV_HEADS) & (j < HALF) & real
    at = head * 2 * HALF + j
    a = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(own + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        a *= scale * tl.load(norms + at, mask=inside, other=0.0)
        b *= scale * tl.load(norms + at + HALF, mask=inside, other=0.0)
    angles = rope + position * 2 * HALF + j
    cos = tl.load(angles, mask=(j < HALF) & real, other=0.0)
    sin = tl.load(angles + HALF, mask=(j < HALF) & real, other=0.0)
    low, high = a * cos - b * sin, a * sin + b * cos
    asked = inside & (head < HEADS)
    to = q + row * HEADS * 2 * HALF + at
    tl.store(to, low.to(q.dtype.element_ty), mask=asked)
    tl.store(to + HALF, high.to(q.dtype.element_ty), mask=asked)
    key = inside & (head >= HEADS)
    to = home + (head - HEADS) * head_step + j
    tl.store(to, low.to(cache.dtype.element_ty), mask=key)
    tl.store(to + HALF, high.to(cache.dtype.element_ty), mask=key)
    head = tl.arange(0, BLOCK_KV)[:, None]
    j = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    inside = (head < KV_HEADS) & (j < 2 * HALF) & real
    value = tl.load(own + (HEADS + KV_HEADS + head) * 2 * HALF + j, mask=inside, other=0.0)
    tl.store(home + head * head_step + kind_step + j, value, mask=inside)


def launch(kernel, grid):
    """What a kernel is called by; `only_compile` is the other."""
    return kernel[grid]


def only_compile(kernel, grid):
    """For arguments of the types, alignment and sizes that a launch will have; tensors may be meta ones."""
    return partial(kernel.warmup, grid=grid)


def normed(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype, o: Tensor | None, call=launch) -> Tensor:
    """Add o [S, T, hidden], if any, to x in place; x / rms(x) * gain in `dtype`."""
    lanes, tokens, width = x.shape
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    call(norm_kernel, (lanes * tokens,))(
        x, x if o is None else o.contiguous(), gain, y, tokens, width,
        width if len(gain) > 1 else 0, eps,
        ADD=o is not None, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return y


def gated(gate_up: Tensor, call=launch) -> Tensor:
    """[S, T, 2 F], gate and up side by side, to [S, T, F]."""
    lanes, tokens, width = gate_up.shape
    h = gate_up.new_empty(lanes, tokens, width // 2)
    grid = (lanes * tokens, triton.cdiv(width // 2, GATED))
    call(gate_kernel, grid)(gate_up, h, width // 2, BLOCK=GATED)
    return h


def rotated(
    qkv: Tensor,
    norms: Tensor | None,
    rope: Tensor,
    eps: float,
    first: int,
    cache: Tensor,
    words: Tensor | None = None,
    call=launch,
) -> Tensor:
    """Queries [S, H, T, d]; keys, values of positions from `first` on go to cache [S, K, 2, n, d].

    words  of a suffix, one lane: say where instead of `first`; `cache` is the first slot's; padding gets no queries
    """
    lanes, tokens, width = qkv.shape
    kv, d = cache.shape[1], cache.shape[-1]
    heads = width // d - 2 * kv
    q = qkv.new_empty(lanes, tokens, heads, d)
    lane_step, head_step, kind_step, position_step, _ = cache.stride()
    call(rotate_kernel, (lanes * tokens,))(
        qkv, qkv if norms is None else norms, rope, q, cache,
        qkv if words is None else words, first, tokens,
        eps, lane_step, head_step, kind_step, position_step,
        HEADS=heads, KV_HEADS=kv, HALF=d // 2, NORMED=norms is not None,
        TOLD=words is not None, BLOCK_HEADS=triton.next_power_of_2(heads + kv), BLOCK_KV=triton.next_power_of_2(kv),
        BLOCK_HALF=triton.next_power_of_2(d // 2),
    )  # fmt: skip
    return q.transpose(1, 2)
