"""How attention is cut: splits of the context, tiles of positions, and the room that they take."""

from itertools import accumulate

from kog_triton.backends.cuda.layout.batches import up
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.cuda import WARPS

# Measured on an H200: benchmarks/cuda-log.md#splits; MERGED_LENGTH: benchmarks/cuda-log.md#own-join.
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


def group_heads(spec: ModelSpec) -> int:
    """Query heads of such a group."""
    return -(-spec.group // head_groups(spec))


def warp_results(spec: ModelSpec) -> int:
    """Places for results in a group: those of half of its warps fit at once."""
    return -(-(WARPS // head_groups(spec)) // 2)


def result_stride(spec: ModelSpec) -> int:
    """Words from one query head's results to the next's: a row, and four that shift the banks."""
    return row_dim(spec) + 4


def numbers(spec: ModelSpec) -> dict[str, int]:
    """What kernels know of the above, by the names of their constants."""
    return {
        "bundle": BUNDLE,
        "query_tops": QUERY_TOPS,
        "joined": JOINED,
        "row_dim": row_dim(spec),
        "tile_rows": tile_rows(spec),
        "head_groups": head_groups(spec),
        "group_heads": group_heads(spec),
        "warp_results": warp_results(spec),
        "result_stride": result_stride(spec),
    }


def scratch_places(spec: ModelSpec, new_rows: int = 1) -> dict[str, int]:
    """What a KV task keeps behind o_proj's inputs: the byte where each begins, and the end (include/kog/kv_task.h)."""
    row = row_dim(spec)
    results = head_groups(spec) * warp_results(spec) * group_heads(spec)
    return _places(
        queries=32 * row * head_groups(spec),
        key=2 * row * new_rows,
        value=2 * row * new_rows,
        results=4 * result_stride(spec) * results,
        tops=8 * results,
    )


def head_places(spec: ModelSpec, queries: int, merged: int, new_rows: int) -> dict[str, int]:
    """Byte places in scratch for `queries` heads whose splits, `merged` at most, one block walks alone:
    name -> byte offset (include/kog/columns/splits.h)."""
    results = merged * warp_results(spec) * queries
    return _places(
        received=received_bytes(spec, new_rows),
        results=4 * result_stride(spec) * results,
        tops=8 * results,
        words=4 * (spec.head_dim // 2) * merged * queries,
        logs=4 * merged * queries,
    )


def _places(**sizes: int) -> dict[str, int]:
    return dict(zip((*sizes, "end"), accumulate(sizes.values(), initial=0), strict=True))


def received_bytes(spec: ModelSpec, new_rows: int = 1) -> int:
    """Of a KV task's scratch, what it holds of heads that were received: queries, new keys and values."""
    return scratch_places(spec, new_rows)["results"]


def attention_bytes(spec: ModelSpec, splits: int, new_rows: int = 1) -> int:
    """Behind o_proj's inputs: what was received, then the warps' results, later joins."""
    joins = -(-spec.group // (JOINED + 1)) * -(-splits // JOINED) * spec.head_dim
    places = scratch_places(spec, new_rows)
    return max(places["end"], places["results"] + (4 * joins if splits > JOINED else 0))


def part_queries(spec: ModelSpec, heads: int, blocks: int) -> int:
    """Query heads that a block takes of a head that one block walks: as few as give no block two KV tasks. `heads`:
    key/value heads of all columns."""
    parts = max(head_groups(spec), min(spec.group, blocks // heads))
    return -(-spec.group // parts)
