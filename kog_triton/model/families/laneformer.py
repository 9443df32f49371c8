"""Laneformer: lanes with a residual stream each, whose module outputs meet late or never.

Checkpoints turn interleaved RoPE pairs, so query and key rows are reordered on loading. With one
lane all reduce modes are the same function, and the spec says NOW.
"""

from kog_triton.errors import ModelError, shown
from kog_triton.model.config import Config
from kog_triton.model.families.decoder import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    head_width,
    refuse_unsupported,
)
from kog_triton.model.family import Family, Source
from kog_triton.model.rope_config import MAX_CONTEXT, llama3, read_rope
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce, Rope, RopeScaling

MAX_LANES = 256
_HEADS = {"replicate": Head.MEAN, "vocab_parallel": Head.VOCAB_PARALLEL, "lane": Head.CONCAT}
_ATTENTION_SWITCHES = ("use_attention_comm", "use_attn_comm", "use_comm_attention", "use_comm_attn")
_MLP_SWITCHES = ("use_mlp_comm", "use_feed_forward_comm", "use_ffn_comm", "use_comm_mlp")
_LANE_FIELDS = {
    "use_comm",
    "use_early_comm",
    "num_lanes",
    "broadcast_delay",
    "lm_head_type",
    "pre_norm_lane_agg",
    *_ATTENTION_SWITCHES,
    *_MLP_SWITCHES,
}


def _spec(config: Config) -> ModelSpec:
    refuse_unsupported(config)
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    config.only("layer_types")
    for name, value in config.values.items():
        about_lanes = any(word in name for word in ("comm", "lane", "delay", "reduce"))
        if about_lanes and name not in _LANE_FIELDS and value is not None:
            label = config.label(name)
            raise ModelError(f"{label} is {shown(value)}: this field of a Laneformer is not known")
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS, default=32)
    hidden = config.integer("hidden_size", high=MAX_WIDTH, default=4096)
    heads = config.integer("num_attention_heads", high=MAX_HEADS, default=32)
    lanes = config.integer("num_lanes", high=MAX_LANES, default=1)
    delay = config.integer("broadcast_delay", high=MAX_LAYERS, default=1)
    context = config.integer("max_position_embeddings", high=MAX_CONTEXT, default=131072)
    reduce_attention = _reduce(config, _ATTENTION_SWITCHES, layers, lanes, delay)
    reduce_mlp = _reduce(config, _MLP_SWITCHES, layers, lanes, delay)
    delayed = Reduce.DELAYED in reduce_attention + reduce_mlp
    head = _head(config)
    tied = config.boolean("tie_word_embeddings", default=False)
    if tied and head not in (Head.MEAN, Head.SUM_THEN_NORM):
        raise ModelError("tie_word_embeddings is true: only lm_head_type 'replicate' can be tied")
    return ModelSpec(
        family="laneformer",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH * 4, default=16384),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", high=MAX_HEADS, default=heads),
        head_dim=head_width(config, hidden, heads),
        vocab_size=config.integer("vocab_size", high=MAX_VOCAB, default=128256),
        max_context=context,
        norm_eps=config.number("rms_norm_eps", "norm_eps", low=0, high=1, default=1e-5),
        rope=_rope(config, context),
        windows=_windows(config, layers),
        reduce_attention=reduce_attention,
        reduce_mlp=reduce_mlp,
        dtype=config.dtype() or DType.F32,
        tied_embeddings=tied,
        num_lanes=lanes,
        delay=delay if delayed else 0,
        head=head,
        lane_norms=not config.boolean("replicated_rmsn_scale", default=True),
    )


def _reduce(config: Config, switches: tuple[str, ...], layers: int, lanes: int, delay: int) -> tuple[Reduce, ...]:
    """Layers before `delay` reduce at once or never; later ones late, unless switched off."""
    early = Reduce.NOW if config.boolean("use_early_comm", default=True) else Reduce.OWN
    on = config.boolean("use_comm", default=True) and config.boolean(*switches, default=True)
    late = Reduce.DELAYED if on else Reduce.OWN
    if lanes == 1:
        early = late = Reduce.NOW
    return tuple(early if layer < delay else late for layer in range(layers))


def _windows(config: Config, layers: int) -> tuple[int, ...]:
    """n > 0: the first n layers slide; n < 0: the last -n; `unclamped_layers` never do."""
    window = config.integer("sliding_window", high=MAX_CONTEXT, default=0)
    count = config.integer("sliding_window_n_layers", low=-layers, high=layers, default=0)
    full = config.integers("unclamped_layers", low=0, high=layers - 1, default=())
    sliding = range(count) if count >= 0 else range(layers + count, layers)
    return tuple(window if i in sliding and i not in full else 0 for i in range(layers))


def _head(config: Config) -> Head:
    head = _HEADS[config.choice("lm_head_type", of=_HEADS, default="replicate")]
    if not config.boolean("pre_norm_lane_agg", default=False):
        return head
    if head is not Head.MEAN:
        raise ModelError("pre_norm_lane_agg is true: it needs lm_head_type 'replicate'")
    return Head.SUM_THEN_NORM


def _rope(config: Config, context: int) -> Rope:
    """As everywhere, or `rope_scaling_args`: the llama3 type as the training code spells it."""
    rope, arguments = read_rope(config, context), config.mapping("rope_scaling_args")
    if arguments is None:
        return rope
    if rope.scaling is not RopeScaling.NONE:
        raise ModelError("rope_scaling_args and another RoPE scaling are both given: keep one")
    factor = arguments.number("scaling_factor", "factor", low=1e-3, high=1e6)
    trained = arguments.integer("original_max_position_embeddings", high=MAX_CONTEXT)
    return llama3(rope.theta, factor, trained, arguments)


def _sources(spec: ModelSpec) -> dict[str, Source]:
    modules = {
        "q_proj": ("attention.wq.weight",),
        "k_proj": ("attention.wk.weight",),
        "v_proj": ("attention.wv.weight",),
        "o_proj": ("attention.wo.weight",),
        "gate_proj": ("feed_forward.w1.weight",),
        "up_proj": ("feed_forward.w3.weight",),
        "down_proj": ("feed_forward.w2.weight",),
        "attention_norm": ("attention_norm.weight", "attention_norm.scale"),
        "mlp_norm": ("ffn_norm.weight", "ffn_norm.scale"),
    }
    sources = {
        f"layers.{{}}.{name}": Source(
            tuple(f"model.layers.{{}}.{path}" for path in paths), interleaved_rope=name in ("q_proj", "k_proj")
        )
        for name, paths in modules.items()
    }
    sources["embed"] = Source(("model.tok_embeddings.weight",))
    sources["norm"] = Source(("model.norm.weight", "model.norm.scale"))
    if spec.tied_embeddings:
        sources["embed"] = Source(("model.tok_embeddings.weight", "lm_head.weight"))
    else:
        sources["lm_head"] = Source(("lm_head.weight", "lm_head.linear.weight"))
    return sources


LANEFORMER = Family("laneformer", ("laneformer", "laneformer_tp"), (), _spec, _sources)
