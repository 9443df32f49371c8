"""The decode step as data: which stages run, in what order, and what each reads and writes.

The layers of a model are cut into *shards*. A shard of a layer is computed by one group of blocks that
exchanges its activations only within itself; what the shards owe each other is a module's output, and
`Reduce` says when it is paid. A plain model on G GPUs has G shards, one a rank, reduced NOW: ordinary
tensor parallelism. A Laneformer has one shard a lane, several on a rank if there are fewer GPUs than
lanes, reduced late or never. With one GPU a plain model is the one-shard case. Where there are fewer KV heads than
shards, each is held by several; where the FFN's outputs do not divide, the last shard's are padded with zeros.

    segment   repeat   stages
    head      1        embed
    layers    L        qkv_proj > attention > o_proj > gate_up_proj > down_proj
    tail      1        (mix >) lm_head > sample

What a stage means is defined once, in backends/reference.py. Sizes of a stage are those of one shard.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from kog_triton.errors import ModelError
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce

MOST_GPUS = 8  # of a machine whose GPUs reach each other's memory
FFN_UNIT = 8  # a padded shard has a multiple of it: rows of a fragment, whole words


class Op(IntEnum):
    EMBED = 0  # x of every shard <- embedding row of the token
    MATVEC = 1  # target <- epilogue(weight @ prologue(source)): the only loop that streams weights
    ATTENTION = 2  # norm and rotate q and k, append k and v to the cache, softmax(q k) v
    MIX = 3  # the lanes' residual streams become the one vector that the head scores
    SAMPLE = 4  # token <- logits


class Prologue(IntEnum):
    NONE = 0
    RMS_NORM = 1  # source / rms(source) * gain


class Epilogue(IntEnum):
    STORE = 0  # target <- rows + bias
    RESIDUAL = 1  # target <- rows + bias, which joins the residual streams as `reduce` says
    SILU_MUL = 2  # rows come as gate and up; target <- silu(gate) * up
    LOGITS = 3  # target <- rows, float32


class Scope(IntEnum):
    """Which blocks take part in a stage, or share an exchange."""

    SHARD = 0  # the group of one shard
    RANK = 1  # all blocks of one GPU
    ALL = 2  # all blocks of all GPUs


class Axis(IntEnum):
    """What a level (rank, block, warp) cuts. K implies a sum over the parts, in fixed order."""

    ROWS = 0
    K = 1


@dataclass(frozen=True)
class Stage:
    """One step that all blocks of its scope take together. `rows` and `cols` are one shard's.

    `weights` name the canonical tensors that are stacked along rows, in order; gate and up are woven
    row by row instead. `cut` is the axis along which shards divide the plain model's tensor.
    """

    name: str
    op: Op
    scope: Scope
    rows: int
    cols: int
    source: str
    target: str
    weights: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    norm: str = ""
    prologue: Prologue = Prologue.NONE
    epilogue: Epilogue = Epilogue.STORE
    cut: Axis = Axis.ROWS
    dtype: DType = DType.F32  # of the weights

    @property
    def outputs(self) -> int:
        """Values that the stage leaves behind for one shard."""
        return self.rows // 2 if self.epilogue is Epilogue.SILU_MUL else self.rows


@dataclass(frozen=True)
class Segment:
    """Stages that run in order, `repeat` times: once for each layer."""

    name: str
    repeat: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Schedule:
    """One decode step of one model on `num_ranks` GPUs."""

    spec: ModelSpec
    num_ranks: int
    num_shards: int
    segments: tuple[Segment, ...]

    @property
    def shards_per_rank(self) -> int:
        return self.num_shards // self.num_ranks

    def stage(self, name: str) -> Stage:
        return next(s for _, s in self.walk() if s.name == name)

    def walk(self) -> Iterator[tuple[Segment, Stage]]:
        """Every stage once, in order of its first run."""
        for segment in self.segments:
            for stage in segment.stages:
                yield segment, stage

    @property
    def layer_stages(self) -> tuple[Stage, ...]:
        """Those that every layer runs, in order."""
        return next(s.stages for s in self.segments if s.name == "layers")

    @property
    def shard_heads(self) -> int:
        return self.spec.num_heads // self.num_shards

    @property
    def shard_kv_heads(self) -> int:
        """KV heads of one shard, which other shards may hold too."""
        return max(1, self.spec.num_kv_heads // self.num_shards)

    @property
    def kv_copies(self) -> int:
        """Shards that hold a KV head."""
        return self.shard_kv_heads * self.num_shards // self.spec.num_kv_heads

    @property
    def spread(self) -> ModelSpec:
        """The model as its shards hold it: a KV head counts as often as it is held."""
        held = self.shard_kv_heads * self.num_shards
        return self.spec if self.kv_copies == 1 else self.spec.replace(num_kv_heads=held)

    @property
    def shard_ffn(self) -> int:
        """Outputs of gate and up of one shard, those that pad the last one included."""
        total, shards = self.spec.intermediate_size, self.num_shards
        if shards == self.spec.num_lanes or total % (2 * shards) == 0:  # two outputs are a word
            return total // shards
        return -(-total // (shards * FFN_UNIT)) * FFN_UNIT

    def rank_of(self, shard: int) -> int:
        return shard // self.shards_per_rank

    def reduce(self, stage: str, layer: int) -> Reduce:
        """How the outputs of `o_proj` or `down_proj` join the residual streams in this layer."""
        spec = self.spec
        return (spec.reduce_attention if stage == "o_proj" else spec.reduce_mlp)[layer]

    def head_rows(self, rank: int) -> tuple[int, int]:
        """Rows [first, last) of the vocabulary that a rank scores."""
        v, n = self.spec.vocab_size, self.num_ranks
        return rank * v // n, (rank + 1) * v // n


def _heads_divide(spec: ModelSpec, shards: int) -> bool:
    """Whether each shard gets as many heads, of as many whole KV heads, which several may share."""
    heads, kv = spec.num_heads, spec.num_kv_heads
    return heads % shards == 0 and (kv % shards == 0 or shards % kv == 0)


def build(spec: ModelSpec, num_ranks: int = 1) -> Schedule:
    """List the stages of one decode step. ModelError if the model cannot be cut so."""
    lanes = spec.num_lanes
    if num_ranks < 1:
        raise ModelError(f"cannot run on {num_ranks} GPUs")
    shards = lanes if lanes > 1 else num_ranks
    fit = [n for n in range(1, MOST_GPUS + 1) if (lanes % n == 0 if lanes > 1 else _heads_divide(spec, n))]
    choose = f"choose one of {', '.join(map(str, fit))}"
    if num_ranks > MOST_GPUS:
        raise ModelError(f"{num_ranks} GPUs: {MOST_GPUS} are the most: {choose}")
    if lanes > 1 and num_ranks not in fit:
        raise ModelError(f"{lanes} lanes do not divide over {num_ranks} GPUs: {choose}")
    if shards > 1 and not _heads_divide(spec, shards):
        raise ModelError(
            f"{spec.num_heads} heads with {spec.num_kv_heads} KV heads do not divide over {shards} GPUs: {choose}"
        )
    plan = Schedule(spec, num_ranks, shards, ())
    d, hidden, ffn = spec.head_dim, spec.hidden_size, plan.shard_ffn
    q, kv = plan.shard_heads * d, plan.shard_kv_heads * d

    def matvec(name: str, rows: int, cols: int, source: str, target: str, **kw: object) -> Stage:
        kw = {"scope": Scope.SHARD, "dtype": spec.dtype} | kw
        return Stage(name, Op.MATVEC, rows=rows, cols=cols, source=source, target=target, **kw)  # type: ignore[arg-type]

    def biases(present: bool, *names: str) -> tuple[str, ...]:
        return names if present else ()

    norm, residual = {"prologue": Prologue.RMS_NORM}, {"epilogue": Epilogue.RESIDUAL, "cut": Axis.K}
    layer = (
        matvec(
            "qkv_proj",
            q + 2 * kv,
            hidden,
            "x",
            "qkv",
            weights=("q_proj", "k_proj", "v_proj"),
            biases=biases(spec.qkv_bias, "q_bias", "k_bias", "v_bias"),
            norm="attention_norm",
            **norm,
        ),
        Stage("attention", Op.ATTENTION, Scope.SHARD, q, q + 2 * kv, "qkv", "attention"),
        matvec(
            "o_proj",
            hidden,
            q,
            "attention",
            "attention_out",
            weights=("o_proj",),
            biases=biases(spec.o_bias, "o_bias"),
            **residual,
        ),
        matvec(
            "gate_up_proj",
            2 * ffn,
            hidden,
            "x",
            "mlp",
            weights=("gate_proj", "up_proj"),
            biases=biases(spec.mlp_bias, "gate_bias", "up_bias"),
            norm="mlp_norm",
            epilogue=Epilogue.SILU_MUL,
            **norm,
        ),
        matvec(
            "down_proj",
            hidden,
            ffn,
            "mlp",
            "mlp_out",
            weights=("down_proj",),
            biases=biases(spec.mlp_bias, "down_bias"),
            **residual,
        ),
    )
    mixes = lanes > 1 and spec.head is not Head.VOCAB_PARALLEL
    head_weight = "embed" if spec.tied_embeddings else "lm_head"
    if spec.head is Head.VOCAB_PARALLEL:
        lm_head = matvec(
            "lm_head",
            spec.vocab_size // shards,
            hidden,
            "x",
            "logits",
            weights=(head_weight,),
            norm="norm",
            epilogue=Epilogue.LOGITS,
            **norm,
        )
    else:
        cols = hidden * (lanes if spec.head is Head.CONCAT else 1)
        lm_head = matvec(
            "lm_head",
            spec.vocab_size,
            cols,
            "y" if mixes else "x",
            "logits",
            scope=Scope.ALL,
            weights=(head_weight,),
            norm="" if mixes else "norm",
            epilogue=Epilogue.LOGITS,
            prologue=Prologue.NONE if mixes else Prologue.RMS_NORM,
        )
    mix = Stage("mix", Op.MIX, Scope.ALL, lm_head.cols, hidden, "x", "y", norm="norm")
    sample = Stage("sample", Op.SAMPLE, Scope.ALL, 1, spec.vocab_size, "logits", "token")
    embed = Stage("embed", Op.EMBED, Scope.SHARD, hidden, 1, "token", "x", weights=("embed",))
    segments = (
        Segment("head", 1, (embed,)),
        Segment("layers", spec.num_layers, layer),
        Segment("tail", 1, ((mix,) if mixes else ()) + (lm_head, sample)),
    )
    return replace(plan, segments=segments)
