"""What the blocks of the CUDA kernels exchange: of one token (include/kog), of several columns (include/kog/columns).

Layouts take their regions from here, the proof (kog_triton/schedule/exchanges.py) the walk of a block: a stage is one
step or several, a step that only waits has the wait's name (names.py). SOME blocks own units of qkv_proj and
gate_up_proj, and of attention; check_partition sees to it that EACH owns rows of o_proj and down_proj.
"""

from collections.abc import Sequence
from dataclasses import replace

from kog_triton.backends.cuda.layout.attention import BUNDLE, QUERY_TOPS

from kog_triton.backends.request_words import MOST_LOGPROBS
from kog_triton.model.spec import Head, ModelSpec, Reduce
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.exchanges import (
    Exchange,
    Fence,
    Kernel,
    Mark,
    Of,
    Reader,
    Who,
    distinct_layers,
    fewest_buffers,
    layer_steps,
)
from kog_triton.schedule.schedule import Scope

BINS = 256  # of a histogram of logits
FLAGS_TOGETHER, LINE_WORDS = 8, 32  # hints of blocks in one line of the L2 (columns/layer.h)
STEPS = {
    "o_proj": ("o_proj", "o_proj_sum"),
    "down_proj": ("down_proj", "down_proj_sum", "layer_end"),
}
DECODE_STEPS = STEPS | {"attention": ("attention", "attention_join")}
COLUMN_STEPS = STEPS | {"attention": ("attention", "attention_flag", "attention_join")}
MODULES = (
    ("attention_out", "o_proj", "gate_up_proj"),
    ("mlp_out", "down_proj", "layer_end"),
)
# What ends a token. A choice (choose.h) draws, finds the winner's fate, draws again, finds the cut level by level,
# delivers log-probabilities. What has more of this has one of these in it, and more that blocks learn of each other.
AGREE = ("candidate", "winner")
AGREE_ON_COLUMNS = ("column_candidate", "judge", "column_winner")
PEAKS, LEVEL = ("peak", "peaks"), ("bin", "histogram", "cut")
SURVIVES = ("draw", *PEAKS, "trial", "share", "shares")
CHOICES = (
    AGREE,
    SURVIVES,
    (*SURVIVES, "rank", "best"),
    (*SURVIVES, "draw", "trial", "share", "shares"),
    (*SURVIVES, *LEVEL, *LEVEL, *AGREE),
    ("draw", *PEAKS, *AGREE),  # no id can be chosen
    (*PEAKS, "rank", *AGREE, "best"),
)


def decode_kernel(lowering: CudaLowering, splits: int) -> Kernel:
    """The kernel that runs one token at a time."""
    schedule, spec = lowering.schedule, lowering.schedule.spec
    lanes, last = schedule.num_shards, distinct_layers(spec) - 1
    out = [
        _some(
            "qkv", "qkv_proj", ("attention",), -(-schedule.stage("qkv_proj").outputs // 2), lanes
        ),
        _some(
            "attention",
            "attention_join",
            ("o_proj",),
            -(-schedule.stage("o_proj").cols // 2),
            lanes,
        ),
        _some(
            "mlp",
            "gate_up_proj",
            ("down_proj",),
            -(-schedule.stage("gate_up_proj").outputs // 2),
            lanes,
        ),
    ]
    late = []
    for name, stage, reader in MODULES:
        now, own, delayed = _reduces(spec, stage)
        add = f"{stage}_sum"
        out.append(Exchange(name, add, (Reader(reader),), spec.hidden_size, lanes, layers=own))
        hidden = spec.hidden_size if lanes > 1 and Reduce.NOW in _hows(spec) else 0
        late.append(
            Exchange(
                f"{name}_now", add, (Reader(reader),), hidden, lanes, 2, scope=Scope.ALL, layers=now
            )
        )
        # Sent in every layer, and before this layer's wait for what the others have sent.
        past = Reader(stage, Of.OWN, layers=delayed, delay=spec.delay)
        hidden = spec.hidden_size if Reduce.DELAYED in _hows(spec) else 0
        late.append(
            Exchange(
                f"{name}_past",
                stage,
                (past,),
                hidden,
                lanes,
                3 * spec.delay if hidden else 1,
                scope=Scope.ALL,
            )
        )
    out += late
    for name, words, rows in _splits(spec, lanes * spec.lane_kv_heads, splits):
        out.append(_some(name, "attention", ("attention_join", "o_proj"), words, rows))
    mixes, ends = _mix(spec, 1, AGREE)
    out += [*mixes, *_choice(lowering.num_blocks), _cache("attention")]
    fences = (Fence("down_proj", (last,)), Fence("layer_end", (last,)))
    steps = layer_steps(schedule, DECODE_STEPS)
    kernel = Kernel("decode", lanes, last + 1, tuple(out), steps, ends, fences)
    return _with_buffers(kernel, [e.name for e in late if e.name.endswith("_past")])


def column_kernel(lowering: CudaLowering, splits: int, columns: int) -> Kernel:
    """The kernel of several columns: requests, or positions of one prompt."""
    schedule, spec = lowering.schedule, lowering.schedule.spec
    lanes, last, group = (
        schedule.num_shards,
        distinct_layers(spec) - 1,
        lowering.group_size(schedule.stage("qkv_proj")),
    )
    padded = {
        name: lowering.padded_k(schedule.stage(name)) // 2 * columns
        for name in ("o_proj", "down_proj")
    }
    heads, rows = spec.lane_kv_heads * columns, lanes * columns
    out = [
        _some("qkv", "qkv_proj", ("attention",), -(-schedule.stage("qkv_proj").outputs // 2), rows),
        _some("attention", "attention_join", ("o_proj",), padded["o_proj"], lanes),
        _some("mlp", "gate_up_proj", ("down_proj",), padded["down_proj"], lanes),
        _hints("attention_heads", "attention_join", "o_proj", spec.lane_heads * columns, lanes),
    ]
    for name, words, count in _splits(spec, lanes * heads, splits):
        # Their flags alone tell that they are there: they are not written in every layer.
        out.append(_some(name, "attention", ("attention_join",), words, count, Mark.GUARDED))
    out.append(_hints("attention_flags", "attention_flag", "attention_join", heads * splits, lanes))
    sent = []
    for name, stage, reader in MODULES:
        now, _, delayed = _reduces(spec, stage)
        add, other = (
            f"{stage}_sum",
            {"attention_out": "down_proj_sum", "mlp_out": "o_proj_sum"}[name],
        )
        # Rows are read again by the owner of the next module's, who adds to them; a step begins with the embedding.
        again = Reader(
            other, Of.SOME, layers=None if name == "attention_out" else tuple(range(1, last + 1))
        )
        out.append(Exchange(name, add, (Reader(reader), again), spec.hidden_size, rows))
        out.append(_hints(f"{name}_flags", add, reader, -(-spec.hidden_size // 4), lanes))
        needed = tuple(n for n in range(spec.num_layers) if n in now or n + spec.delay in delayed)
        readers = (
            Reader(stage, Of.OWN, layers=delayed, delay=spec.delay),
            Reader(add, Of.OWN, layers=now),
        )
        out.append(
            Exchange(
                f"{name}_sent",
                stage,
                readers,
                spec.hidden_size if needed and lanes > 1 else 0,
                rows,
                scope=Scope.ALL,
                layers=needed,
            )
        )
        sent.append(f"{name}_sent")
    out.append(
        _hints(
            "mlp_flags",
            "gate_up_proj",
            "down_proj",
            -(-group // FLAGS_TOGETHER) * LINE_WORDS,
            lanes,
        )
    )
    mixes, ends = _mix(spec, columns, AGREE_ON_COLUMNS)
    best = Reader("judge", who=Who.FEW)
    out += [
        *mixes,
        _numbered("column_best", "column_candidate", best, 4 * 2 * lowering.num_blocks * columns),
        _numbered("column_winner", "judge", Reader("column_winner"), 2 * 2 * columns, who=Who.FEW),
        *_choice(lowering.num_blocks),
        _cache("attention"),
    ]
    fences = (
        *(Fence(step, who=Who.SOME) for step in ("attention_flag", "attention_join")),
        *(Fence(step, (last,)) for step in ("down_proj_sum", "layer_end")),
    )
    steps = layer_steps(schedule, COLUMN_STEPS)
    return _with_buffers(Kernel("columns", lanes, last + 1, tuple(out), steps, ends, fences), sent)


def _hows(spec: ModelSpec) -> set[Reduce]:
    return set(spec.reduce_attention + spec.reduce_mlp)


def _reduces(
    spec: ModelSpec, stage: str
) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]:
    """Layers whose outputs of a module go to all lanes at once; to their own lane, None for all; and those that add
    what other lanes sent before."""
    how = spec.reduce_attention if stage == "o_proj" else spec.reduce_mlp
    now, late = (
        tuple(n for n, h in enumerate(how) if h is r) for r in (Reduce.NOW, Reduce.DELAYED)
    )
    own = tuple(n for n in range(len(how)) if n not in now) if spec.num_lanes > 1 else None
    return now, own, late


def _some(
    name: str, producer: str, readers: Sequence[str], words: int, rows: int, mark: Mark = Mark.PHASE
) -> Exchange:
    """Of a lane, by some of its blocks for some of them."""
    to = tuple(Reader(step, Of.SOME) for step in readers)
    return Exchange(name, producer, to, words, rows, mark=mark, who=Who.SOME)


def _hints(name: str, producer: str, reader: str, words: int, rows: int) -> Exchange:
    """Numbers of layer runs beside words of the same step."""
    return _some(name, producer, (reader,), words, rows, Mark.NUMBER)


def _numbered(
    name: str, producer: str, reader: Reader, words: int, buffers: int = 1, who: Who = Who.EACH
) -> Exchange:
    """Of all blocks, two words a value under the number of the exchange (exchange.h)."""
    return Exchange(name, producer, (reader,), words, 1, buffers, Mark.NUMBER, who, Scope.ALL)


def _splits(spec: ModelSpec, heads: int, splits: int) -> list[tuple[str, int, int]]:
    """Words and rows: outputs of every split of `heads` key/value heads, and the logarithms of their sums."""
    return [
        ("splits", spec.group * (spec.head_dim // 2), heads * splits),
        ("split_tops", spec.group * QUERY_TOPS, heads * -(-splits // BUNDLE)),
    ]


def _mix(
    spec: ModelSpec, columns: int, agree: tuple[str, ...]
) -> tuple[list[Exchange], tuple[tuple[str, ...], ...]]:
    """What the head scores of the lanes' streams, if they are mixed; and the ends of a token."""
    mixed = spec.hidden_size if spec.num_lanes > 1 and spec.head is not Head.VOCAB_PARALLEL else 0
    joined = 0 if spec.head is Head.CONCAT else mixed
    reader = Reader("mix_lanes", Of.SOME, Who.FEW) if joined else Reader("mix_gather")
    joins = "mix_lanes" if joined else ""
    out = [
        Exchange("part", "mix", (reader,), mixed, spec.num_lanes * columns, scope=Scope.ALL),
        Exchange(
            "y",
            joins,
            (Reader("mix_gather"),),
            mixed if columns > 1 else joined,
            columns,
            who=Who.FEW,
            scope=Scope.ALL,
        ),
    ]
    if columns > 1:
        hint = (Reader("mix_gather", Of.SOME),)
        out.append(
            Exchange("y_flags", joins, hint, -(-mixed // 4), 1, 1, Mark.NUMBER, Who.FEW, Scope.ALL)
        )
    steps = ("mix", *(("mix_lanes",) if joined else ()), "mix_gather") if mixed else ()
    ends = ((), agree, *CHOICES, (*steps, *agree), (*steps, *SURVIVES))
    return out, tuple(dict.fromkeys(ends))


def _choice(blocks: int) -> list[Exchange]:
    """What all blocks tell each other about one token's logits."""
    few = Reader("histogram", who=Who.FEW)
    return [
        _numbered("winner", "candidate", Reader("winner"), 4 * 2 * blocks, 2),
        _numbered("peak", "peak", Reader("peaks"), 2 * 2 * blocks),
        _numbered("trial", "draw", Reader("trial"), 3 * 2 * 2 * blocks),
        _numbered("shares", "share", Reader("shares"), 3 * 2 * 2 * blocks),
        _numbered("bin_part", "bin", few, BINS * 4 * 2 * blocks),
        _numbered("bin", "histogram", Reader("cut"), BINS * 4 * 2, who=Who.FEW),
        _numbered(
            "best", "rank", Reader("best", who=Who.ONE), 2 * 2 * (MOST_LOGPROBS + 1) * blocks, 2
        ),
    ]


def _cache(step: str) -> Exchange:
    """Keys and values of the tokens before: plain memory, in which each row is written once."""
    before = Reader(step, tokens=1)
    return Exchange("cache", step, (before,), None, buffers=0, mark=Mark.GUARDED)


def _with_buffers(kernel: Kernel, names: Sequence[str]) -> Kernel:
    """As many buffers of these exchanges as the proof takes, but no fewer than they have. What blocks learn from one
    of them is no argument for another: a model may have one alone."""

    def needed(exchange: Exchange) -> Exchange:
        if exchange.name not in names or not exchange.is_used:
            return exchange
        others = tuple(e for e in kernel.exchanges if e is exchange or e.name not in names)
        return replace(
            exchange, buffers=fewest_buffers(replace(kernel, exchanges=others), exchange.name)
        )

    return replace(kernel, exchanges=tuple(map(needed, kernel.exchanges)))
