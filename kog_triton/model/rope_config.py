"""RoPE parameters out of a config.json, old and new spelling, into `Rope`.

    old   rope_theta at the top, scaling in rope_scaling {"rope_type" or "type", "factor", ...}
    new   everything in rope_parameters {"rope_type", "rope_theta", "factor", ...}

Types default, linear, llama3 and yarn; everything else (dynamic, longrope, per-layer, partial) is
refused by name.
"""

import math

from kog_triton.errors import ModelError, shown
from kog_triton.model.config import Config
from kog_triton.model.spec import Rope, RopeScaling

MAX_CONTEXT = 1 << 27  # positions; far above any model, small enough for 32-bit offsets of a table row
MAX_FACTOR = 1e6
_KNOWN_TOP_LEVEL = {"rope_theta", "rope_scaling", "rope_parameters", "rope_scaling_args", "rope_interleaved"}
_SCALINGS = {
    "default": RopeScaling.NONE,
    "linear": RopeScaling.LINEAR,
    "llama3": RopeScaling.LLAMA3,
    "yarn": RopeScaling.YARN,
}


def read_rope(config: Config, max_context: int) -> Rope:
    """The rotary embedding of a configuration whose model takes `max_context` positions.

    Raises ModelError for a rope type or option that is not supported, and for two descriptions at
    once.
    """
    for name, value in config.values.items():
        if name.startswith("rope_") and name not in _KNOWN_TOP_LEVEL and value is not None:
            raise ModelError(f"{shown(name)} is {shown(value)}: this RoPE option is not supported")
    config.only("partial_rotary_factor", 1, 1.0)
    config.only("rope_interleaved", False)  # as SmolLM2 says
    old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    if old and new:
        raise ModelError("rope_scaling and rope_parameters are both given: keep one of them")
    parameters = old or new or Config({}, "rope_scaling.")
    parameters.only("partial_rotary_factor", 1, 1.0)
    for name in parameters.values:
        if isinstance(parameters.values[name], dict):
            raise ModelError(f"RoPE per kind of layer, as for {shown(name)}, is not supported")
    theta = config.number("rope_theta", low=1.01, high=1e15, default=10_000.0)
    theta = parameters.number("rope_theta", low=1.01, high=1e15, default=theta)
    scaling = _SCALINGS[parameters.choice("rope_type", "type", of=_SCALINGS, default="default")]
    if scaling is RopeScaling.NONE:
        return Rope(theta)
    if scaling is RopeScaling.LINEAR:
        return Rope(theta, scaling, _factor(parameters))
    trained = parameters.integer("original_max_position_embeddings", high=MAX_CONTEXT, default=max_context)
    # Some models keep the trained length beside the dictionary; there it takes precedence.
    trained = config.integer("original_max_position_embeddings", high=MAX_CONTEXT, default=trained)
    if scaling is RopeScaling.LLAMA3:
        return llama3(theta, _factor(parameters), trained, parameters)
    return _yarn(theta, trained, max_context, parameters)


def llama3(theta: float, factor: float, trained: int, parameters: Config) -> Rope:
    """The llama3 type: long waves are stretched by `factor`, short ones kept, a ramp between."""
    low = parameters.number("low_freq_factor", low=1e-6, high=MAX_FACTOR)
    high = parameters.number("high_freq_factor", low=1e-6, high=MAX_FACTOR)
    if high <= low:
        raise ModelError(f"{parameters.label('high_freq_factor')} is {high:g}: it must exceed low_freq_factor {low:g}")
    return Rope(theta, RopeScaling.LLAMA3, factor, trained, low_freq_factor=low, high_freq_factor=high)


def _factor(parameters: Config) -> float:
    return parameters.number("factor", low=1e-3, high=MAX_FACTOR)


def _yarn(theta: float, trained: int, max_context: int, parameters: Config) -> Rope:
    """YaRN (arXiv 2309.00071). `attention_factor` is 0.1 ln(factor) + 1 unless given."""
    factor = parameters.number("factor", low=1e-3, high=MAX_FACTOR, default=max_context / trained)
    mscale = parameters.number("mscale", low=0, high=1e3, default=0.0)
    mscale_all = parameters.number("mscale_all_dim", low=0, high=1e3, default=0.0)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = mscale and mscale_all
    natural = magnitude(mscale) / magnitude(mscale_all) if both else magnitude(1.0)
    # A zero means "not given" for the two betas, as in the implementations that models were trained
    # with.
    fast = parameters.number("beta_fast", low=0, high=MAX_FACTOR, default=0.0) or 32.0
    slow = parameters.number("beta_slow", low=0, high=MAX_FACTOR, default=0.0) or 1.0
    if fast < slow:
        raise ModelError(f"{parameters.label('beta_fast')} is {fast:g}: it must not be below beta_slow {slow:g}")
    return Rope(
        theta,
        RopeScaling.YARN,
        factor,
        trained,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=parameters.number("attention_factor", low=1e-3, high=1e3, default=natural),
        truncate=parameters.boolean("truncate", default=True),
    )
