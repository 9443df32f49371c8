"""The weight stream: each tile is multiplied while those after it are on their way, one large one or several small.

    wired    stages whose input arrives in words (o_proj, down_proj): all row tiles at one place of K, then at the next
    rowwise  stages that read the residual stream (qkv_proj, gate_up_proj, lm_head): row tile by row tile

The order of tiles is static (schedule/triton.py), so a stage's last tiles ask for the next stage's first, which are on
their way while the block publishes, waits and gathers. A tile is known by its row tile (unit) and its place k along K.
`stream` goes from stage to stage:

    base     first word of the layer's matrices, or of the head's
    behind   likewise, of what comes behind them: the next layer, the head, or the next token's first layer
    fetched  tiles that were asked for, in their order: as many as the stage that is next has `ahead`
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.codes import (
    LINES_AXIS,
    for_rows,
    load_parts,
    parts_of,
    sets_of,
    shape_of,
    split_lines,
    stacked,
    sums_of_codes,
    sums_of_parts,
    with_scales,
)
from kog_triton.backends.triton.kernel.sync import load_once, pin, pin_address
from kog_triton.backends.triton.kernel.words import LINE, fine_pairs, high, index_of, low, unscaled
from kog_triton.schedule.triton import StageTiles, Tiles

# Words of x that every warp keeps a copy of through a stage that walks row by row; more are spread tile by tile.
# Laneformer-2B (1,536 words) with 1,024 here: 728 tokens/s, not 745; Qwen3-8B (2,048) 232, not 235 (one H200).
HELD_WORDS: tl.constexpr = tl.constexpr(2048)
# Iterations of the loop over a shared step's columns, of 16-bit weights: columns of one iteration are written out, with
# weights unpacked once for them. Without a loop the compiler keeps operands of all of them at once (1B of four columns
# on sm_90: 1,672 bytes of stack).
COLUMN_LOOP: tl.constexpr = tl.constexpr(2)
# Columns of an iteration of narrow weights, at most: four took 232 bytes of stack, and 337 s to compile for 179
# (benchmarks/triton-log.md#narrow-columns).
NARROW_COLUMNS: tl.constexpr = tl.constexpr(2)

asked_by = triton.constexpr_function(Tiles.asked_by)
place = triton.constexpr_function(StageTiles.place)


@triton.constexpr_function
def loop_iterations(S, stage, k):
    """Iterations of the loop over the tiles of K tile `k` in which all ask for tiles as wide, of their own stage."""
    tiling = S.stages[stage]
    if not tiling.loop_units:
        return 0
    last = tiling.widths[k + 1 : k + 2] != tiling.widths[k : k + 1]
    return (tiling.units - last) // tiling.loop_units


@triton.constexpr_function
def begins(S, stage, k):
    """Words of the arena before all blocks' tiles k of the first unit, and from one unit's to the next one's."""
    T = S.stages[stage]
    first, step = T.begins(k)
    return T.offset + first * S.num_blocks, step * S.num_blocks


@triton.constexpr_function
def sums_width(S, stage, k=0):
    """Sums of a row that threads keep: those of tile k."""
    T = S.stages[stage]
    return split_lines(S, T, k) * min(T.stored_width(k), LINE.value) // 4


@triton.constexpr_function
def narrow(S, stage, k):
    """Whether fewer threads have sums of tile k than of the first one: it is summed to the end at once."""
    return sums_width(S, stage, k) < sums_width(S, stage)


@triton.jit
def either(condition, first, second):
    """Pointer `first` or `second`, where matrices begin: aligned, or Triton loads weights for AMD word by word."""
    chosen = tl.where(condition, first.to(tl.int64), second.to(tl.int64)).to(first.dtype)
    return tl.multiple_of(chosen, 16)


@triton.jit
def load_tile(base, unit, p, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Words of one tile, of which lines [width / LINE] are LINES_AXIS and rows the other axis before [LINE].

    A warp has rows of its own: a row's sum needs few shuffles and no shared memory. `base` is the layer's
    (or the head's) first word. Of narrow weights a tuple (codes.py).
    """
    T: tl.constexpr = S.stages[STAGE]
    ROWS: tl.constexpr = T.tile_rows
    WORDS: tl.constexpr = T.stored_width(K)
    SIZE: tl.constexpr = T.tile_words(K)
    WIDE: tl.constexpr = min(WORDS, LINE)
    BEGINS: tl.constexpr = begins(S, STAGE, K)
    r, k, c = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WORDS // WIDE)
    if LINES_AXIS == 1:
        offset = r[:, None, None] * WORDS + c[None, :, None] * WIDE + k[None, None, :]
    else:
        offset = r[None, :, None] * WORDS + c[:, None, None] * WIDE + k[None, None, :]
    at = BEGINS[0] + unit * BEGINS[1] + p.block * SIZE
    ptr = pin_address(base + at, S)
    if T.is_narrow:
        return with_scales(load_once(ptr + offset, S), ptr, S, T, K)
    else:
        return load_once(ptr + offset, S)


@triton.jit
def load_tiles(base, unit, p, S: tl.constexpr, STAGE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """A tuple of the tiles from FIRST on in the stage's order, if `unit` is taken for the first one."""
    T: tl.constexpr = S.stages[STAGE]
    tiles = ()
    for i in tl.static_range(COUNT):
        at = unit + place(T, FIRST + i)[0]
        tiles = tiles + (load_tile(base, at, p, S, STAGE, place(T, FIRST + i)[1]),)
    return tiles


@triton.jit
def first_tiles(base, p, S: tl.constexpr, STAGE: tl.constexpr):
    """What is `fetched` where a stage begins."""
    return load_tiles(base, 0, p, S, STAGE, 0, S.stages[STAGE].ahead)


@triton.jit
def fetch(stream, p, S: tl.constexpr, STAGE: tl.constexpr, TILE: tl.constexpr):
    """Tiles that are asked for behind TILE of STAGE; of qkv_proj, behind down_proj or lm_head, at stream's `behind`."""
    base, behind, _ = stream
    ASKED: tl.constexpr = asked_by(S, STAGE, TILE)
    return load_tiles(behind if ASKED[3] else base, 0, p, S, ASKED[0], ASKED[1], ASKED[2])


@triton.jit
def fetch_behind(base, unit, p, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Tiles that are asked for behind tile K of a unit which many follow."""
    FIRST: tl.constexpr = S.stages[STAGE].asked_before(K, True)
    COUNT: tl.constexpr = S.stages[STAGE].asked_before(K + 1, True) - FIRST
    return load_tiles(base, unit, p, S, STAGE, FIRST, COUNT)


@triton.jit
def load_operands(xs, column, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Operands of a column in memory that meet tile K, with a copy for every warp that has rows of its own.

    As a tile, with the copies in place of its rows: each warp loads what it multiplies.
    """
    T: tl.constexpr = S.stages[STAGE]
    COPIES: tl.constexpr = min(T.tile_rows, S.sizes.warps)
    COUNT: tl.constexpr = T.cols // 2
    xs += column * S.total_words
    if T.is_narrow:
        return load_parts(xs + T.operands_before(K), S, T, K)
    else:
        j = tl.expand_dims(index_of(T, K), 1 - LINES_AXIS)
        copy = tl.expand_dims(tl.expand_dims(tl.arange(0, COPIES), LINES_AXIS), 2)
        at = xs + j + copy * 0
        if T.first_word(K) + T.widths[K] > COUNT:
            return tl.load(at, mask=(j < COUNT) & (copy >= 0), other=0)
        else:
            return tl.load(at)


@triton.jit
def multiply(w, x, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Products of tile K and words x, as far as a thread can sum them alone, [tile_rows, parts of them], and what they
    are to be multiplied by: a tuple of one or both."""
    T: tl.constexpr = S.stages[STAGE]
    PARTS: tl.constexpr = split_lines(S, T, K)
    if T.is_narrow:
        sums, factor = sums_of_codes(w, x, S, T, K)
        factor = tl.broadcast_to(factor, sums.shape)
        # Lines that are added have factors of their own.
        if sets_of(T, K) > 1 and shape_of(T, K)[0] > PARTS:
            return (by_thread(rounded_product(sums, factor), PARTS),)
        else:
            return by_thread(sums, PARTS), by_thread(factor, PARTS)
    else:
        x = for_rows(x, T.tile_rows)
        both = tl.join(low(w, S) * low(x, S), high(w, S) * high(x, S))
        # Eight products of a thread in a row, each added to the sum of those before it by one instruction.
        SHAPE: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 8)
        return (by_thread(tl.sum(tl.reshape(both, SHAPE), axis=3), PARTS),)


@triton.jit
def rounded_product(a, b):
    """a * b, of one shape, rounded. Of two products that are added the compiler may fuse either with the sum: a kernel
    of one request and one of several would then differ in their last bits."""
    return tl.fma(a, b, tl.zeros_like(a))


@triton.jit
def by_thread(sums, PARTS: tl.constexpr):
    """Sums of lines, added up for each of PARTS: [tile_rows, parts of a row]."""
    if PARTS == 1:
        return tl.sum(sums, axis=LINES_AXIS)
    else:
        sums = sums_of_parts(sums, PARTS, LINES_AXIS)
        if LINES_AXIS == 0:
            sums = tl.trans(sums, (1, 0, 2))
        return tl.reshape(sums, (sums.shape[0], PARTS * sums.shape[2]))


# ---- sums of rows: a tuple of tensors, one a column; those that are next to grow stand first, then they go last ----


@triton.jit
def no_sums(S: tl.constexpr, STAGE: tl.constexpr, COUNT: tl.constexpr):
    """Zeros for so many row tiles or columns: sums [tile_rows, parts], and those of narrow tiles apart, [tile_rows]."""
    ROWS: tl.constexpr = S.stages[STAGE].tile_rows
    WIDE: tl.constexpr = sums_width(S, STAGE)
    sums, rests = (), ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((ROWS, WIDE), tl.float32),)
        rests = rests + (tl.zeros((ROWS,), tl.float32),)
    return sums, rests


@triton.jit
def add_part(sums, rests, w, x, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """The sums with one column's part of its tile K, which the first K tile starts anew."""
    parts = multiply(w, x, S, STAGE, K)
    part, total, rest = parts[0], sums[0], rests[0]
    if K > 0 and not narrow(S, STAGE, K) and len(parts) == 2:
        total = tl.fma(part, parts[1], total)  # fused by name: see rounded_product
    else:
        if len(parts) == 2:
            part = rounded_product(part, parts[1])
        if K == 0:
            total = part
        elif narrow(S, STAGE, K):
            part = tl.sum(part, axis=1)
            if narrow(S, STAGE, K - 1):
                part += rest
            rest = part
        else:
            total += part
    return sums[1:] + (total,), rests[1:] + (rest,)


@triton.jit
def kept(x, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Words x that meet tile K, in the layout that they keep; of narrow weights a tuple (codes.py)."""
    T: tl.constexpr = S.stages[STAGE]  # a value of Triton's own: 3.6 takes no other as an argument
    if T.is_narrow:
        return parts_of(x, S, T, K)
    else:
        return pin(x, S)


@triton.jit
def operands(xs, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """One column's operands that meet tile K, in the layout that they keep; of more, which lie in memory, xs."""
    T: tl.constexpr = S.stages[STAGE]
    if COLUMNS > 1:
        return xs
    elif T.wired or T.row_words > HELD_WORDS:
        return kept(xs[K], S, STAGE, K)
    else:
        return xs[K]


@triton.jit
def add_tile(sums, rests, w, xs, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of all columns with tile K; xs are its `operands`."""
    if COLUMNS == 1:
        return add_part(sums, rests, w, xs, S, STAGE, K)
    else:
        MOST: tl.constexpr = NARROW_COLUMNS if S.stages[STAGE].is_narrow else COLUMNS
        GROUP: tl.constexpr = min(COLUMNS // COLUMN_LOOP, MOST)
        for column in range(0, COLUMNS, GROUP):
            for i in tl.static_range(GROUP):
                x = load_operands(xs, column + i, S, STAGE, K)
                sums, rests = add_part(sums, rests, w, x, S, STAGE, K)
        return sums, rests


@triton.jit
def wired(stream, xs, p, S: tl.constexpr, STAGE: tl.constexpr, COLUMNS: tl.constexpr):
    """weight @ operands xs for all of the block's rows: of every unit [COLUMNS * tile_rows], and the stream."""
    base, behind, fetched = stream
    T: tl.constexpr = S.stages[STAGE]
    AHEAD: tl.constexpr = T.ahead
    UNITS: tl.constexpr = T.units
    K_TILES: tl.constexpr = T.k_tiles
    LOOP_UNITS: tl.constexpr = T.loop_units
    sums, rests = no_sums(S, STAGE, UNITS * COLUMNS)
    for k in tl.static_range(K_TILES):
        x = operands(xs, S, STAGE, k, COLUMNS)  # every warp's copy lives as long as their tiles
        if loop_iterations(S, STAGE, k) > 0:
            for i in range(loop_iterations(S, STAGE, k)):
                for u in tl.static_range(LOOP_UNITS):
                    sums, rests = add_tile(sums, rests, fetched[0], x, S, STAGE, k, COLUMNS)
                    tile = load_tile(base, i * LOOP_UNITS + u + AHEAD, p, S, STAGE, k)
                    fetched = fetched[1:] + (tile,)
        for u in tl.static_range(loop_iterations(S, STAGE, k) * LOOP_UNITS, UNITS):
            sums, rests = add_tile(sums, rests, fetched[0], x, S, STAGE, k, COLUMNS)
            fetched = fetched[1:] + fetch(stream, p, S, STAGE, k * UNITS + u)
    ys = ()
    for u in tl.static_range(UNITS):
        y = whole_columns(sums[u * COLUMNS :], rests[u * COLUMNS :], S, STAGE, COLUMNS)
        ys = ys + (unscaled(y, S, fine_pairs(S, STAGE)),)
    return ys, (base, behind, fetched)


@triton.jit
def whole_columns(sums, rests, S: tl.constexpr, STAGE: tl.constexpr, COLUMNS: tl.constexpr):
    """[COLUMNS * tile_rows] of the first COLUMNS sums, one column's after the other's."""
    ROWS: tl.constexpr = S.stages[STAGE].tile_rows
    ys = ()
    for i in tl.static_range(COLUMNS):
        y = tl.sum(sums[i], axis=1)
        if narrow(S, STAGE, S.stages[STAGE].k_tiles - 1):
            y += rests[i]
        ys = ys + (y,)
    if COLUMNS == 1:
        return ys[0]
    else:
        y = tl.reshape(stacked(ys, COLUMNS), (ROWS, COLUMNS))
        return tl.reshape(tl.trans(y), (COLUMNS * ROWS,))


@triton.jit
def rows_of_stream(sums, rests, S: tl.constexpr, STAGE: tl.constexpr, COLUMNS: tl.constexpr):
    """`whole_columns` of operands that `residual.rounded` made, which are scaled if they are fine pairs."""
    y = whole_columns(sums, rests, S, STAGE, COLUMNS)
    return unscaled(y, S, True) if fine_pairs(S, STAGE) else y


@triton.jit
def rowwise(
    stream, xs, to, out, p, S: tl.constexpr, STAGE: tl.constexpr, EPILOGUE: tl.constexpr, COLUMNS: tl.constexpr
):
    """weight @ x row tile by row tile, each handed to EPILOGUE(y, to, unit, out, S, COLUMNS), where y
    [COLUMNS * tile_rows] has one column's rows after the other's; the stream. `to` is where column 0 goes.
    """
    base, behind, fetched = stream
    T: tl.constexpr = S.stages[STAGE]
    UNITS: tl.constexpr = T.units
    K_TILES: tl.constexpr = T.k_tiles
    # What the stage before could not ask for, whose tiles are as many as it has (lm_head's behind qkv_proj's).
    FIRST: tl.constexpr = T.ahead
    AHEAD: tl.constexpr = T.asked_before(0)
    fetched = fetched + load_tiles(base, 0, p, S, STAGE, FIRST, AHEAD - FIRST)
    sums, rests = no_sums(S, STAGE, COLUMNS)
    if COLUMNS == 1 and T.row_words <= HELD_WORDS:
        held = ()
        for k in tl.static_range(K_TILES):
            held = held + (kept(xs[k], S, STAGE, k),)
        xs = held
    LOOPED: tl.constexpr = T.looped
    # more row tiles an iteration lose (benchmarks/triton-log.md#tiles-a-turn)
    if LOOPED > 0:  # tiles in `fetched` are those of the loop
        for unit in range(LOOPED):
            for k in tl.static_range(K_TILES):
                x = operands(xs, S, STAGE, k, COLUMNS)
                sums, rests = add_tile(sums, rests, fetched[0], x, S, STAGE, k, COLUMNS)
                fetched = fetched[1:] + fetch_behind(base, unit, p, S, STAGE, k)
            y = rows_of_stream(sums, rests, S, STAGE, COLUMNS)
            EPILOGUE(y, to, unit, out, S, COLUMNS)
    for unit in tl.static_range(LOOPED, UNITS):
        for k in tl.static_range(K_TILES):
            x = operands(xs, S, STAGE, k, COLUMNS)
            sums, rests = add_tile(sums, rests, fetched[0], x, S, STAGE, k, COLUMNS)
            fetched = fetched[1:] + fetch(stream, p, S, STAGE, unit * K_TILES + k)
        y = rows_of_stream(sums, rests, S, STAGE, COLUMNS)
        EPILOGUE(y, to, unit, out, S, COLUMNS)
    return base, behind, fetched
