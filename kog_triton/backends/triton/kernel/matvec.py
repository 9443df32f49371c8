"""The weight stream: each tile is multiplied while those after it are on their way, one large one or several small.

    wired    stages whose input arrives in words (o_proj, down_proj): all row tiles at one place of K, then at the next
    rowwise  stages that read the residual stream (qkv_proj, gate_up_proj, lm_head): row tile by row tile

The order of tiles is static (schedule/triton.py), so a stage's last tiles ask for the next stage's first, which are on
their way while the block publishes, waits and gathers. A tile is known by its row tile (unit) and its place k along K.
`stream` goes from stage to stage:

    base     first word of the layer's matrices, or of the head's
    behind   likewise, of what comes behind them: the next layer, the head, or the next token's first layer
    block    whose tiles these are
    fetched  tiles that were asked for, in their order: as many as the stage that is next has `ahead`
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.sync import load_once, pin, pin_address
from kog_triton.backends.triton.kernel.words import LINE, high, low, unscaled

# Words of x that every warp keeps a copy of through a stage that walks row by row; more are spread tile by tile.
# Laneformer-2B (1,536 words) with 1,024 here: 728 tokens/s, not 745; Qwen3-8B (2,048) 232, not 235 (one H200).
HELD_WORDS: tl.constexpr = tl.constexpr(2048)
# A tile is loaded as rows, lines along K, words of a line. Triton gives the warps to the first dimension before the
# words up to 3.6, to the last from 3.7 on (3.7.1 and 3.9.0): rows stand there, lines at the other place.
RELEASE = tuple(int(n) for n in triton.__version__.split(".")[:2])
LINES_AXIS: tl.constexpr = tl.constexpr(1 if RELEASE < (3, 7) else 0)


@triton.constexpr_function
def asked_by(S, stage, tile):
    return S.asked_by(stage, tile)


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
def place(T, tile):
    return T.place(tile)


@triton.constexpr_function
def split_lines(S, stage, k):
    """Parts of tile k's lines that have warps of their own, where a tile has fewer rows than there are warps. A warp
    has the same part of every tile: parts are added once a unit, not tile by tile through shared memory."""
    T = S.stages[stage]
    return max(1, min(S.sizes.warps // T.tile_rows, T.widths[k] // LINE.value))


@triton.constexpr_function
def sums_width(S, stage, k=0):
    """Sums of a row that threads keep: those of tile k."""
    return split_lines(S, stage, k) * min(S.stages[stage].widths[k], LINE.value) // 4


@triton.constexpr_function
def narrow(S, stage, k):
    """Whether fewer threads have sums of tile k than of the first one: it is summed to the end at once."""
    return sums_width(S, stage, k) < sums_width(S, stage)


@triton.constexpr_function
def has_narrow(S, stage):
    T = S.stages[stage]
    return narrow(S, stage, T.k_tiles - 1)


@triton.jit
def load_tile(base, unit, block, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Words of one tile, of which lines [width / LINE] are LINES_AXIS and rows the other axis before [LINE].

    A warp has rows of its own: a row's sum needs few shuffles and no shared memory. `base` is the layer's
    (or the head's) first word.
    """
    T: tl.constexpr = S.stages[STAGE]
    ROWS: tl.constexpr = T.tile_rows
    WORDS: tl.constexpr = T.widths[K]
    WIDE: tl.constexpr = min(WORDS, LINE)
    BEGINS: tl.constexpr = begins(S, STAGE, K)
    r, k, c = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WORDS // WIDE)
    if LINES_AXIS == 1:
        offset = r[:, None, None] * WORDS + c[None, :, None] * WIDE + k[None, None, :]
    else:
        offset = r[None, :, None] * WORDS + c[:, None, None] * WIDE + k[None, None, :]
    at = BEGINS[0] + unit * BEGINS[1] + block * (ROWS * WORDS)
    ptr = pin_address(base + at, S)
    return load_once(ptr + offset, S)


@triton.jit
def load_after(base, unit, block, S: tl.constexpr, STAGE: tl.constexpr, TILE: tl.constexpr):
    """The tile that is TILE in the stage's order if `unit` is taken for the first one."""
    PLACE: tl.constexpr = place(S.stages[STAGE], TILE)
    return load_tile(base, unit + PLACE[0], block, S, STAGE, PLACE[1])


@triton.jit
def load_tiles(
    base,
    unit,
    block,
    S: tl.constexpr,
    STAGE: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """A tuple of such tiles."""
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles = tiles + (load_after(base, unit, block, S, STAGE, FIRST + i),)
    return tiles


@triton.jit
def first_tiles(base, block, S: tl.constexpr, STAGE: tl.constexpr):
    """What is `fetched` where a stage begins."""
    return load_tiles(base, 0, block, S, STAGE, 0, S.stages[STAGE].ahead)


@triton.jit
def fetch(stream, S: tl.constexpr, STAGE: tl.constexpr, TILE: tl.constexpr):
    """Tiles that are asked for behind TILE of STAGE; of qkv_proj, behind down_proj or lm_head, at stream's `behind`."""
    base, behind, block, _ = stream
    ASKED: tl.constexpr = asked_by(S, STAGE, TILE)
    if ASKED[3]:
        return load_tiles(behind, 0, block, S, ASKED[0], ASKED[1], ASKED[2])
    else:
        return load_tiles(base, 0, block, S, ASKED[0], ASKED[1], ASKED[2])


@triton.jit
def fetch_behind(base, unit, block, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Tiles that are asked for behind tile K of a unit which many follow."""
    FIRST: tl.constexpr = S.stages[STAGE].asked_before(K, True)
    COUNT: tl.constexpr = S.stages[STAGE].asked_before(K + 1, True) - FIRST
    return load_tiles(base, unit, block, S, STAGE, FIRST, COUNT)


@triton.jit
def multiply(w, x, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """Products of tile K and words x [lines, LINE], as far as a thread can sum them alone: [tile_rows, parts of them].

    Of a tile that is `narrow`, [tile_rows].
    """
    PARTS: tl.constexpr = split_lines(S, STAGE, K)
    x = tl.expand_dims(x, 1 - LINES_AXIS)
    # Eight products of a thread in a row, each added to the sum of those before it by one instruction.
    products = tl.join(low(w, S) * low(x, S), high(w, S) * high(x, S))
    SHAPE: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 8)
    sums = tl.sum(tl.reshape(products, SHAPE), axis=3)
    if PARTS == 1:
        sums = tl.sum(sums, axis=LINES_AXIS)
    elif LINES_AXIS == 1:
        SPLIT: tl.constexpr = (w.shape[0], w.shape[1] // PARTS, PARTS, sums.shape[2])
        sums = tl.sum(tl.reshape(sums, SPLIT), axis=1)
        sums = tl.reshape(sums, (SPLIT[0], PARTS * SPLIT[3]))
    else:
        SPLIT: tl.constexpr = (w.shape[0] // PARTS, PARTS, w.shape[1], sums.shape[2])
        sums = tl.trans(tl.sum(tl.reshape(sums, SPLIT), axis=0), (1, 0, 2))
        sums = tl.reshape(sums, (SPLIT[2], PARTS * SPLIT[3]))
    if narrow(S, STAGE, K):
        return tl.sum(sums, axis=1)
    else:
        return sums


@triton.jit
def add_k_tile(total, rest, w, xs, S: tl.constexpr, STAGE: tl.constexpr, K: tl.constexpr):
    """The sums of a row tile with its tile K along K, those of narrow tiles apart; the first one starts anew."""
    x = xs[K]
    if S.stages[STAGE].row_words > HELD_WORDS:
        x = pin(x, S)
    part = multiply(w, x, S, STAGE, K)
    if K == 0:
        return part, rest
    elif narrow(S, STAGE, K):
        if narrow(S, STAGE, K - 1):
            part += rest
        return total, part
    else:
        return total + part, rest


@triton.jit
def whole(total, rest, S: tl.constexpr, STAGE: tl.constexpr):
    """[tile_rows] of what `add_k_tile` gave."""
    y = tl.sum(total, axis=1)
    if has_narrow(S, STAGE):
        y += rest
    return y


@triton.jit
def wired(stream, xs, S: tl.constexpr, STAGE: tl.constexpr):
    """weight @ operands xs for all of the block's rows: a tuple of [tile_rows], one a unit; and the stream."""
    base, behind, block, fetched = stream
    T: tl.constexpr = S.stages[STAGE]
    AHEAD: tl.constexpr = T.ahead
    UNITS: tl.constexpr = T.units
    K_TILES: tl.constexpr = T.k_tiles
    LOOP_UNITS: tl.constexpr = T.loop_units
    ROWS: tl.constexpr = T.tile_rows
    WIDE: tl.constexpr = sums_width(S, STAGE)
    sums, rests = (), ()
    for u in tl.static_range(UNITS):
        sums = sums + (tl.zeros((ROWS, WIDE), tl.float32),)
        rests = rests + (tl.zeros((ROWS,), tl.float32),)
    for k in tl.static_range(K_TILES):
        x = pin(xs[k], S)  # every warp's copy of these words lives as long as their tiles
        # The sums that are next to grow stand first; then they go last.
        if loop_iterations(S, STAGE, k) > 0:
            for i in range(loop_iterations(S, STAGE, k)):
                for u in tl.static_range(LOOP_UNITS):
                    part = multiply(fetched[0], x, S, STAGE, k)
                    if narrow(S, STAGE, k):
                        rests = rests[1:] + (rests[0] + part,)
                    else:
                        sums = sums[1:] + (sums[0] + part,)
                    tile = load_tile(base, i * LOOP_UNITS + u + AHEAD, block, S, STAGE, k)
                    fetched = fetched[1:] + (tile,)
        for u in tl.static_range(loop_iterations(S, STAGE, k) * LOOP_UNITS, UNITS):
            part = multiply(fetched[0], x, S, STAGE, k)
            if narrow(S, STAGE, k):
                rests = rests[1:] + (rests[0] + part,)
            else:
                sums = sums[1:] + (sums[0] + part,)
            fetched = fetched[1:] + fetch(stream, S, STAGE, k * UNITS + u)
    ys = ()
    for u in tl.static_range(UNITS):
        ys = ys + (unscaled(whole(sums[u], rests[u], S, STAGE), S),)
    return ys, (base, behind, block, fetched)


@triton.jit
def rowwise(stream, xs, out, S: tl.constexpr, STAGE: tl.constexpr, EPILOGUE: tl.constexpr):
    """weight @ x row tile by row tile, each handed to EPILOGUE(y [tile_rows], unit, out, S, T); the stream."""
    base, behind, block, fetched = stream
    T: tl.constexpr = S.stages[STAGE]
    UNITS: tl.constexpr = T.units
    K_TILES: tl.constexpr = T.k_tiles
    # What the stage before could not ask for, whose tiles are as many as it has (lm_head's behind qkv_proj's).
    FIRST: tl.constexpr = T.ahead
    AHEAD: tl.constexpr = T.asked_before(0)
    fetched = fetched + load_tiles(base, 0, block, S, STAGE, FIRST, AHEAD - FIRST)
    ROWS: tl.constexpr = T.tile_rows
    WIDE: tl.constexpr = sums_width(S, STAGE)
    total, rest = tl.zeros((ROWS, WIDE), tl.float32), tl.zeros((ROWS,), tl.float32)
    if T.row_words <= HELD_WORDS:
        held = ()
        for k in tl.static_range(K_TILES):
            held = held + (pin(xs[k], S),)
        xs = held
    LOOPED: tl.constexpr = T.looped
    # more row tiles an iteration lose (benchmarks/triton-log.md#tiles-a-turn)
    if LOOPED > 0:  # tiles in `fetched` are those of the loop
        for unit in range(LOOPED):
            for k in tl.static_range(K_TILES):
                total, rest = add_k_tile(total, rest, fetched[0], xs, S, STAGE, k)
                fetched = fetched[1:] + fetch_behind(base, unit, block, S, STAGE, k)
            EPILOGUE(whole(total, rest, S, STAGE), unit, out, S, T)
    for unit in tl.static_range(LOOPED, UNITS):
        for k in tl.static_range(K_TILES):
            total, rest = add_k_tile(total, rest, fetched[0], xs, S, STAGE, k)
            fetched = fetched[1:] + fetch(stream, S, STAGE, unit * K_TILES + k)
        EPILOGUE(whole(total, rest, S, STAGE), unit, out, S, T)
    return base, behind, block, fetched
