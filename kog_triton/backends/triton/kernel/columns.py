"""The matrices of a chunk of a prompt: x [columns, K] times rows of weights, each read once for all columns.

Weights are the tiles that one token streams (matvec.py), here read as a row of 16-bit values wherever it stands; narrow
ones become such values on the way, rounded as the library has them (host/matrices.py).

All blocks of a lane share its chunk, a row a token. Blocks own rows of a matrix as they do for one token; where that
is few (o_proj, down_proj), `parts` of them take their rows together and a part of K each: a block then reads fewer of
the vectors, which for many tokens are more bytes than its weights.

    chunk       float32: `stream` x, `qkv` as it left the matrix, `out` the parts of the modules' outputs
    half_chunk  16 bits: `x` normed, `attention` and `mlp`, as wide as the tiles that they meet, zero after the end
"""

from typing import Any

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.codes import shape_of, values_of
from kog_triton.backends.triton.kernel.residual import biased, silu, stage_input
from kog_triton.backends.triton.kernel.sync import dot
from kog_triton.backends.triton.kernel.words import in_range

# ---- how the work is divided, and where vectors stand ----

MOST_ROWS = 128  # of a matrix multiplied at once, at most
SHARED_ROWS = 64  # of the blocks that share theirs
WIRED = (1, 3)  # o_proj and down_proj


@triton.constexpr_function
def width(S: Any, stage: int) -> int:
    """Of a vector that the stage reads, padded."""
    return 2 * S.stages[stage].row_words


@triton.constexpr_function
def parts(S: Any, stage: int) -> int:
    """Blocks of a lane that share their rows of a stage."""
    if stage not in WIRED:
        return 1
    rows = S.stages[stage].block_rows
    fitting = (n for n in range(1, S.group + 1) if S.group % n == 0 and n * rows <= SHARED_ROWS)
    return max(fitting, default=1)


@triton.constexpr_function
def span(S: Any, stage: int) -> int:
    """Rows of the blocks that share theirs."""
    return parts(S, stage) * S.stages[stage].block_rows


@triton.constexpr_function
def row_tile(S: Any, stage: int) -> int:
    """Rows multiplied at once: each time all vectors are read again."""
    return min(max(16, triton.next_power_of_2(span(S, stage))), MOST_ROWS)


@triton.constexpr_function
def step(S: Any, stage: int) -> int:
    """Values along K multiplied at once; a tile holds a whole number of steps."""
    values = 2 * S.stages[stage].widths[-1]
    while values > 64 and 2 * values * (row_tile(S, stage) + S.columns) > S.sizes.step_bytes:
        values //= 2
    return values


@triton.constexpr_function
def runs(S: Any, stage: int) -> list[tuple[int, int]]:
    """Tiles along K in runs of one width: the first of each, and the values of a row before it."""
    return [(k, 2 * S.stages[stage].first_word(k)) for k, _ in S.stages[stage].runs]


@triton.constexpr_function
def tile_values(S: Any, stage: int, k: int) -> tuple[int, int, int, int, int]:
    """Of tile k along K: values (of codes words) before all blocks' tiles of the first unit, from one unit to the next,
    from one tile along K to the next one as wide, from a block to the next, and from a row to the next."""
    T = S.stages[stage]
    first, step = T.begins(k)
    size, each = T.tile_words(k), 1 if T.is_narrow else 2
    width = size * (T.units if T.wired else 1)
    begins, units, along = (each * words * S.num_blocks for words in (first, step, width))
    return each * T.offset + begins, units, along, each * size, each * T.stored_width(k)


# ---- where vectors stand ----

READERS = {"x": 0, "attention": 1, "mlp": 3}  # the stage that reads vectors of `half_chunk`


@triton.constexpr_function
def reader(name: str) -> int:
    return READERS[name]


@triton.constexpr_function
def max_parts(S: Any) -> int:
    return max(parts(S, stage) for stage in WIRED)


@triton.constexpr_function
def scratch(S: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes in values, in order: of `chunk`, of `half_chunk`."""
    rows = S.lanes * S.columns
    outs = 2 * (S.delay + 1) * max_parts(S)
    floats = {"stream": rows * S.hidden_size, "qkv": rows * S.stages[0].rows, "out": outs * rows * S.hidden_size}
    return floats, {name: rows * width(S, READERS[name]) for name in READERS}


@triton.constexpr_function
def begins(S: Any, name: str) -> int:
    """Where a region begins in its tensor."""
    (sizes,) = (s for s in scratch(S) if name in s)
    names = list(sizes)
    return sum(sizes[n] for n in names[: names.index(name)])


def scratch_sizes(tiles: Any) -> tuple[int, int]:
    """Values of `chunk` and of `half_chunk`."""
    floats, halves = scratch(tiles)
    return sum(floats.values()), sum(halves.values())


# ---- products ----


@triton.jit
def vectors(name: tl.constexpr, lane, t, p, S: tl.constexpr):
    """Where vector `t` of a lane begins in a region of `half_chunk`."""
    AT: tl.constexpr = begins(S, name)
    WIDTH: tl.constexpr = width(S, reader(name))
    return p.half_chunk + AT + lane * (S.columns * WIDTH) + t * WIDTH


@triton.jit
def step_at(row, k, lane, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Where a step's weights [M, n] of rows [M] stand, value k behind tile K being the first, from the layer's first
    weight on: a row goes on in the next tile along K. Of codes, then their scales [M, groups] and zero points."""
    T: tl.constexpr = S.stages[STAGE]
    VALUES: tl.constexpr = tile_values(S, STAGE, K)
    WIDTH: tl.constexpr = 2 * T.widths[K]
    STEP: tl.constexpr = step(S, STAGE)
    owner, inner = row // T.block_rows, row % T.block_rows
    unit, r = inner // T.tile_rows, inner % T.tile_rows  # r: which row of its tile
    tile = VALUES[0] + (lane * S.group + owner) * VALUES[3] + unit * VALUES[1]
    if T.is_narrow:
        SHAPE: tl.constexpr = shape_of(T, K)
        GROUPS: tl.constexpr = T.codes.groups(WIDTH // 2)
        WARPS: tl.constexpr = min(T.tile_rows, S.sizes.warps)
        tile += k // WIDTH * VALUES[2]
        i = tl.arange(0, STEP // (2 * T.pack))
        # A thread's run of K goes on in the next line.
        thread = k % WIDTH // (WIDTH // SHAPE[1]) + i // (4 * SHAPE[0])
        word = (i // 4 % SHAPE[0] * SHAPE[1] + thread) * 4 + i % 4
        group = k % WIDTH // (WIDTH // GROUPS) + tl.arange(0, step_groups(S, STAGE))
        beside = (r % WARPS * GROUPS)[:, None] + group[None, :]
        beside = beside * (T.tile_rows // WARPS) + (r // WARPS)[:, None]
        codes = (tile + r * VALUES[4])[:, None] + word[None, :]
        scales = tile[:, None] + T.tile_rows * VALUES[4] + beside
        return codes, scales, scales + T.tile_rows * GROUPS
    else:
        at = k // WIDTH * VALUES[2] + k % WIDTH
        # Otherwise unknown to the compiler, which then loads value by value, and not ahead.
        at = tile + r * VALUES[4] + tl.multiple_of(at, STEP)
        return (at[:, None] + tl.arange(0, STEP)[None, :],)


@triton.constexpr_function
def step_groups(S, stage):
    """Of a step's codes in a row, groups that share a scale."""
    group = S.stages[stage].codes.group
    return max(1, step(S, stage) // group) if group else 1


@triton.jit
def weights_at(row, k, lane, S: tl.constexpr, STAGE: tl.constexpr):
    """`step_at` of value k of the rows."""
    RUNS: tl.constexpr = runs(S, STAGE)
    at = step_at(row, k, lane, S, STAGE, 0)
    for run in tl.static_range(1, len(RUNS)):
        here = step_at(row, k - RUNS[run][1], lane, S, STAGE, RUNS[run][0])
        either = ()
        for i in tl.static_range(len(at)):
            either = either + (tl.where(k < RUNS[run][1], at[i], here[i]),)
        at = either
    return at


@triton.jit
def load_weights(base, row, owned, k, lane, S: tl.constexpr, STAGE: tl.constexpr):
    """Weights [M, values of a step] of rows from value k on: of 16 bits, or of codes in float32, which the caller
    rounds; zeros of rows that are not `owned`."""
    T: tl.constexpr = S.stages[STAGE]
    at = weights_at(row, k, lane, S, STAGE)
    ws = tl.load(base + at[0], mask=owned[:, None], other=0, eviction_policy="evict_first")
    if not T.is_narrow:
        return ws
    else:
        M: tl.constexpr = row_tile(S, STAGE)
        GROUPS: tl.constexpr = step_groups(S, STAGE)
        values = tl.reshape(values_of(ws, T), (M, GROUPS, step(S, STAGE) // GROUPS))
        if T.codes.zero_points:
            values -= load_floats(base + at[2], owned)
        values *= load_floats(base + at[1], owned)
        return tl.reshape(values, (M, step(S, STAGE)))


@triton.jit
def load_floats(ptr, owned):
    """Scales or zero points of the groups of rows, [M, groups, 1]."""
    words = tl.load(ptr, mask=owned[:, None], other=0)
    return tl.expand_dims(words.to(tl.float32, bitcast=True), 2)


@triton.jit
def product(x, base, row, owned, lane, part, S: tl.constexpr, STAGE: tl.constexpr):
    """x times the stage's rows `row` [M], those `owned`, over one part of K: float32 [columns, M].

    `base` is the layer's first weight, x the first of `columns` vectors.
    """
    M: tl.constexpr = row_tile(S, STAGE)
    STEP: tl.constexpr = step(S, STAGE)
    WIDTH: tl.constexpr = width(S, STAGE)
    STEPS: tl.constexpr = WIDTH // STEP
    PARTS: tl.constexpr = parts(S, STAGE)
    COLUMNS: tl.constexpr = S.columns
    t, k = tl.arange(0, COLUMNS), tl.arange(0, STEP)
    total = tl.zeros((COLUMNS, M), tl.float32)
    first, last = part * STEPS // PARTS, (part + 1) * STEPS // PARTS
    for i in tl.range(first, last, num_stages=S.sizes.steps):
        at = i * STEP
        xs = tl.load(x + t[:, None] * WIDTH + at + k[None, :])
        ws = load_weights(base, row, owned, at, lane, S, STAGE)
        total = dot(xs, tl.trans(ws.to(xs.dtype)), S, total)
    return total


@triton.jit
def multiply(layer, count, p, S: tl.constexpr, STAGE: tl.constexpr, STORE: tl.constexpr):
    """The block's rows of a stage for all columns, each tile of rows handed to STORE: y [columns, M], row, owned .."""
    T: tl.constexpr = S.stages[STAGE]
    M: tl.constexpr = row_tile(S, STAGE)
    SPAN: tl.constexpr = span(S, STAGE)
    TILES: tl.constexpr = (SPAN + M - 1) // M
    PARTS: tl.constexpr = parts(S, STAGE)
    x = vectors(stage_input(STAGE), p.lane, 0, p, S)
    first = (layer + tl.zeros((), tl.int64)) * S.layer_words
    base = p.weights + first if T.is_narrow else p.half_weights + 2 * first
    part = p.group_index % PARTS
    for tile in range(TILES):
        m = tile * M + tl.arange(0, M)
        row = p.group_index // PARTS * SPAN + m
        owned = (m < SPAN) & (row < T.rows)
        y = product(x, base, row, owned, p.lane, part, S, STAGE)
        STORE(y, row, owned, part, layer, count, p, S, STAGE)


@triton.jit
def here(count, S: tl.constexpr):
    """[columns, 1]: the columns, and which of them hold a token."""
    t = tl.arange(0, S.columns)[:, None]
    return t, t < count


# ---- what becomes of a product ----


@triton.jit
def store_qkv(y, row, owned, part, layer, count, p, S: tl.constexpr, STAGE: tl.constexpr):
    ROWS: tl.constexpr = S.stages[0].rows
    AT: tl.constexpr = begins(S, "qkv")
    y = biased(y, row, owned, p.lane, layer, p, S, STAGE)
    t, valid = here(count, S)
    to = p.chunk + AT + p.lane * (S.columns * ROWS) + t * ROWS + row[None, :]
    tl.store(to, y, mask=valid & owned[None, :])


@triton.jit
def store_gated(y, row, owned, part, layer, count, p, S: tl.constexpr, STAGE: tl.constexpr):
    """silu(gate) * up of woven rows: gate, up, gate, up."""
    M: tl.constexpr = row_tile(S, STAGE)
    COLUMNS: tl.constexpr = S.columns
    y = biased(y, row, owned, p.lane, layer, p, S, STAGE)
    gate, up = tl.split(tl.reshape(y, (COLUMNS, M // 2, 2)))
    h = in_range(silu(gate) * up, S)
    gate_row, _ = tl.split(tl.reshape(row, (M // 2, 2)))
    t, valid = here(count, S)
    to = vectors("mlp", p.lane, t, p, S) + (gate_row // 2)[None, :]
    own, _ = tl.split(tl.reshape(owned.to(tl.int32), (M // 2, 2)))
    tl.store(to, h.to(p.half_chunk.dtype.element_ty), mask=valid & (own != 0)[None, :])


@triton.jit
def out_rows(layer, part, lane, p, S: tl.constexpr, STAGE: tl.constexpr):
    """The rows of a part of a module's output, float32 [columns, hidden]; `delay` layers back they still stand."""
    AT: tl.constexpr = begins(S, "out")
    PARTS: tl.constexpr = max_parts(S)
    ring = STAGE // 2 * (S.delay + 1) + layer % (S.delay + 1)
    return p.chunk + AT + ((ring * PARTS + part) * S.lanes + lane) * (S.columns * S.hidden_size)


@triton.jit
def store_out(y, row, owned, part, layer, count, p, S: tl.constexpr, STAGE: tl.constexpr):
    """One part of the sum over K; who adds the parts adds the bias."""
    t, valid = here(count, S)
    to = out_rows(layer, part, p.lane, p, S, STAGE) + t * S.hidden_size + row[None, :]
    tl.store(to, y, mask=valid & owned[None, :])
