"""How attention is cut: splits of the context, tiles of positions, and the room that they take."""

from kog_triton.backends.cuda.layout.batches import up

from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.cuda import WARPS

# Measured on an H200 (benchmarks/README.md).
SPLIT_TILES = 8  # tiles of positions, of a warp each, that make another split worth its while
BUNDLE = 4  # splits whose logarithms lie side by side
QUERY_TOPS = 32  # words from those of one query to the next's: a line of the L2
MERGED = 4  # splits that are joined by those who read them: of one bundle
MERGED_LENGTH = 512  # positions up to which they are not more
HEADS_AT_ONCE = 8  # query heads of one warp: the tensor core's columns
JOINED = 8  # splits that one warp joins


def row_dim(spec: ModelSpec) -> int:
    """Values of a row of the cache: a head, padded with zeros to steps of the tensor core."""
    return up(spec.head_dim, 16)


def tile_rows(spec: ModelSpec) -> int:
    """Positions that one warp takes at once: two tiles of wider heads would not fit into registers."""
    return 16 if row_dim(spec) <= 64 else 8


def split_least(spec: ModelSpec) -> int:
    """Positions that make another split of the context worth its while."""
    return SPLIT_TILES * tile_rows(spec)


def head_groups(spec: ModelSpec) -> int:
    """Groups of warps, of as many query heads each."""
    return -(-spec.group // HEADS_AT_ONCE)


def result_slots(spec: ModelSpec) -> int:
    """Places for results in a group: those of half of its warps find room at once."""
    return -(-(WARPS // head_groups(spec)) // 2)


def slot_bytes(spec: ModelSpec) -> int:
    """Of one query head's results of one warp: its outputs, padded, a maximum and a sum."""
    return 4 * (row_dim(spec) + 4 + 2)


def received_bytes(spec: ModelSpec, new_rows: int = 1) -> int:
    """Of a unit's scratch, what it holds of heads that were received: queries, new keys and values."""
    row = row_dim(spec)
    return 2 * head_groups(spec) * 8 * row * 2 + 2 * new_rows * row * 2


def found_bytes(spec: ModelSpec, splits: int) -> int:
    """Behind those: the warps' results, later joins."""
    d, group = spec.head_dim, spec.group
    joins = -(-group // (JOINED + 1)) * -(-splits // JOINED) * d if splits > JOINED else 0
    return max(result_bytes(spec), 4 * joins)


def result_bytes(spec: ModelSpec) -> int:
    """Results of half of the warps, of all query heads."""
    heads = -(-spec.group // head_groups(spec))  # of a group
    return head_groups(spec) * result_slots(spec) * heads * slot_bytes(spec)


def attention_bytes(spec: ModelSpec, splits: int, new_rows: int = 1) -> int:
    """Behind o_proj's inputs: what was received, and what was found."""
    return received_bytes(spec, new_rows) + found_bytes(spec, splits)


def part_queries(spec: ModelSpec, columns: int, blocks: int) -> int:
    """Query heads that a block takes of a head that one block walks: as few as give no block two units."""
    parts = max(head_groups(spec), min(spec.group, blocks // (columns * spec.lane_kv_heads)))
    return -(-spec.group // parts)


def head_bytes(spec: ModelSpec, queries: int, merged: int, new_rows: int) -> int:
    """What a block keeps of `queries` heads whose splits, `merged` at most, it walks alone
    (include/kog/columns/splits.h)."""
    results = result_slots(spec) * slot_bytes(spec)
    found = 4 * (spec.head_dim // 2 + 1)
    return received_bytes(spec, new_rows) + merged * queries * (results + found)
