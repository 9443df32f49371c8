"""What the blocks of the CUDA kernels exchange: of one token (include/kog), of several columns (include/kog/columns).

Layouts take their regions from here, the proof (kog_triton/schedule/exchanges.py) the walk of a block: a stage is one
step or several, a step that only waits has the wait's name (names.py). SOME blocks own units of qkv_proj and
gate_up_proj, and of attention; check_partition sees to it that EACH owns rows of o_proj and down_proj.
"""

from dataclasses import replace

from kog_triton.backends.cuda.layout.attention import BUNDLE, QUERY_TOPS
from kog_triton.backends.request_words import MOST_LOGPROBS
from kog_triton.model.spec import Head, ModelSpec, Reduce
from kog_triton.schedule import exchanges as ex
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import Schedule, Scope

Layers = tuple[int, ...]
Steps = tuple[str, ...]

BINS = 256  # of a histogram of logits
FLAGS_TOGETHER, LINE_WORDS = 8, 32  # hints of blocks in one line of the L2 (columns/layer.h)
STEPS = {"o_proj": ("o_proj", "o_proj_sum"), "down_proj": ("down_proj", "down_proj_sum", "layer_end")}
DECODE_STEPS = STEPS | {"attention": ("attention", "attention_join")}
COLUMN_STEPS = STEPS | {"attention": ("attention", "attention_flag", "attention_join")}
# Outputs of a module, the stage that writes them, the step that waits for them; the other module's stage.
MODULES = (("attention_out", "o_proj", "gate_up_proj", "down_proj"), ("mlp_out", "down_proj", "layer_end", "o_proj"))
# What ends a token. A choice (choose.h) draws, checks top-p of the argmax, draws again, finds the cut level by level,
# delivers log-probabilities. What has more of this has one of these in it, and more that blocks learn of each other.
AGREE: Steps = ("candidate", "argmax")
AGREE_ON_COLUMNS = ("column_candidate", "column_pick", "column_argmax")
PEAKS, LEVEL = ("peak", "peaks"), ("bin", "histogram", "cut")
RANK: Steps = ("own_logit", "chosen", "best", "ahead")
SURVIVES = ("draw", *PEAKS, "top_p_check", "share", "shares")
CHOICES = (
    AGREE,
    SURVIVES,
    (*SURVIVES, "rank", *RANK),
    (*SURVIVES, "draw", "top_p_check", "share", "shares"),
    (*SURVIVES, *LEVEL, *LEVEL, *AGREE),
    ("draw", *PEAKS, *AGREE),  # no id can be chosen
    (*PEAKS, "rank", *AGREE, *RANK),
)

CACHE = ex.cache_of("attention")


def decode_kernel(lowering: CudaLowering, splits: int) -> ex.Kernel:
    """The kernel that runs one token at a time."""
    schedule, spec = lowering.schedule, lowering.schedule.spec
    lanes, last, hidden = schedule.num_shards, ex.distinct_layers(spec) - 1, spec.hidden_size
    pairs = {stage.name: -(-stage.outputs // 2) for _, stage in schedule.walk()}
    late, to_all = Reduce.DELAYED in _hows(spec), []
    at_once = hidden if lanes > 1 and Reduce.NOW in _hows(spec) else 0
    # fmt: off
    out = [
        ex.some("qkv", "qkv_proj", ("attention",), pairs["qkv_proj"], lanes),
        ex.some("attention", "attention_join", ("o_proj",), pairs["attention"], lanes),
        ex.some("mlp", "gate_up_proj", ("down_proj",), pairs["gate_up_proj"], lanes),
    ]
    for name, stage, step, _ in MODULES:
        now, own, delayed = _reduces(schedule, stage)
        # Sent in every layer, behind the wait for what the others sent.
        later = (ex.Reader(stage, ex.Of.OWN, layers=delayed, delay=spec.delay),)
        words, buffers = (hidden, 3 * spec.delay) if late else (0, 1)
        at = (ex.Reader(step),)
        out.append(ex.Exchange(name, f"{stage}_sum", at, hidden, lanes, layers=own))
        to_all += [
            ex.Exchange(f"{name}_now", f"{stage}_sum", at, at_once, lanes, 2, scope=Scope.ALL, layers=now),
            ex.Exchange(f"{name}_delayed", stage, later, words, lanes, buffers, scope=Scope.ALL),
        ]
    # fmt: on
    out += to_all
    for name, words, rows in _splits(schedule.spread, lanes * schedule.shard_kv_heads, splits):
        out.append(ex.some(name, "attention", ("attention_join", "o_proj"), words, rows))
    mixes, ends = _mix(spec, 1, AGREE)
    out += [*mixes, *_choice(lowering.num_blocks * schedule.num_ranks), CACHE]
    fences = (ex.Fence("down_proj", (last,)), ex.Fence("layer_end", (last,)))
    steps = ex.layer_steps(schedule, DECODE_STEPS)
    ranks = schedule.num_ranks
    kernel = ex.Kernel(lanes, last + 1, tuple(out), steps, ends, fences, ranks)
    return _with_buffers(kernel, "_delayed")


def column_kernel(lowering: CudaLowering, splits: int, columns: int) -> ex.Kernel:
    """The kernel of several columns: requests, or positions of one prompt."""
    schedule, spec = lowering.schedule, lowering.schedule.spec
    lanes, last, hidden = schedule.num_shards, ex.distinct_layers(spec) - 1, spec.hidden_size
    stages = {stage.name: stage for stage in matrix_stages(schedule)}
    padded = {name: lowering.padded_k(stage) // 2 * columns for name, stage in stages.items()}
    hints = -(-lowering.group_size(stages["qkv_proj"]) // FLAGS_TOGETHER) * LINE_WORDS
    heads, rows, ranks = schedule.shard_kv_heads * columns, lanes * columns, schedule.num_ranks
    blocks = lowering.num_blocks * ranks
    # fmt: off
    out = [
        ex.some("qkv", "qkv_proj", ("attention",), -(-stages["qkv_proj"].outputs // 2), rows),
        ex.some("attention", "attention_join", ("o_proj",), padded["o_proj"], lanes),
        ex.some("mlp", "gate_up_proj", ("down_proj",), padded["down_proj"], lanes),
        _hints("attention_heads", "attention_join", "o_proj", schedule.shard_heads * columns, lanes),
        # Not written in every layer: their flags alone tell of splits.
        *(ex.some(name, "attention", ("attention_join",), words, count, ex.Mark.GUARDED)
          for name, words, count in _splits(schedule.spread, lanes * heads, splits)),
        _hints("attention_flags", "attention_flag", "attention_join", heads * splits, lanes),
    ]
    for name, stage, step, other in MODULES:
        now, _, delayed = _reduces(schedule, stage)
        needed = tuple(n for n in range(spec.num_layers) if n in now or n + spec.delay in delayed)
        words, to = hidden if needed and lanes > 1 else 0, f"{stage}_sum"
        # Who owns a row of the next module's adds to the stream, which begins with the embedding.
        layers = None if other == "down_proj" else tuple(range(1, last + 1))
        again = ex.Reader(f"{other}_sum", ex.Of.SOME, layers=layers)
        late = (ex.Reader(stage, ex.Of.OWN, layers=delayed, delay=spec.delay), ex.Reader(to, ex.Of.OWN, layers=now))
        out += [
            ex.Exchange(name, to, (ex.Reader(step), again), hidden, rows),
            _hints(f"{name}_flags", to, step, -(-hidden // 4), lanes),
            ex.Exchange(f"{name}_sent", stage, late, words, rows, scope=Scope.ALL, layers=needed),
        ]
    mixes, ends = _mix(spec, columns, AGREE_ON_COLUMNS)
    pick = ex.Reader("column_pick", who=ex.Who.FEW)
    out += [
        _hints("mlp_flags", "gate_up_proj", "down_proj", hints, lanes),
        *mixes,
        # Of ranks that never meet one may be a token ahead of another, which picks for itself.
        _numbered("column_best", "column_candidate", pick, 4 * 2 * blocks * columns, 2 if ranks > 1 else 1),
        ex.Exchange("column_argmax", "column_pick", (ex.Reader("column_argmax"),), 2 * 2 * columns, 1, 1,
                    ex.Mark.NUMBER, ex.Who.FEW, Scope.RANK),
        *_choice(blocks),
        CACHE,
    ]
    # fmt: on
    fences = (
        *(ex.Fence(step, who=ex.Who.SOME) for step in ("attention_flag", "attention_join")),
        *(ex.Fence(step, (last,)) for step in ("down_proj_sum", "layer_end")),
    )
    steps = ex.layer_steps(schedule, COLUMN_STEPS)
    return _with_buffers(ex.Kernel(lanes, last + 1, tuple(out), steps, ends, fences, ranks), "_sent")


def _hows(spec: ModelSpec) -> set[Reduce]:
    return set(spec.reduce_attention + spec.reduce_mlp)


def _reduces(schedule: Schedule, stage: str) -> tuple[Layers, Layers | None, Layers]:
    """Layers whose outputs of a module go to all lanes at once; to their own lane, None for all; and those that add
    what other lanes sent before."""
    spec = schedule.spec
    how = spec.reduce_attention if stage == "o_proj" else spec.reduce_mlp
    now, own, late = (
        tuple(n for n, h in enumerate(how) if h in which)
        for which in ((Reduce.NOW,), (Reduce.OWN, Reduce.DELAYED), (Reduce.DELAYED,))
    )
    return now, own if schedule.num_shards > 1 else None, late


def _hints(name: str, producer: str, reader: str, words: int, rows: int) -> ex.Exchange:
    """Numbers of layer runs beside words of the same step."""
    return ex.some(name, producer, (reader,), words, rows, ex.Mark.NUMBER)


def _numbered(
    name: str, producer: str, reader: ex.Reader, words: int, buffers: int = 1, who: ex.Who = ex.Who.EACH
) -> ex.Exchange:
    """Of all blocks, two words a value under the number of the exchange (exchange.h)."""
    return ex.Exchange(name, producer, (reader,), words, 1, buffers, ex.Mark.NUMBER, who, Scope.ALL)


def _splits(spec: ModelSpec, heads: int, splits: int) -> list[tuple[str, int, int]]:
    """Words and rows: outputs of every split of `heads` key/value heads, and the logarithms of their sums."""
    return [
        ("splits", spec.group * (spec.head_dim // 2), heads * splits),
        ("split_tops", spec.group * QUERY_TOPS, heads * -(-splits // BUNDLE)),
    ]


def _mix(spec: ModelSpec, columns: int, agree: Steps) -> tuple[list[ex.Exchange], tuple[Steps, ...]]:
    """What the head scores of the lanes' streams, if they are mixed; and the ends of a token."""
    mixed = spec.hidden_size if spec.num_lanes > 1 and spec.head is not Head.VOCAB_PARALLEL else 0
    joined = 0 if spec.head is Head.CONCAT else mixed
    part = ex.Reader("mix_lanes", ex.Of.SOME, ex.Who.FEW) if joined else ex.Reader("mix_gather")
    y, hint = (ex.Reader("mix_gather"),), (ex.Reader("mix_gather", ex.Of.SOME),)
    joins, few = "mix_lanes" if joined else "", (ex.Who.FEW, Scope.RANK)
    words = mixed if columns > 1 else joined
    out = [
        ex.Exchange("part", "mix", (part,), mixed, spec.num_lanes * columns, scope=Scope.ALL),
        ex.Exchange("y", joins, y, words, columns, 1, ex.Mark.PHASE, *few),
    ]
    if columns > 1:
        out.append(ex.Exchange("y_flags", joins, hint, -(-mixed // 4), 1, 1, ex.Mark.NUMBER, *few))
    steps = ("mix", *(("mix_lanes",) if joined else ()), "mix_gather") if mixed else ()
    ends = ((), agree, *CHOICES, (*steps, *agree), (*steps, *SURVIVES))
    return out, tuple(dict.fromkeys(ends))


def _choice(blocks: int) -> list[ex.Exchange]:
    """What all blocks tell each other about one token's logits."""
    few = ex.Reader("histogram", who=ex.Who.FEW)
    best, ahead = (ex.Reader(step, who=ex.Who.ONE) for step in ("best", "ahead"))
    return [
        _numbered("argmax", "candidate", ex.Reader("argmax"), 4 * 2 * blocks, 2),
        _numbered("peak", "peak", ex.Reader("peaks"), 2 * 2 * blocks),
        _numbered("top_p_check", "draw", ex.Reader("top_p_check"), 3 * 2 * 2 * blocks),
        _numbered("shares", "share", ex.Reader("shares"), 3 * 2 * 2 * blocks),
        _numbered("bin_part", "bin", few, BINS * 4 * 2 * blocks),
        _numbered("bin", "histogram", ex.Reader("cut"), BINS * 4 * 2, who=ex.Who.FEW),
        _numbered("best", "rank", best, 2 * 2 * (MOST_LOGPROBS + 1) * blocks, 2),
        _numbered("chosen", "own_logit", ex.Reader("chosen"), 2 * 2, 2, who=ex.Who.SOME),
        _numbered("ahead", "chosen", ahead, 2 * 2 * blocks, 2),
    ]


def _with_buffers(kernel: ex.Kernel, kind: str) -> ex.Kernel:
    """As many buffers of the exchanges of a kind as the proof takes, but no fewer than they have. What blocks learn
    from one of them is no argument for another: a model may have one alone."""

    def needed(exchange: ex.Exchange) -> ex.Exchange:
        if not exchange.name.endswith(kind) or not exchange.is_used:
            return exchange
        others = (e for e in kernel.exchanges if e is exchange or not e.name.endswith(kind))
        alone = replace(kernel, exchanges=tuple(others))
        return replace(exchange, buffers=ex.fewest_buffers(alone, exchange.name))

    return replace(kernel, exchanges=tuple(map(needed, kernel.exchanges)))
