"""How the work of a prompt's chunk is divided: what a block multiplies at once, and where the chunk's vectors are.

All blocks of a lane share its chunk, a row a token. Blocks own rows of a matrix as they do for one token; where that
is few (o_proj, down_proj), `parts` of them take their rows together and a part of K each: a block then reads fewer of
the vectors, which for many tokens are more bytes than its weights.

    chunk       float32: `stream` x, `qkv` as it left the matrix, `out` the parts of the modules' outputs
    half_chunk  16 bits: `x` normed, `attention` and `mlp`, as wide as the tiles that they meet, zero after the end
"""

from typing import Any

import triton

ROWS = 128  # of a matrix multiplied at once, at most
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
    return min(max(16, triton.next_power_of_2(span(S, stage))), ROWS)


@triton.constexpr_function
def row_tiles(S: Any, stage: int) -> int:
    return -(-span(S, stage) // row_tile(S, stage))


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
def tile_values(S: Any, stage: int, k: int) -> tuple[int, int, int, int]:
    """Of tile k along K: values before all blocks' tiles of the first unit, from one unit to the next, from one tile
    along K to the next one as wide, and from a row to the next."""
    T = S.stages[stage]
    first, step = T.begins(k)
    width = T.widths[k] * T.tile_rows * (T.units if T.wired else 1)
    begins, units, along = (2 * words * S.num_blocks for words in (first, step, width))
    return 2 * T.offset + begins, units, along, 2 * T.widths[k]


# ---- where vectors stand ----

READERS = {"x": 0, "attention": 1, "mlp": 3}  # the stage that reads vectors of `half_chunk`


@triton.constexpr_function
def max_parts(S: Any) -> int:
    return max(parts(S, stage) for stage in WIRED)


@triton.constexpr_function
def scratch(S: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes in values, in order: of `chunk`, of `half_chunk`."""
    rows = S.lanes * S.columns
    outs = 2 * (S.delay + 1) * max_parts(S)
    floats = {
        "stream": rows * S.hidden_size,
        "qkv": rows * S.stages[0].rows,
        "out": outs * rows * S.hidden_size,
    }
    return floats, {name: rows * width(S, READERS[name]) for name in READERS}


@triton.constexpr_function
def vector_width(S: Any, name: str) -> int:
    return width(S, READERS[name])


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
