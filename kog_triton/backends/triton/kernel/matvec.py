"""The weight stream: each tile is multiplied while those after it are on their way, one large one or several small.

    wired    stages whose input arrives in words (o_proj, down_proj): all row tiles at one place of K, then at the next
    rowwise  stages that read the residual stream (qkv_proj, gate_up_proj, lm_head): row tile by row tile

The order of tiles is static (schedule/triton.py), so a stage's last tiles ask for the next stage's first, which are on
their way while the block publishes, waits and gathers. `stream` goes from stage to stage:

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
    """Iterations of the loop over the tiles of K tile `k` in which every tile asks for one of its own stage."""
    tiling = S.stages[stage]
    if not tiling.loop_units:
        return 0
    last = k == tiling.k_tiles - 1
    return (tiling.units - last) // tiling.loop_units


@triton.jit
def load_tile(base, tile, block, S: tl.constexpr, STAGE: tl.constexpr):
    """Words of one tile, of which lines [tile_words / LINE] are LINES_AXIS and rows the other axis before [LINE].

    A warp has rows of its own: a row's sum needs few shuffles and no shared memory. `base` is the layer's
    (or the head's) first word.
    """
    T: tl.constexpr = S.stages[STAGE]
    ROWS: tl.constexpr = T.tile_rows
    WORDS: tl.constexpr = T.tile_words
    WIDE: tl.constexpr = min(WORDS, LINE)
    r, k, c = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, WORDS // WIDE)
    if LINES_AXIS == 1:
        offset = r[:, None, None] * WORDS + c[None, :, None] * WIDE + k[None, None, :]
    else:
        offset = r[None, :, None] * WORDS + c[:, None, None] * WIDE + k[None, None, :]
    ptr = pin_address(base + T.offset + (tile * S.num_blocks + block) * T.words, S)
    return load_once(ptr + offset, S)


@triton.jit
def load_tiles(
    base, block, S: tl.constexpr, STAGE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr
):
    """A tuple of tiles."""
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles = tiles + (load_tile(base, FIRST + i, block, S, STAGE),)
    return tiles


@triton.jit
def first_tiles(base, block, S: tl.constexpr, STAGE: tl.constexpr):
    """What is `fetched` where a stage begins."""
    return load_tiles(base, block, S, STAGE, 0, S.stages[STAGE].ahead)


@triton.jit
def fetch(stream, S: tl.constexpr, STAGE: tl.constexpr, TILE: tl.constexpr):
    """Tiles that are asked for behind TILE of STAGE; of qkv_proj, behind down_proj or lm_head, at stream's `behind`."""
    base, behind, block, _ = stream
    ASKED: tl.constexpr = asked_by(S, STAGE, TILE)
    if ASKED[3]:
        return load_tiles(behind, block, S, ASKED[0], ASKED[1], ASKED[2])
    else:
        return load_tiles(base, block, S, ASKED[0], ASKED[1], ASKED[2])


@triton.jit
def multiply(w, x, S: tl.constexpr):
    """Products of a tile and words x [lines, LINE], as far as a thread can sum them alone: [tile_rows, LINE / 4]."""
    x = tl.expand_dims(x, 1 - LINES_AXIS)
    products = low(w, S) * low(x, S) + high(w, S) * high(x, S)
    SHAPE: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 4)
    return tl.sum(tl.sum(tl.reshape(products, SHAPE), axis=3), axis=LINES_AXIS)


@triton.jit
def add_k_tile(total, w, xs, S: tl.constexpr, HELD: tl.constexpr, K: tl.constexpr):
    """The sums of a row tile with its tile K along K; the first one starts anew."""
    if HELD:
        part = multiply(w, xs[K], S)
    else:
        part = multiply(w, pin(xs[K], S), S)
    if K == 0:
        return part
    else:
        return total + part


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
    WIDE: tl.constexpr = min(T.tile_words, LINE)
    sums = ()
    for u in tl.static_range(UNITS):
        sums = sums + (tl.zeros((ROWS, WIDE // 4), tl.float32),)
    for k in tl.static_range(K_TILES):
        x = pin(xs[k], S)  # every warp's copy of these words lives as long as their tiles
        # The sums that are next to grow stand first; then they go last.
        if loop_iterations(S, STAGE, k) > 0:
            for i in range(loop_iterations(S, STAGE, k)):
                for u in tl.static_range(LOOP_UNITS):
                    sums = sums[1:] + (sums[0] + multiply(fetched[0], x, S),)
                    tile = k * UNITS + i * LOOP_UNITS + u + AHEAD
                    fetched = fetched[1:] + (load_tile(base, tile, block, S, STAGE),)
        for u in tl.static_range(loop_iterations(S, STAGE, k) * LOOP_UNITS, UNITS):
            sums = sums[1:] + (sums[0] + multiply(fetched[0], x, S),)
            fetched = fetched[1:] + fetch(stream, S, STAGE, k * UNITS + u)
    ys = ()
    for u in tl.static_range(UNITS):
        ys = ys + (unscaled(tl.sum(sums[u], axis=1), S),)
    return ys, (base, behind, block, fetched)


@triton.jit
def rowwise(stream, xs, out, S: tl.constexpr, STAGE: tl.constexpr, EPILOGUE: tl.constexpr):
    """weight @ x row tile by row tile, each handed to EPILOGUE(y [tile_rows], unit, out, S, T); the stream."""
    base, behind, block, fetched = stream
    T: tl.constexpr = S.stages[STAGE]
    UNITS: tl.constexpr = T.units
    K_TILES: tl.constexpr = T.k_tiles
    ROWS: tl.constexpr = T.tile_rows
    WIDE: tl.constexpr = min(T.tile_words, LINE)
    total = tl.zeros((ROWS, WIDE // 4), tl.float32)
    HELD: tl.constexpr = T.k_tiles * T.tile_words <= HELD_WORDS
    if HELD:
        held = ()
        for k in tl.static_range(K_TILES):
            held = held + (pin(xs[k], S),)
        xs = held
    AHEAD: tl.constexpr = T.ahead
    LOOPED: tl.constexpr = UNITS - (AHEAD + K_TILES - 1) // K_TILES
    # more row tiles an iteration lose (benchmarks/triton-log.md#tiles-a-turn)
    for unit in range(LOOPED):
        for k in tl.static_range(K_TILES):
            total = add_k_tile(total, fetched[0], xs, S, HELD, k)
            tile = load_tile(base, unit * K_TILES + k + AHEAD, block, S, STAGE)
            fetched = fetched[1:] + (tile,)
        EPILOGUE(tl.sum(total, axis=1), unit, out, S, T)
    for unit in tl.static_range(LOOPED, UNITS):
        for k in tl.static_range(K_TILES):
            total = add_k_tile(total, fetched[0], xs, S, HELD, k)
            fetched = fetched[1:] + fetch(stream, S, STAGE, unit * K_TILES + k)
        EPILOGUE(tl.sum(total, axis=1), unit, out, S, T)
    return base, behind, block, fetched
