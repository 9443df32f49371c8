"""Names that the generated header and the host share: stamps, waits.

Their order is the enumerators': a number from the kernel is an index here.
"""

# What a warp has just done when it leaves a stamp in the profile.
POINTS = (
    "start",
    "qkv_proj",
    "attention_qkv",
    "attention_split",
    "attention",
    "o_proj_input",
    "o_proj",
    "attention_out",
    "gate_up_proj",
    "down_proj_input",
    "down_proj",
    "mlp_out",
)


def stamp_words(ranks: int) -> int:
    """64-bit words of a stamp: ticks; ticks that the warp had waited for weights, and ring slots asked for; on several
    ranks also ticks that it had waited for the others, and one that is empty."""
    return 4 if ranks > 1 else 2


# Where a wait stands, for its error record.
STEPS = (
    "ring",
    "attention_qkv",
    "attention_join",
    "o_proj_input",
    "attention_out",
    "down_proj_input",
    "mlp_out",
    "delayed_outputs",
    "mix_lanes",
    "mix_gather",
    "argmax",
    "mask",
    "peaks",
    "top_p_check",
    "shares",
    "histogram",
    "cut",
    "best",
    "chosen",
    "ahead",
    "places",
)
