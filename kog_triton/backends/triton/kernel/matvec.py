"""The weight stream: each tile is multiplied while the one after it is on its way.

    wired    stages whose input arrives in words (o_proj, down_proj): all row tiles at one place of K, then at the next
    rowwise  stages that read the residual stream (qkv_proj, gate_up_proj, lm_head): row tile by row tile

The order of tiles is static (schedule/triton.py), so a stage's last tile asks for the next stage's first, which is on
its way while the block publishes, waits and gathers. `stream` goes from stage to stage:

    base     first word of the layer's matrices, or of the head's
    behind   likewise, of what comes behind them: the next layer, the head, or the next token's first layer
    block    whose tiles these are
    fetched  the tile that was asked for last
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.sync import pin, pin_address
from kog_triton.backends.triton.kernel.words import LINE, high, low, unscaled

# Words of x that every warp keeps a copy of through a stage that walks row by row; more are spread tile by tile.
# Laneformer-2B (1,536 words) with 1,024 here: 728 tokens/s, not 745; Qwen3-8B (2,048) 232, not 235 (one H200).
HELD_WORDS: tl.constexpr = tl.constexpr(2048)
# A tile is loaded as rows, lines along K, words of a line. Triton gives the warps to the first dimension before the
# words up to 3.6, to the last from 3.7 on (3.7.1 and 3.9.0): rows stand there, lines at the other place.
RELEASE = tuple(int(n) for n in triton.__version__.split(".")[:2])
LINES_AXIS: tl.constexpr = tl.constexpr(1 if RELEASE < (3, 7) else 0)


@triton.constexpr_function
def after(S, stage, tile):
    return S.after(stage, tile)


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
    return tl.load(ptr + offset, eviction_policy="evict_first")


@triton.jit
def fetch(stream, S: tl.constexpr, STAGE: tl.constexpr, TILE: tl.constexpr):
    """The tile after TILE of STAGE; after down_proj or lm_head, the first one at stream's `behind`."""
    base, behind, block, _ = stream
    AFTER: tl.constexpr = after(S, STAGE, TILE)
    if AFTER[2]:
        return load_tile(behind, AFTER[1], block, S, AFTER[0])
    else:
        return load_tile(base, AFTER[1], block, S, AFTER[0])


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
                    sums = sums[1:] + (sums[0] + multiply(fetched, x, S),)
                    tile = k * UNITS + i * LOOP_UNITS + u + 1
                    fetched = load_tile(base, tile, block, S, STAGE)
        for u in tl.static_range(loop_iterations(S, STAGE, k) * LOOP_UNITS, UNITS):
            sums = sums[1:] + (sums[0] + multiply(fetched, x, S),)
            fetched = fetch(stream, S, STAGE, k * UNITS + u)
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
    for unit in range(
        UNITS - 1
    ):  # more row tiles an iteration lose (benchmarks/triton-log.md#tiles-a-turn)
        for k in tl.static_range(K_TILES):
            total = add_k_tile(total, fetched, xs, S, HELD, k)
            fetched = load_tile(base, unit * K_TILES + k + 1, block, S, STAGE)
        EPILOGUE(tl.sum(total, axis=1), unit, out, S, T)
    for k in tl.static_range(K_TILES):
        total = add_k_tile(total, fetched, xs, S, HELD, k)
        fetched = fetch(stream, S, STAGE, (UNITS - 1) * K_TILES + k)
    EPILOGUE(tl.sum(total, axis=1), UNITS - 1, out, S, T)
    return base, behind, block, fetched
