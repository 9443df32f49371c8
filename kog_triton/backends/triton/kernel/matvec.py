"""The weight stream: tiles in a ring of registers, multiplied as they arrive.

    ring     `depth` tiles on their way, oldest first; a stage takes the oldest and asks for the one `depth` further
    wired    stages whose input arrives in words (o_proj, down_proj): chunk by chunk, all rows of the block at once
    rowwise  stages that read the residual stream (qkv_proj, gate_up_proj, lm_head): row tile by row tile

The order of tiles is static (schedule/triton.py), so a stage's last tiles ask for the next stage's first ones: weights
are on their way while the block publishes, waits and gathers.
"""

import math

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
def at(S, position):
    return S.at(position)


@triton.constexpr_function
def position(S, stage, tile):
    return S.position(stage, tile)


@triton.constexpr_function
def turn_tiles(chunks, depth):
    """Tiles of one turn of a row loop: whole row tiles and whole rings. More lose (benchmarks/README.md)."""
    return math.lcm(chunks, depth)


@triton.constexpr_function
def turns(tiles, chunks, depth):
    """Turns of a row loop in which every tile asks for one of its own stage."""
    return max(0, (tiles - depth) // math.lcm(chunks, depth))


@triton.constexpr_function
def chunk_turns(S, stage, chunk):
    """Turns of the loop over a chunk's tiles in which every tile asks for one of its own stage."""
    cut = S.stages[stage]
    if not cut.turn:
        return 0
    inside = min(cut.units, cut.tiles - S.depth - chunk * cut.units)
    return max(0, inside) // cut.turn


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
def fetch(base, next_base, block, S: tl.constexpr, POSITION: tl.constexpr):
    """The tile at a place of the layer's sequence, or of the next layer's; a phantom is nothing."""
    WHERE: tl.constexpr = at(S, POSITION)
    if WHERE[0] < 0:
        return 0
    elif WHERE[2] == 0:
        return load_tile(base, WHERE[1], block, S, WHERE[0])
    else:
        return load_tile(next_base, WHERE[1], block, S, WHERE[0])


@triton.jit
def fill(base, block, S: tl.constexpr, STAGE: tl.constexpr):
    """The ring as it stands before a stage of the layer at `base`; before lm_head it is qkv_proj's."""
    DEPTH: tl.constexpr = S.depth
    ring = ()
    for i in tl.static_range(DEPTH):
        ring = ring + (fetch(base, base, block, S, position(S, STAGE, i)),)
    return ring


@triton.jit
def multiply(w, x, S: tl.constexpr):
    """Products of a tile and words x [lines, LINE], as far as a thread can sum them alone: [tile_rows, LINE / 4]."""
    x = tl.expand_dims(x, 1 - LINES_AXIS)
    products = low(w, S) * low(x, S) + high(w, S) * high(x, S)
    SHAPE: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 4)
    return tl.sum(tl.sum(tl.reshape(products, SHAPE), axis=3), axis=LINES_AXIS)


@triton.jit
def add_chunk(total, w, xs, S: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr):
    """The sums of a row tile with one more tile along K; the first one starts anew."""
    if HELD:
        part = multiply(w, xs[CHUNK], S)
    else:
        part = multiply(w, pin(xs[CHUNK], S), S)
    if CHUNK == 0:
        return part
    else:
        return total + part


@triton.jit
def wired(base, next_base, block, ring, xs, S: tl.constexpr, STAGE: tl.constexpr):
    """weight @ operands xs for all of the block's rows: a tuple of [tile_rows], one a unit; and the ring."""
    T: tl.constexpr = S.stages[STAGE]
    UNITS: tl.constexpr = T.units
    CHUNKS: tl.constexpr = T.chunks
    TURN: tl.constexpr = T.turn
    ROWS: tl.constexpr = T.tile_rows
    WIDE: tl.constexpr = min(T.tile_words, LINE)
    sums = ()
    for u in tl.static_range(UNITS):
        sums = sums + (tl.zeros((ROWS, WIDE // 4), tl.float32),)
    for c in tl.static_range(CHUNKS):
        x = pin(xs[c], S)  # every warp's copy of a chunk lives as long as its tiles
        # The row tile whose turn it is comes first; it goes last.
        if chunk_turns(S, STAGE, c) > 0:
            for turn in range(chunk_turns(S, STAGE, c)):
                for u in tl.static_range(TURN):
                    sums = sums[1:] + (sums[0] + multiply(ring[0], x, S),)
                    tile = c * UNITS + turn * TURN + u + S.depth
                    ring = ring[1:] + (load_tile(base, tile, block, S, STAGE),)
        for u in tl.static_range(chunk_turns(S, STAGE, c) * TURN, UNITS):
            sums = sums[1:] + (sums[0] + multiply(ring[0], x, S),)
            following = fetch(
                base, next_base, block, S, position(S, STAGE, c * UNITS + u + S.depth)
            )
            ring = ring[1:] + (following,)
    ys = ()
    for u in tl.static_range(UNITS):
        ys = ys + (unscaled(tl.sum(sums[u], axis=1), S),)
    return ys, ring


@triton.jit
def skip_phantoms(base, next_base, block, ring, S: tl.constexpr):
    """The places of the ring that hold nothing, at the end of a layer."""
    PHANTOMS: tl.constexpr = S.phantoms
    for i in tl.static_range(PHANTOMS):
        ring = ring[1:] + (fetch(base, next_base, block, S, position(S, 4, i + S.depth)),)
    return ring


@triton.jit
def rowwise(
    base,
    next_base,
    block,
    ring,
    xs,
    out,
    S: tl.constexpr,
    STAGE: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """weight @ x row tile by row tile, each handed to EPILOGUE(y [tile_rows], unit, out, S, T) -> out; and the ring."""
    T: tl.constexpr = S.stages[STAGE]
    TILES: tl.constexpr = T.tiles
    CHUNKS: tl.constexpr = T.chunks
    ROWS: tl.constexpr = T.tile_rows
    WIDE: tl.constexpr = min(T.tile_words, LINE)
    TURN: tl.constexpr = turn_tiles(T.chunks, S.depth)
    TURNS: tl.constexpr = turns(T.tiles, T.chunks, S.depth)
    total = tl.zeros((ROWS, WIDE // 4), tl.float32)
    HELD: tl.constexpr = T.chunks * T.tile_words <= HELD_WORDS
    if HELD:
        held = ()
        for c in tl.static_range(CHUNKS):
            held = held + (pin(xs[c], S),)
        xs = held
    for turn in range(TURNS):
        for i in tl.static_range(TURN):
            total = add_chunk(total, ring[0], xs, S, HELD, i % CHUNKS)
            ring = ring[1:] + (load_tile(base, turn * TURN + i + S.depth, block, S, STAGE),)
            if i % CHUNKS == CHUNKS - 1:
                unit = turn * (TURN // T.chunks) + i // T.chunks
                out = EPILOGUE(tl.sum(total, axis=1), unit, out, S, T)
    for i in tl.static_range(TURN * TURNS, TILES):
        total = add_chunk(total, ring[0], xs, S, HELD, i % CHUNKS)
        if STAGE < 4:
            ring = ring[1:] + (fetch(base, next_base, block, S, position(S, STAGE, i + S.depth)),)
        elif i + S.depth < T.tiles:
            ring = ring[1:] + (load_tile(base, i + S.depth, block, S, STAGE),)
        else:
            ring = ring[1:] + (fetch(next_base, next_base, block, S, i + S.depth - T.tiles),)
        if i % CHUNKS == CHUNKS - 1:
            out = EPILOGUE(tl.sum(total, axis=1), i // T.chunks, out, S, T)
    return out, ring
