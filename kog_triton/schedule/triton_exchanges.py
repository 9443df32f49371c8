"""What the Triton megakernel's blocks exchange, in its walks of a token, of a prompt's chunk and of a shared step.

SOME blocks own rows of qkv_proj and gate_up_proj, and KV tasks of attention; EACH owns rows of the others
(triton.py, `_owners`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kog_triton.model.spec import Head, Reduce
from kog_triton.schedule import exchanges as ex
from kog_triton.schedule.schedule import Schedule, Scope

Tiles = Any  # of triton.py, which asks here where its words lie

MODULES = (("attention_out", "o_proj", "gate_up_proj"), ("mlp_out", "down_proj", "layer_end"))
AGREE, ALL_REDUCE, MEET = ("candidate", "argmax"), ("partial", "all_reduce"), ("arrive", "arrivals")
RANK = ("rank_part", "rank") * 2  # of log-probabilities: the logit of the token, then how many are ahead of it
DECODE_STEPS = {"attention": ("attention", "attention_join"), "down_proj": ("down_proj", "layer_end")}
PROMPT_STEPS = {  # of a chunk (backends/triton/chunk.py): all blocks meet after each
    "qkv_proj": ("feed_mlp", "feed", *MEET, "qkv_proj", *MEET),
    "attention": ("attention", *MEET),
    "o_proj": ("o_proj", *MEET, "feed_attention", "feed", *MEET),
    "gate_up_proj": ("gate_up_proj", *MEET),
    "down_proj": ("down_proj", *MEET),
}
PREPARED = {"o_proj": "attention", "down_proj": "mlp"}  # stages whose narrow weights meet what is made of these
SHARED_STEPS = {  # of a step that requests share (backends/triton/kernel/shared_step.py): all meet after each
    "qkv_proj": ("feed", *MEET, "qkv_proj", *MEET),
    "attention": ("attention", *MEET, "attention_join", *MEET),
    "o_proj": ("o_proj", *MEET, "feed_attention", "feed", *MEET),
    "gate_up_proj": ("gate_up_proj", *MEET),
    "down_proj": ("down_proj", *MEET, "layer_end"),
}


def decode_kernel(t: Tiles, schedule: Schedule) -> ex.Kernel:
    """The walk of a token at a time."""
    spec, layers = schedule.spec, ex.distinct_layers(schedule.spec)
    mix = ("part", "mix", "lm_head") if t.head_mode != Head.CONCAT else ("part", "lm_head")
    ends = (AGREE, ALL_REDUCE + AGREE, ALL_REDUCE + ALL_REDUCE + AGREE + RANK, mix + AGREE)
    fences = (ex.Fence("down_proj", (layers - 1,)), ex.Fence("argmax"))
    words = _decode_exchanges(t, spec.reduce_attention, spec.reduce_mlp)
    steps = ex.layer_steps(schedule, DECODE_STEPS)
    return ex.Kernel(t.lanes, layers, (*words, ex.cache_of("attention")), steps, ends, fences)


def _decode_exchanges(
    t: Tiles, attention: Sequence[Reduce] = (), mlp: Sequence[Reduce] = ()
) -> tuple[ex.Exchange, ...]:
    """Of layers whose modules are reduced so."""

    def every(name: str, steps: tuple[str, str], values: int, restarts: bool = False) -> ex.Exchange:
        """int64 values of every block."""
        words, to = 2 * values * t.num_blocks, (ex.Reader(steps[1]),)
        e = ex.Exchange(name, steps[0], to, words, 1, 2, ex.Mark.NUMBER, scope=Scope.ALL)
        return replace(e, restarts=restarts)

    out, late = [], []
    for (name, stage, reader), hows in zip(MODULES, (attention, mlp), strict=True):
        now, delayed = (
            tuple(n for n, h in enumerate(hows) if t.lanes > 1 and h is how) for how in (Reduce.NOW, Reduce.DELAYED)
        )
        alone = tuple(n for n in range(len(hows)) if n not in now) if now else None
        own, all_lanes = ex.Reader(reader, ex.Of.LANE, layers=alone), ex.Reader(reader, layers=now)
        # Where outputs are late, those that all lanes read at once are read from the ring as well.
        near = (own,) if t.delayed_buffers else (own, all_lanes)
        scope = Scope.ALL if len(near) > 1 else Scope.SHARD
        sent_words = t.hidden_size // 2 if t.outputs_in_pairs else t.hidden_size
        out.append(ex.Exchange(name, stage, near, sent_words, t.lanes, scope=scope))
        far = (ex.Reader(stage, ex.Of.OWN, layers=delayed, delay=t.delay), all_lanes)
        words, buffers = (t.hidden_size, t.delayed_buffers) if t.delayed_buffers else (0, 1)
        ring = ex.Exchange(f"{name}_delayed", stage, far, words, t.lanes, buffers, scope=Scope.ALL)
        late.append(replace(ring, region="delayed"))
    mixes = t.lanes > 1 and t.head_mode != Head.VOCAB_PARALLEL
    adds = mixes and t.head_mode != Head.CONCAT
    sent, added = "part" if mixes else "", "mix" if adds else ""
    part = ex.Reader("mix", ex.Of.SOME, ex.Who.FEW) if adds else ex.Reader("lm_head")
    whole = (ex.Reader("lm_head"),)
    heads = t.lanes * t.kv_heads * t.splits
    return (
        ex.some("qkv", "qkv_proj", ("attention",), t.qkv_words, t.lanes),
        ex.some("attention", "attention_join", ("o_proj",), t.attention_words, t.lanes),
        ex.some("mlp", "gate_up_proj", ("down_proj",), t.ffn // 2, t.lanes),
        *out,
        ex.some("splits", "attention", ("attention_join",), t.split_words, heads),
        *late,
        ex.Exchange("part", sent, (part,), t.hidden_size, t.lanes, scope=Scope.ALL),
        ex.Exchange("y", added, whole, t.hidden_size, who=ex.Who.FEW, scope=Scope.ALL),
        every("all_reduce", ALL_REDUCE, 8, restarts=True),  # four values in halves
        every("argmax", AGREE, 4),
        every("rank", RANK[:2], 8),
    )


def _arrivals(t: Tiles) -> ex.Exchange:
    to = (ex.Reader(MEET[1]),)
    return ex.Exchange("arrivals", MEET[0], to, t.num_blocks, 1, 2, scope=Scope.ALL)


def _operands(t: Tiles) -> tuple[ex.Exchange, ...]:
    """What matrices read of a column, if requests share a step: of the stream, and of what `prepare` makes operands."""
    to = tuple(ex.Reader(step) for step in ("qkv_proj", "gate_up_proj", "lm_head"))
    words = max(t.hidden_size // 2, *(s.operands for s in t.stages[::2] if s.is_narrow), 0)
    x = ex.Exchange("x", "feed", to, words, t.lanes, mark=ex.Mark.GUARDED)
    return x, *(
        replace(
            x,
            name=f"{PREPARED[s.name]}_operands",
            producer=f"prepare {s.name}",
            words=s.operands,
            readers=(ex.Reader(s.name),),
        )
        for s in _prepared(t)
    )


def _prepared(t: Tiles) -> list[Any]:
    return [s for s in t.stages if s.name in PREPARED and s.is_narrow]


def prompt_kernel(t: Tiles, schedule: Schedule) -> ex.Kernel:
    """The walk of a prompt's chunk, whose vectors lie in plain memory (backends/triton/cut.py)."""
    spec, count = schedule.spec, ex.distinct_layers(schedule.spec)

    def vectors(name: str, producer: str, *readers: ex.Reader) -> ex.Exchange:
        return ex.Exchange(name, producer, readers, None, mark=ex.Mark.GUARDED)

    def out(name: str, stage: str, reader: str, before: int, hows: Sequence[Reduce]) -> ex.Exchange:
        late = tuple(n + before for n, h in enumerate(hows) if h is Reduce.DELAYED)
        now = ex.Reader(reader, layers=tuple(range(before, count)))
        e = vectors(name, stage, now, ex.Reader(reader, layers=late, delay=t.delay + before))
        return replace(e, buffers=t.delay + 1, scope=Scope.ALL, restarts=True)

    exchanges = (
        _arrivals(t),
        vectors("x", "feed", ex.Reader("qkv_proj"), ex.Reader("gate_up_proj")),
        vectors("qkv", "qkv_proj", ex.Reader("attention")),
        vectors("attention_vectors", "attention", ex.Reader("o_proj")),
        vectors("mlp", "gate_up_proj", ex.Reader("down_proj")),
        out("attention_out", "o_proj", "feed_attention", 0, spec.reduce_attention),
        out("mlp_out", "down_proj", "feed_mlp", 1, spec.reduce_mlp),
        ex.cache_of("attention"),
    )
    steps = ex.layer_steps(schedule, PROMPT_STEPS)
    return ex.Kernel(t.lanes, count, exchanges, steps, ((),), tuple(map(ex.Fence, MEET)))


def shared_kernel(t: Tiles, schedule: Schedule) -> ex.Kernel:
    """The walk of a step that requests share: vectors are read behind meetings, and requests choose their tokens one
    after the other (here two of them)."""
    count = ex.distinct_layers(schedule.spec)
    words = {e.name: replace(e, mark=ex.Mark.GUARDED) for e in _decode_exchanges(t)}
    parts = dict(SHARED_STEPS)
    for stage in _prepared(t):
        step, read = f"prepare {stage.name}", PREPARED[stage.name]
        parts[stage.name] = (step, *MEET, *parts[stage.name])
        words[read] = replace(words[read], readers=(replace(words[read].readers[0], step=step),))
    joined = replace(words["attention_out"], readers=(ex.Reader("feed_attention"),))
    vectors = ("qkv", "attention", "mlp", "mlp_out", "splits")
    chosen = tuple(e for e in _decode_exchanges(t) if e.mark is ex.Mark.NUMBER)
    exchanges = (
        *(words[name] for name in vectors),
        joined,
        *_operands(t),
        _arrivals(t),
        *chosen,
        ex.cache_of("attention"),
    )
    head = ("feed", *MEET, "lm_head")
    ends = (
        ("feed", *MEET, *AGREE),  # prompts alone
        head + AGREE + AGREE,
        head + ALL_REDUCE + AGREE + AGREE,
        head + ALL_REDUCE + ALL_REDUCE + AGREE + RANK + ALL_REDUCE + AGREE,
    )
    steps = ex.layer_steps(schedule, parts)
    return ex.Kernel(t.lanes, count, exchanges, steps, ends, tuple(map(ex.Fence, MEET)))


def arena_exchanges(t: Tiles) -> tuple[ex.Exchange, ...]:
    """Whose words lie in the arena."""
    return (*_decode_exchanges(t), _arrivals(t), *_operands(t))
