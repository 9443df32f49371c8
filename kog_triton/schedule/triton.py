"""The Triton megakernel's lowering: tiles of 32-bit words, read in one static order.

A tile is [rows, words] of a stage's matrix; a word holds two neighboring weights. Both sizes are powers of two: a row
of another length is read in tiles of several widths. Each block reads its tiles in the order of the layer; one large
or several small ones are always on their way, also while the block waits for its inputs.

    layer:  qkv_proj | o_proj | gate_up_proj | down_proj
    memory: tile i of all blocks lie side by side

Vectors travel as even and odd planes (element 2 j, element 2 j + 1), to match the halves of a word.
"""

from dataclasses import dataclass, replace

from kog_triton.errors import ModelError
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.schedule import exchanges as ex
from kog_triton.schedule.embedding import EmbeddingRow, embedding_row
from kog_triton.schedule.lowering import layer_matrices, matrix_stages
from kog_triton.schedule.schedule import Epilogue, Op, Schedule, Scope, Stage
from kog_triton.schedule.topology import SIZES, Sizes
from kog_triton.schedule.triton_codes import TileCodes, TileShape, tile_codes, unreadable_codes
from kog_triton.schedule.triton_exchanges import arena_exchanges, decode_kernel, prompt_kernel

# From this width on the words of x take registers that a large tile wants (topology.SIZES has the measurement).
WIDE = 4096
# Tokens that one pass of the kernel takes of a prompt: as many as cost little more than one (H200, Llama-3.2-1B: 16 in
# 1.03 ms, 64 in 1.21, 128 in 1.84).
COLUMNS = 64
# Tiles of one stage whose code is written out; for more of them there is a loop.
UNROLLED = 32
# What a loop is taken to cost a stage. In the stages that read x it cost 12 % of the rate (H200, Qwen3-8B: 206 tokens/s
# for 235); in those whose input is gathered it is not measured, and has to save more than that.
LOOPED = 1.4
# Likewise of tiles of 8 bits a weight, whose code is longer: with a loop FP8 of Qwen3-8B makes 324 tokens/s for 311
# (benchmarks/triton-log.md#scales).
UNROLLED_BYTES, LOOPED_BYTES = 8, 1.0
# Of this many or more tiles that fit in one of the best size, several are on their way; two of half the size lost
# (benchmarks/triton-log.md#tiles: 889 us a token for 850). Several were timed nowhere yet (#small-tiles there), rows in
# tiles of several widths, of which MIXED times the best size may be on its way, were (#mixed-widths).
SMALL_TILES = 4
# Bytes of tiles of 4 bits a weight on their way, instead: 505 tokens/s of Qwen3-8B for 489, 2,171 of Llama-3.2-1B for
# 2,054; 105,000 bytes spill (433). Two tiles of FP8 make 377 for 386, of int8 396 for 396 (#scales there).
FOUR_BITS = 72_000
MOST_AHEAD = 8  # and no more, whose code is written out
MIXED = 1.25
# Of a tile of the best size: what a block reads of a matrix on average, where half such tiles win; of 0.58 they lose
# (benchmarks/triton-log.md#small-layers).
SMALL_MATRIX = 0.75
SUMS = 64  # registers of a thread that the sums of a block's rows may take
WIDTHS = (1024, 512, 256, 128, 64, 32)  # words of a tile along K
LINE = 128  # words that one warp reads at once where a thread reads four (backends/triton/kernel/words.py)
# What is taken to cost a block as many bytes of its stream: a tile; a tensor of fewer words than threads, which a wait
# reads in copies (backends/triton/kernel/words.py). With fewer bytes than FLIGHT on their way the stream itself slows.
# None of these is measured: they leave the shapes that were timed as they were (Laneformer-2B's o_proj, 192 words wide,
# in tiles of 128 and 64 has 17 barriers more on sm_90 and reads 1.7 % less of a layer).
TILE_COST, NARROW_COST, THREADS, FLIGHT = 2048, 24 * 1024, 256, 32 * 1024


@dataclass(frozen=True)
class StageTiles:
    """How one matrix stage is cut into tiles: `units` row tiles a block, each in tiles along K of `widths` words.

    A stage whose input is gathered (`wired`) reads all its row tiles at one place of K, then at the next; the others
    one row tile after the other.
    """

    name: str
    index: int
    rows: int  # of the group that shares them
    cols: int
    tile_rows: int
    widths: tuple[int, ...]  # the widest first; a word is two weights
    units: int
    wired: bool
    offset: int = 0  # words from the start of the layer (or of the arena, for the head)
    loop_units: int = 0  # row tiles of one iteration of a loop; 0: no loop
    flight: int = 0  # bytes that may be on their way; one tile is, whatever its size
    most_first: int = MOST_AHEAD  # tiles that the stage before asks for
    codes: TileCodes | None = None  # None: 16 bits a weight; `widths` are words of those in any case

    @property
    def is_narrow(self) -> bool:
        return self.codes is not None

    @property
    def pack(self) -> int:
        """Words of 16-bit weights in one of the tile."""
        return self.codes.pack if self.codes else 1

    def stored_width(self, k: int) -> int:
        """Words of a row of tile `k`."""
        return self.widths[k] // self.pack

    def tile_words(self, k: int) -> int:
        """Of one tile `k`, with its scales."""
        if self.codes:
            return self.codes.words(self.tile_rows, self.widths[k])
        return self.tile_rows * self.widths[k]

    def tile_shape(self, k: int, warps: int) -> TileShape:
        """Of a tile of codes, for a block of so many warps."""
        words = self.stored_width(k)
        wide = min(words, LINE)
        size = self.tile_words(k)
        return TileShape(self.tile_rows, min(self.tile_rows, warps), words // wide, wide // 4, size)

    def operand_words(self, k: int) -> int:
        """Of what tile `k` meets of one column, in memory: two values each; of codes as codes.parts_of has them, with a
        word for every thread and one more for each of its lines."""
        shape = self.tile_shape(k, 1)
        return self.widths[k] + self.is_narrow * shape.threads * (1 + shape.lines)

    def operands_before(self, k: int) -> int:
        """Words of a column's operands before those of tile `k`."""
        return sum(self.operand_words(i) for i in range(k))

    @property
    def operands(self) -> int:
        """Words of a column's."""
        return self.operands_before(self.k_tiles)

    @property
    def k_tiles(self) -> int:
        return len(self.widths)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Tiles along K of one width: the first one, and how many."""
        distinct = dict.fromkeys(self.widths)
        return [(self.widths.index(width), self.widths.count(width)) for width in distinct]

    @property
    def row_words(self) -> int:
        """Of a row, padded."""
        return sum(self.widths)

    @property
    def tiles(self) -> int:
        return self.units * self.k_tiles

    @property
    def block_rows(self) -> int:
        return self.units * self.tile_rows

    @property
    def words(self) -> int:
        """Of one block."""
        return self.units * self.unit_words(self.k_tiles)

    def unit_words(self, tiles: int) -> int:
        """Of a unit's first tiles along K."""
        return sum(self.tile_words(k) for k in range(tiles))

    def place(self, tile: int) -> tuple[int, int]:
        """The unit of a tile, and which of its tiles along K it is."""
        if self.wired:
            return tile % self.units, tile // self.units
        return tile // self.k_tiles, tile % self.k_tiles

    def first_word(self, k: int) -> int:
        """Of tile `k` along K, in its row."""
        return sum(self.widths[:k])

    def begins(self, k: int) -> tuple[int, int]:
        """Words of one block before the first unit's tile `k`, and from there to the next unit's."""
        if self.wired:
            return self.units * self.unit_words(k), self.tile_words(k)
        return self.unit_words(k), self.unit_words(self.k_tiles)

    @property
    def ahead(self) -> int:
        """Tiles on their way as the stage begins."""
        return min(self.asked_before(0), self.most_first)

    def asked_before(self, tile: int, endless: bool = False) -> int:
        """Tiles of the stage that have been asked for before `tile` is multiplied; of one with units without end."""
        end, left = tile + 1, self.flight - 4 * self.tile_words(self.place(tile)[1])
        while (endless or end < self.tiles) and end - tile < MOST_AHEAD:
            left -= 4 * self.tile_words(self.place(end)[1])
            if left < 0:
                break
            end += 1
        return end

    @property
    def looped(self) -> int:
        """Units of a stage that reads row by row all of whose tiles ask for tiles of the stage, as if it had no end."""
        for tile in range(self.tiles):
            if self.asked_before(tile) == self.tiles or self.asked_before(tile + 1, True) > self.tiles:
                return tile // self.k_tiles
        return self.units


@dataclass(frozen=True)
class Tiles:
    """Everything the kernel knows at compile time. Offsets count words (int32) of the words arena."""

    vendor: str  # "nvidia", "amd" or "cpu": whose instructions, in backends/triton/kernel/sync.py
    sizes: Sizes  # the vendor's
    num_layers: int
    hidden_size: int
    heads: int  # of one lane
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    norm_eps: float
    f16: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    lane_norms: bool
    lanes: int
    delay: int
    delayed_buffers: int
    head_mode: int
    num_blocks: int
    group: int  # blocks of one lane
    splits: int  # of the context, for each key/value head
    max_context: int
    stages: tuple[StageTiles, ...]  # qkv_proj, o_proj, gate_up_proj, down_proj, lm_head
    layer_words: int
    columns: int = COLUMNS  # tokens of a prompt's chunk
    profile: int = 0  # layer runs whose times are written down
    embedding: EmbeddingRow | None = None  # of a narrow one

    def asked_by(self, stage: int, tile: int) -> tuple[int, int, int, bool]:
        """What a block asks for when it has multiplied a tile: stage, first tile, how many, and whether they are of
        the next layer (or token).

        They are the stage's own until all of those have been asked for; then the next stage's first tiles, as many of
        them with each of the stage's last ones as have come by its end.
        """
        own, following = self.stages[stage], (stage + 1) % 4 if stage < 4 else 0
        asked = own.asked_before(tile)
        if asked < own.tiles:
            return stage, asked, own.asked_before(tile + 1) - asked, False
        ends = range(max(0, own.tiles - MOST_AHEAD), own.tiles)
        last = next(t for t in ends if own.asked_before(t) == own.tiles)
        count = self.stages[following].ahead
        first, end = (count * (n - last) // (own.tiles - last) for n in (tile, tile + 1))
        return following, first, end - first, following == 0

    @property
    def has_narrow_embedding(self) -> bool:
        return self.embedding is not None

    @property
    def has_narrow_layers(self) -> bool:
        return any(stage.is_narrow for stage in self.stages[:4])

    @property
    def head_alike(self) -> bool:
        """Whether the head's tiles are of the form of qkv_proj's."""
        return self.stages[0].codes == self.stages[4].codes

    @property
    def head_words(self) -> int:
        """Of lm_head; a concatenated head is one of these a lane."""
        return self.stages[4].words * self.num_blocks

    @property
    def asked_at_head(self) -> int:
        """Words that are read from the head's first on as if they were qkv_proj's tiles; a small head has fewer."""
        first = self.stages[0]
        unit, k = first.place(first.ahead - 1)  # the last of them ends last
        begin, step = first.begins(k)
        return self.num_blocks * (begin + unit * step + first.tile_words(k))

    # ---- the words arena ----

    @property
    def qkv_words(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim // 2

    @property
    def attention_words(self) -> int:
        return self.heads * self.head_dim // 2

    def fine_pairs(self, stage: int) -> bool:
        """Whether the values that a stage reads are fine pairs (wire.py); of stage 0 also what qkv_proj publishes."""
        return self.stages[stage].is_narrow and not self.f16

    @property
    def outputs_in_pairs(self) -> bool:
        """Whether a module's outputs leave a block as pairs of 16 bits: half the words for all blocks to read."""
        return self.lanes == 1 and not self.f16

    @property
    def split_words(self) -> int:
        """Of one split of one key/value head: the output of every query head, and how much it weighs."""
        return self.heads // self.kv_heads * (self.head_dim + 1)

    @property
    def regions(self) -> dict[str, tuple[int, int]]:
        """Offset and size of each exchange."""
        regions = ex.lay_out_regions(arena_exchanges(self), 1)
        return {name: (r.offset, r.size) for name, r in regions.items()}

    def region(self, name: str) -> int:
        return self.regions[name][0]

    @property
    def total_words(self) -> int:
        end = max(offset + size for offset, size in self.regions.values())
        return -(-end // 32) * 32


def lower_tiles(
    schedule: Schedule, num_blocks: int, max_context: int, vendor: str = "nvidia", tile_bytes: int = 0
) -> Tiles:
    """The tiles of a model on one GPU, at most `tile_bytes` each (0: the vendor's best).

    ModelError names what the kernel cannot do.
    """
    spec = schedule.spec
    if schedule.num_ranks != 1:
        raise ModelError("the triton backend runs on one GPU: choose --gpus 1")
    if spec.dtype is DType.F32:
        raise ModelError("the triton backend reads 16-bit weights: choose --dtype bf16 or fp16")
    if reason := unreadable_codes(schedule):
        raise ModelError(f"the triton backend: {reason}")
    for name in ("hidden_size", "lane_intermediate_size", "head_dim"):
        if getattr(spec, name) % 4:
            raise ModelError(f"the triton backend needs {name} {getattr(spec, name)} in steps of four")
    lanes = schedule.shards_per_rank
    delayed = Reduce.DELAYED in spec.reduce_attention + spec.reduce_mlp
    sizes = SIZES[vendor]
    each = num_blocks // lanes
    largest = (tile_bytes,) if tile_bytes else _largest_tiles(schedule, num_blocks, sizes)
    tilings = [_tile_stages(schedule, each, size) for size in largest]
    group, stages = min(tilings, key=lambda t: _words_read(t, spec.num_layers))
    tiles = Tiles(
        vendor=vendor,
        sizes=sizes,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        heads=spec.lane_heads,
        kv_heads=spec.lane_kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.lane_intermediate_size,
        vocab_size=spec.vocab_size,
        norm_eps=spec.norm_eps,
        f16=spec.dtype is DType.F16,
        qkv_bias=spec.qkv_bias,
        o_bias=spec.o_bias,
        mlp_bias=spec.mlp_bias,
        qk_norm=spec.qk_norm,
        lane_norms=spec.lane_norms,
        lanes=lanes,
        delay=spec.delay if delayed else 0,
        delayed_buffers=3 * spec.delay if delayed else 0,
        head_mode=int(spec.head),
        num_blocks=group * lanes,
        group=group,
        splits=max(1, group // spec.lane_kv_heads),
        max_context=max_context,
        stages=stages,
        layer_words=sum(s.words for s in stages[:4]) * group * lanes,
        embedding=embedding_row(spec),
    )
    try:
        for kernel in (decode_kernel(tiles, schedule), prompt_kernel(tiles, schedule)):
            ex.check_kernel(kernel)
    except ModelError as error:
        raise ModelError(f"the triton backend cannot reduce lanes so: {error}") from None
    return tiles


def _largest_tiles(schedule: Schedule, num_blocks: int, sizes: Sizes) -> tuple[int, ...]:
    """Bytes of the largest tile, the better first if both read as much.

    Half as much is better where a block reads a tile of the best size of a matrix, or a little less: what is on its way
    beyond that only holds up polls.
    """
    if schedule.spec.hidden_size >= WIDE:
        return (sizes.wide_tile_bytes,)
    layer = sum(stage.rows * stage.cols for stage in layer_matrices(schedule))
    mean = 2 * layer * schedule.shards_per_rank // (4 * num_blocks)
    small = SMALL_MATRIX * sizes.tile_bytes <= mean < sizes.tile_bytes
    return (sizes.small_tile_bytes, sizes.tile_bytes) if small else (sizes.tile_bytes,)


def _words_read(tiling: tuple[int, tuple[StageTiles, ...]], layers: int) -> int:
    """By all blocks of a lane, for a token."""
    group, stages = tiling
    return group * sum(s.words * (1 if s.name == "lm_head" else layers) for s in stages)


Option = tuple[float, int, int, tuple[StageTiles, ...]]  # cost, -blocks of a lane, -words, stages


def _tile_stages(schedule: Schedule, most: int, tile_bytes: int) -> tuple[int, tuple[StageTiles, ...]]:
    """Blocks of a lane, at most `most`, and every stage's tiling.

    As many blocks as share rows in tiles that need no loop, or those with loops if a block then reads less.
    """
    spec = schedule.spec
    if most < 1:
        raise ModelError(
            f"the triton backend needs a block for each of {spec.num_lanes} lanes: "
            "choose a GPU with more multiprocessors, or --backend reference"
        )
    groups = {_owners(spec.hidden_size, n) for n in range(-(-most // 2), most + 1)}
    options = [o for group in groups for o in _options_over(schedule, group, tile_bytes)]
    if not options:
        raise ModelError(
            f"the triton backend has no tiles for hidden_size {spec.hidden_size} over {most} blocks a "
            "lane: choose a GPU with more multiprocessors, or --backend reference"
        )
    looped = [o for o in options if any(stage.loop_units for stage in o[3])]
    straight = [o for o in options if o not in looped]
    straight = sorted(straight, key=lambda o: (o[1], o[0], o[2]))[:1]
    _, fewer, _, stages = min(looped + straight, key=lambda o: o[:3])
    return -fewer, stages


def _owners(rows: int, most: int) -> int:
    """Blocks, at most `most`, each of which owns rows of the residual stream (schedule/check.py says why)."""
    share = 2 * -(-rows // (2 * most))  # rows of a block, whole words
    return -(-rows // share)


def _options_over(schedule: Schedule, group: int, tile_bytes: int) -> list[Option]:
    """Tilings of every stage over `group` blocks a lane, one for each width of the residual stream that fits."""
    spec = schedule.spec
    blocks = group * schedule.shards_per_rank
    # The stages that read the residual stream hold it in one shape.
    options: list[Option] = []
    for widths in _cuts(spec.hidden_size):
        stages: list[StageTiles] = []
        offset, cost = 0, 0.0
        for index, stage in enumerate(matrix_stages(schedule)):
            name, codes = stage.name, tile_codes(schedule, stage)
            if name == "lm_head" and spec.head is Head.CONCAT:
                stage = replace(stage, cols=spec.hidden_size)  # lane by lane
            shared = stage.prologue.name == "RMS_NORM" or name == "lm_head"
            cuts = [widths] if shared else _cuts(stage.cols)
            size = blocks if stage.scope is Scope.ALL else group
            tilings = [t for cut in cuts for t in _stage_tilings(stage, index, size, cut, tile_bytes, codes)]
            if name == "lm_head" and codes == stages[0].codes:  # see below
                tilings = [t for t in tilings if t.tile_rows == stages[0].tile_rows]
            tiling = min(tilings, key=_cost, default=None)
            if tiling is None:
                break
            base = 0 if name == "lm_head" else offset
            offset += tiling.words * blocks
            cost += _cost(tiling) * (1 if name == "lm_head" else spec.num_layers)
            stages.append(replace(tiling, offset=base))
        # The residual stream is held in registers, at most eight tensors a plane.
        if len(stages) == 5 and stages[0].k_tiles <= 8:
            # The tile before lm_head asks for its first as for qkv_proj's.
            both = min(stages[0].ahead, stages[4].ahead)
            stages[0], stages[4] = (replace(stages[i], most_first=both) for i in (0, 4))
            options.append((cost, -group, -widths[0], tuple(stages)))
    return options


def _cuts(cols: int) -> list[tuple[int, ...]]:
    """Widths of tiles along K: equal ones, then smaller and smaller ones; the last may reach beyond the end."""
    cuts: dict[tuple[int, ...], None] = {}
    for words in WIDTHS:
        for least in (w for w in WIDTHS if w <= words):
            cut, left = [], -(-cols // (2 * least)) * least
            for width in (w for w in WIDTHS if least <= w <= words):
                cut += [width] * (left // width)
                left %= width
            cuts[tuple(cut)] = None
    return list(cuts)


def _flight(s: StageTiles, tile_bytes: int) -> int:
    """Bytes of tiles that may be on their way: of 4 bits, or where tiles are small or mixed, more than one of them."""
    sizes = {4 * s.tile_words(k) for k in range(s.k_tiles)}
    if s.pack == 4 and not s.loop_units:
        return FOUR_BITS
    if s.loop_units or (len(sizes) == 1 and max(sizes) * SMALL_TILES > tile_bytes):
        return 0
    return tile_bytes if len(sizes) == 1 else int(MIXED * tile_bytes)


def _cost(s: StageTiles) -> float:
    """Bytes that a block reads, and what else a stage costs, as bytes."""
    narrow = sum(width < THREADS for width in s.widths)  # tensors of x are as wide as their tiles
    tile = 4 * s.words / s.tiles
    starved = max(1.0, FLIGHT / max(min(s.flight, MOST_AHEAD * tile), tile))
    streamed = 4 * s.words * starved + s.tiles * TILE_COST
    looped = LOOPED_BYTES if s.pack == 2 else LOOPED
    return (streamed + narrow * NARROW_COST) * (looped if s.loop_units else 1.0)


def _loop_units(units: int, k_tiles: int, most: int) -> int | None:
    """Row tiles in one iteration of a loop whose code has at most `most` tiles; 0: no loop; None: too many K tiles."""
    if units * k_tiles <= most:
        return 0
    fitting = (n for n in range(1, units) if k_tiles * (n + units % n) <= most)
    return max(fitting, default=None)


def _warps_in_one_run(tile_rows: int, words: int) -> bool:
    """Whether the warps that share a row of such a tile are numbered in one run.

    Where threads have fewer than four words a line takes two warps; of several lines the rows' warps stand between
    those two and the next line's, and Triton 3.6 then adds the wrong ones (benchmarks/triton-log.md#split-warps).
    """
    return words <= LINE or tile_rows * words >= 4 * THREADS


def _stage_tilings(
    stage: Stage, index: int, size: int, widths: tuple[int, ...], tile_bytes: int, codes: TileCodes | None = None
) -> list[StageTiles]:
    """Cuts of a stage with tiles of these widths over `size` blocks."""
    out = []
    rows = stage.rows
    woven = stage.epilogue is Epilogue.SILU_MUL
    step = 4 if woven else 2  # a block publishes whole words
    share = -(-rows // size)
    share = -(-share // step) * step
    wired = stage.op is Op.MATVEC and stage.epilogue is Epilogue.RESIDUAL
    pack = codes.pack if codes else 1
    most = max(UNROLLED_BYTES, len(widths)) if pack == 2 else UNROLLED
    if widths[-1] < WIDTHS[-1] * pack:
        return []
    tile_rows = step
    while tile_rows <= 128:
        units = -(-share // tile_rows)
        fits = 4 * tile_rows * widths[0] // pack <= tile_bytes and all(
            _warps_in_one_run(tile_rows, words // pack) for words in widths
        )
        loop_units = _loop_units(units, len(widths), most) if wired else 0
        if wired:  # every block has rows of its own, and sums of all of them
            sums = units * max(1, tile_rows // 8)
            fits = fits and units * tile_rows * (size - 1) < rows and (not loop_units or sums <= SUMS)
        if fits and loop_units is not None:
            shape = (rows, stage.cols, tile_rows, widths, units, wired)
            tiling = StageTiles(stage.name, index, *shape, loop_units=loop_units, codes=codes)
            out.append(replace(tiling, flight=_flight(tiling, tile_bytes)))
        tile_rows *= 2
    return out
