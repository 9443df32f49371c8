"""What the Hugging Face decoders share: Llama's tensor names and the reading of its config.json.

Llama, Mistral and Qwen differ in biases, query/key norms, windows and a few defaults; each family's
file says only that. Query and key rows are stored in the half-split RoPE layout already.
"""

from kog_triton.errors import ModelError, shown
from kog_triton.model.config import Config
from kog_triton.model.family import Source
from kog_triton.model.rope_config import MAX_CONTEXT, read_rope
from kog_triton.model.spec import DType, ModelSpec, Reduce, RopeScaling

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 18
MAX_HEADS = 1 << 14
MAX_VOCAB = 1 << 24

# Fields of other models' configurations that change the maths, with the values under which they do
# not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "quantization": (),
    "n_routed_experts": (0,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "num_experts_per_tok": (0,),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "swiglu_limit": (),
    "alibi": (False,),
    "position_embedding_type": ("rope",),
    "lm_head_bias": (False,),
    "logit_scale": (1, 1.0),
    "use_post_norm": (False,),
    "parallel_attn": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "dual_chunk_attention_config": (),
    "attention_chunk_size": (),
    "attention_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "scale_emb": (1, 1.0),
    "norm_type": ("rmsnorm",),
    "attention_sink": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "parallel_residual": (False,),
    "use_parallel_residual": (False,),
}


def refuse_unsupported(config: Config) -> None:
    """ModelError if a field asks for quantization, experts or another kind of decoder."""
    for name, allowed in _NEUTRAL.items():
        config.only(name, *allowed)
    for name, value in config.values.items():
        if name.startswith("moe_") and value is not None:
            label = config.label(name)
            raise ModelError(f"{label} is {shown(value)}: mixtures of experts are not supported")


def head_width(config: Config, hidden_size: int, num_heads: int, default: int = 0) -> int:
    """head_dim as given, else `default`, else hidden_size over the heads, which must divide it."""
    width = config.integer("head_dim", high=MAX_WIDTH, default=default)
    if not width and hidden_size % num_heads:
        raise ModelError(f"head_dim is missing and hidden_size {hidden_size} does not divide over {num_heads} heads")
    return width or hidden_size // num_heads


def read_decoder(
    config: Config,
    family: str,
    *,
    num_kv_heads: int | None = None,
    head_dim: int = 0,
    windows: tuple[int, ...] = (),
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """The one-lane spec of a Llama-like decoder.

    `num_kv_heads` and `head_dim` are the family's defaults (None, 0: as many as query heads, an
    equal share of hidden_size); `windows` is () if every layer sees all keys. ModelError for
    whatever cannot be run.
    """
    refuse_unsupported(config)
    layers = num_layers(config)
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    context = config.integer("max_position_embeddings", high=MAX_CONTEXT)
    rope = read_rope(config, context)
    # The family's default is for a field that is left out; null means as many as query heads.
    kv_heads = heads if "num_key_value_heads" in config.values else num_kv_heads or heads
    if rope.scaling is RopeScaling.YARN:
        # Configurations give either the stretched or the trained length here.
        context = min(max(context, int(rope.original_context * rope.factor)), MAX_CONTEXT)
    return ModelSpec(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH * 4),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", high=MAX_HEADS, default=kv_heads),
        head_dim=head_width(config, hidden, heads, head_dim),
        vocab_size=config.integer("vocab_size", high=MAX_VOCAB),
        max_context=context,
        norm_eps=config.number("rms_norm_eps", low=0, high=1, default=1e-6),
        rope=rope,
        windows=windows or (0,) * layers,
        reduce_attention=(Reduce.NOW,) * layers,
        reduce_mlp=(Reduce.NOW,) * layers,
        dtype=config.dtype() or DType.F32,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
    )


def num_layers(config: Config) -> int:
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def layer_kinds(config: Config) -> list[str] | None:
    """`layer_types`, "full_attention" or "sliding_attention" a layer; None if it is absent."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers(config):
        raise config.error(["layer_types"], f"a list of {num_layers(config)} kinds of layer")
    for kind in kinds:
        if kind not in known:
            raise ModelError(f"layer_types has {shown(kind)}: it must be {known[0]!r} or {known[1]!r}")
    return kinds


def qwen_windows(config: Config) -> tuple[int, ...]:
    """By layer: `layer_types` if given, else layers from `max_window_layers` on may slide."""
    layers, kinds = num_layers(config), layer_kinds(config)
    slides = config.boolean("use_sliding_window", default=False)
    window = config.integer("sliding_window", high=MAX_CONTEXT, default=4096) if slides else 0
    if kinds is None:
        first = config.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
        return (0,) * min(first, layers) + (window,) * max(layers - first, 0)
    if "sliding_attention" in kinds and not window:
        raise ModelError("layer_types has 'sliding_attention' but use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def decoder_sources(spec: ModelSpec) -> dict[str, Source]:
    """Llama's names. A bare model's have no `model.` before; a tied one may keep either matrix."""
    modules = {
        "attention_norm": "input_layernorm.weight",
        "q_proj": "self_attn.q_proj.weight",
        "k_proj": "self_attn.k_proj.weight",
        "v_proj": "self_attn.v_proj.weight",
        "o_proj": "self_attn.o_proj.weight",
        "q_bias": "self_attn.q_proj.bias",
        "k_bias": "self_attn.k_proj.bias",
        "v_bias": "self_attn.v_proj.bias",
        "o_bias": "self_attn.o_proj.bias",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "gate_proj": "mlp.gate_proj.weight",
        "up_proj": "mlp.up_proj.weight",
        "down_proj": "mlp.down_proj.weight",
        "gate_bias": "mlp.gate_proj.bias",
        "up_bias": "mlp.up_proj.bias",
        "down_bias": "mlp.down_proj.bias",
    }
    names = {"embed": "embed_tokens.weight", "norm": "norm.weight"}
    names |= {f"layers.{{}}.{name}": f"layers.{{}}.{path}" for name, path in modules.items()}
    sources = {name: Source((f"model.{path}", path)) for name, path in names.items() if name in spec.shapes}
    if spec.tied_embeddings:
        sources["embed"] = Source((*sources["embed"].names, "lm_head.weight"))
    else:
        sources["lm_head"] = Source(("lm_head.weight",))
    return sources
