"""What a block holds of a matrix stage at once: its operands, and the partial sums of so many units.

A kernel of one token keeps operands in shared memory, or in registers if they are few (HELD_STEPS, HELD_WHOLE_WORDS);
one of several columns a part of them in registers, and sums where they leave room; what finds none is read again for
each unit (include/kog/operands.h).
"""

from kog_triton.model.weight_format import Code, Offset
from kog_triton.schedule.cuda import MMA_ROWS, PARTIAL_ROWS, WARPS, CudaLowering, is_wide, slice_values, unit_period
from kog_triton.schedule.lowering import layer_matrices, matrix_stages
from kog_triton.schedule.schedule import Stage

THREADS = WARPS * 32  # that consume
HELD_STEPS = 8  # of one token's operands, all of a stage's or none
# The same in registers where they are whole numbers: five fragments of int4, 5,120 values in eight parts, are 1 % of
# Qwen3-32B's rate; ten steps of FP8 were none (benchmarks/cuda-log.md#narrow-32b).
HELD_WHOLE_WORDS = 25
# Registers for operands in a kernel of several columns: beside them wide ones have twice the sums.
HELD_WORDS, HELD_NARROW_WORDS = 32, 40
# The same of eight columns beside int4, where operands are many: what is left to scratch sets the ring's length.
# Sums of whole numbers are half as many; other formats' scales take the registers. Of Qwen3-8B 48 made 0.8 % more
# tokens/s than 44 and 15 % more than 52, with a ring of 7 slots each (benchmarks/cuda-log.md#shared-scales).
HELD_INT4_WORDS = 48
GROUP_VALUES = 128  # of a slice of x, that a warp stages at once (include/kog/columns/stream.h)
# The same where some are read from memory instead; and how many ring slots ahead those are asked for.
HELD_BESIDE_READ_WORDS, READ_SLOTS = 32, 2
MOST_ROUNDS = 4  # pieces that a warp finishes one behind the other: each takes code of its own
COLUMN_SMALL_BYTES = 2304  # of shared memory, beside operands and sums: as layout.SMALL_BYTES
# Of so many blocks; beyond, a candidate for 32 of them (include/kog/block.h).
SMALL_BLOCKS, CANDIDATE_BYTES = 160, 16


def staged_bytes(lo: CudaLowering, stage: Stage, columns: int = 1) -> int:
    """Of a stage's inputs in shared memory."""
    if columns == 1:
        return lo.staged_bytes(stage)
    steps = lo.steps(stage)
    if not is_wide(stage) or not all_held(lo, stage, columns):
        steps -= held_steps(lo, stage, columns) + read_steps(lo, stage, columns)
    return lo.operands_at(stage, columns) + steps * step_bytes(lo, stage, columns)


def step_bytes(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Of the operands of one step of K in each part."""
    values = lo.tilings[stage.name].k_parts * columns * lo.fragment(stage)[1]
    return values * lo.value_bytes(stage)


def held_steps(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Steps of K whose operands a warp holds in registers."""
    steps = lo.steps(stage)
    if columns == 1:
        return steps if steps <= HELD_STEPS or _few_whole_words(lo, stage) else 0
    if read := read_steps(lo, stage, columns):
        # One at least lies in memory: where all that is not read is held, a loop of Qwen2.5-Coder-1.5B's down_proj
        # spills 22 registers on sm_120a, and 10 with one less.
        return min(HELD_BESIDE_READ_WORDS // row_words(lo, stage, columns), steps - read - 1)
    return _most_held(lo, stage, columns)


def _few_whole_words(lo: CudaLowering, stage: Stage) -> bool:
    return lo.weights[stage.name].integer and whole_words(lo, stage) <= HELD_WHOLE_WORDS


def whole_words(lo: CudaLowering, stage: Stage) -> int:
    """Registers of one token's operands in a part of K, of a stage that multiplies whole numbers: of each fragment what
    include/kog/operands.h, Row, has."""
    how, pack = lo.weights[stage.name].format, lo.weights[stage.name].pack
    assert how
    products = pack // (1 if how.code is Code.E2M1 else 2)
    return lo.unit_fragments(stage) * (2 * products + (1 if how.offset is Offset.NONE else 2))


def read_steps(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """The last steps of down_proj's K, whose operands find no room and are read from memory for each unit."""
    steps = lo.steps(stage)
    laid_out = unit_period(lo.unit_fragments(stage), lo.fragments) > 1 and not lo.long_units(stage)
    if columns == 1 or stage.source != "mlp" or laid_out:
        return 0
    each = step_bytes(lo, stage, columns)
    room = scratch_room(lo) - _fewest_units(lo, stage, columns) * sum_bytes(lo, stage, columns)
    room = max(0, room - lo.operands_at(stage, columns))
    if (steps - _most_held(lo, stage, columns)) * each <= room:
        return 0
    held = HELD_BESIDE_READ_WORDS // row_words(lo, stage, columns)
    return up(steps - held - room // each, read_slots(lo, stage) * lo.fragments * _pack(lo, stage))


def read_slots(lo: CudaLowering, stage: Stage) -> int:
    """How many ring slots ahead those are asked for: as many steps of K, but a whole slot."""
    return max(1, READ_SLOTS // _pack(lo, stage))


def _pack(lo: CudaLowering, stage: Stage) -> int:
    return lo.weights[stage.name].pack


def scratch_room(lo: CudaLowering) -> int:
    """Bytes of operands and sums in a kernel of several columns from which on some are read instead: beside
    a ring that is longer than what is in flight."""
    ring = (lo.window_slots + 1) * (lo.ring_slot_bytes + 16)
    return (lo.gpu.shared_bytes - column_small_bytes(lo) - ring) // 128 * 128


def row_words(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Of the operands of one lane and step of K."""
    if lo.weights[stage.name].integer:
        return 2 if columns == 1 else 4
    tokens = lo.fragment(stage)[0] // (4 if is_wide(stage) else 2)  # that an instruction takes
    return lo.frag_k // 16 * max(1, columns // tokens)


def all_held(lo: CudaLowering, stage: Stage, columns: int) -> bool:
    """Whether a stage's operands are all in registers once they are staged."""
    return held_steps(lo, stage, columns) == lo.steps(stage)


def _most_held(lo: CudaLowering, stage: Stage, columns: int) -> int:
    steps = lo.steps(stage)
    words = row_words(lo, stage, columns)
    if not is_wide(stage):
        how = lo.weights[stage.name].format
        int4 = how is not None and how.code is Code.UINT4 and how.offset is Offset.NONE
        many = int4 and columns == 8 and steps * words > 2 * HELD_NARROW_WORDS
        return min(steps, (HELD_INT4_WORDS if many else HELD_NARROW_WORDS) // words)
    held = HELD_WORDS // words
    # Wide ones, which all come by the scratch, are all there or all in registers, but the head's.
    return steps if held >= steps else _held_of_head(lo, stage, held)


def _held_of_head(lo: CudaLowering, stage: Stage, most: int) -> int:
    """Steps of the head's operands that are in registers before the others take their place in scratch: where no stage
    of a layer keeps as much there, and each warp multiplies what it has staged."""
    wide = [s for s in layer_matrices(lo.schedule) if is_wide(s)]
    tiling, group = lo.tilings[stage.name], GROUP_VALUES // lo.frag_k
    staged = WARPS * slice_values(lo.schedule, lo.frag_k)
    if (
        stage.name != "lm_head"
        or lo.weights[stage.name].integer
        or not all(lo.weights[s.name].integer for s in wide)
        or lo.schedule.num_shards > 1
        or (tiling.k_parts, tiling.fragment_rows) != (WARPS, MMA_ROWS)
        or tiling.padded_k(stage.cols) != staged
    ):
        return 0
    held = most // group * group
    return held if 2 * held <= lo.steps(stage) else 0


def sum_bytes(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Partial sums of one unit."""
    tiling = lo.tilings[stage.name]
    return tiling.unit_rows * columns * tiling.k_parts * 4


def _fewest_units(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Units of a batch that need no room of others."""
    each = lo.unit_fragments(stage)
    # rows x parts are never more than for these
    most = max(PARTIAL_ROWS // MMA_ROWS // columns, unit_period(each, lo.fragments))
    return _whole_ring_slots(lo, each, min(most, THREADS // lo.tilings[stage.name].unit_rows))


def batch_units(lo: CudaLowering, stage: Stage, columns: int = 1) -> int:
    """Units whose partial sums are held at once: whole ring slots, as many rows a thread as columns."""
    return max(
        _fewest_units(lo, stage, columns),
        units_in_place(lo, stage, columns),
        _units_beside(lo, stage, columns),
        _units_behind_held(lo, stage, columns),
        units_over(lo, stage, columns),
    )


def _units_beside(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Units of a stage of 16-bit words, two pieces a warp at most, whose partial sums find room where other
    stages keep more, or where the ring leaves less than a ring slot."""
    if columns == 1 or is_wide(stage):
        return 0
    tiling = lo.tilings[stage.name]
    room = _free_room(lo, columns) - staged_bytes(lo, stage, columns)
    most = 2 * WARPS // unit_pieces(tiling.unit_rows, columns)
    units = min(room // sum_bytes(lo, stage, columns), _most_units(lo, stage), most)
    return _whole_ring_slots(lo, lo.unit_fragments(stage), units)


def _units_behind_held(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Units of a head whose operands take turns, a piece a warp at most, whose partial sums find room twice where other
    stages keep more: all meet at a barrier for each batch (benchmarks/cuda-log.md#longer-ring)."""
    if columns == 1 or not is_wide(stage) or held_steps(lo, stage, columns) in (0, lo.steps(stage)):
        return 0
    room = _free_room(lo, columns) - staged_bytes(lo, stage, columns)
    most = WARPS // unit_pieces(lo.tilings[stage.name].unit_rows, columns)
    units = min(room // (2 * sum_bytes(lo, stage, columns)), most)
    return _whole_ring_slots(lo, lo.unit_fragments(stage), units)


def units_over(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """All units of a block, where their partial sums find room over operands that are in registers by then, and
    over what other stages keep behind those; 0 where they do not, or as many find it otherwise."""
    if columns == 1 or not is_wide(stage) or not all_held(lo, stage, columns):
        return 0
    units = _most_units(lo, stage)
    pieces = units * unit_pieces(lo.tilings[stage.name].unit_rows, columns)
    most = MOST_ROUNDS * WARPS
    if units <= max(units_in_place(lo, stage, columns), _fewest_units(lo, stage, columns)) or pieces > most:
        return 0
    room = _free_room(lo, columns) - lo.operands_at(stage, columns)
    return units if units * sum_bytes(lo, stage, columns) <= room else 0


def _most_units(lo: CudaLowering, stage: Stage) -> int:
    """Of one block, up to the end of a ring slot."""
    period = unit_period(lo.unit_fragments(stage), lo.fragments)
    return up(-(-lo.num_units(stage) // lo.group_size(stage)), period)


def _free_room(lo: CudaLowering, columns: int) -> int:
    """Bytes of scratch that some stage takes in any case, with what the ring leaves less than a ring slot."""
    scratch = up(max(_least_bytes(lo, s, columns) for s in matrix_stages(lo.schedule)), 128)
    rest = (lo.gpu.shared_bytes - column_small_bytes(lo) - scratch) % (lo.ring_slot_bytes + 16)
    return scratch + rest // 128 * 128


def _least_bytes(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Of a stage's operands and partial sums."""
    staged = staged_bytes(lo, stage, columns)
    if is_wide(stage):
        return staged
    return staged + _fewest_units(lo, stage, columns) * sum_bytes(lo, stage, columns)


def units_in_place(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Units whose partial sums find room where operands were that are in registers by then."""
    if columns == 1 or not is_wide(stage) or not all_held(lo, stage, columns):
        return 0
    steps = lo.steps(stage)
    # Of one part's operands.
    words = steps * step_bytes(lo, stage, columns) // lo.tilings[stage.name].k_parts // 4
    rows = lo.tilings[stage.name].unit_rows * columns
    most = min(WARPS, words // rows)  # as many as warps that finish pieces
    return _whole_ring_slots(lo, lo.unit_fragments(stage), most)


def _whole_ring_slots(lo: CudaLowering, fragments_of_unit: int, most: int) -> int:
    """The most units, up to so many, that end with a ring slot; 0 if none do."""
    return next((n for n in range(most, 0, -1) if n * fragments_of_unit % lo.fragments == 0), 0)


def sums_in_place(lo: CudaLowering, stage: Stage, columns: int) -> bool:
    """Whether a stage's partial sums lie where its operands did, each part's in that of its own."""
    return batch_units(lo, stage, columns) == units_in_place(lo, stage, columns)


def sums_over(lo: CudaLowering, stage: Stage, columns: int) -> bool:
    """Whether they lie there and behind it, in that of other parts, too."""
    over = units_over(lo, stage, columns)
    return over > 0 and batch_units(lo, stage, columns) == over


def sum_buffers(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Rooms for partial sums: two where batches follow each other and operands stay beside them."""
    units = -(-lo.num_units(stage) // lo.group_size(stage))
    one = units <= batch_units(lo, stage, columns)
    narrow = columns == 1 or not is_wide(stage)
    return 1 if narrow or one or sums_in_place(lo, stage, columns) else 2


def unit_pieces(unit_rows: int, columns: int) -> int:
    """Pieces of a unit, of which a warp finishes one at once, a sum a lane (columns/rows.h)."""
    return max(1, unit_rows * columns // 32)


def finished_pieces(lo: CudaLowering, stage: Stage, columns: int) -> int:
    """Pieces of a stage that a block finishes in one layer at most (columns/rows.h)."""
    units = -(-lo.num_units(stage) // lo.group_size(stage))
    return units * unit_pieces(lo.tilings[stage.name].unit_rows, columns)


def small_bytes(lo: CudaLowering, of_usual: int) -> int:
    """Of the small things, which take `of_usual` bytes on GPUs of up to SMALL_BLOCKS blocks."""
    blocks = min(lo.num_blocks * lo.schedule.num_ranks, THREADS)  # several a thread beyond
    more = max(0, blocks - SMALL_BLOCKS)
    return of_usual + -(-more // 32) * CANDIDATE_BYTES


def column_small_bytes(lo: CudaLowering) -> int:
    return small_bytes(lo, COLUMN_SMALL_BYTES)


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
