"""Models with a narrow embedding, and the same with its values as 16 bits: every bit behind it is the same."""

from dataclasses import replace

import torch

from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from tests.lib.lowering_cases import ArrayWeights, lanes
from tests.lib.narrow_stages import AWQ, FEW
from tests.lib.narrow_stream import NarrowWeights
from tests.lib.ring_walker import spec_of

# Rows whose length no power of two is, and whose codes do not fill a word; groups that end early, of rows and columns.
CASES = {
    "int8 g32 (Q8_0)": (FORMATS["q8_0"], {}),
    "int8 g64, zero points": (WeightFormat(Code.INT8, 1, 64, Scale.BF16, Offset.ZERO_POINT), {}),
    "int4 g32 (Q4_0)": (FORMATS["q4_0"], {"hidden_size": 160}),
    "int4 g32, minimums (Q4_1)": (FORMATS["q4_1"], {"hidden_size": 96}),
    "int4 channels": (WeightFormat(Code.UINT4, 1, 0, Scale.F32), {"hidden_size": 84}),
    "int4 g32, zero points": (replace(AWQ, group_cols=32), {}),
    "mxfp4": (FORMATS["mxfp4"], {}),
    "fp8 blocks": (FORMATS["fp8-block"], {"hidden_size": 196, "vocab_size": 301}),
    "fp8 channels": (FORMATS["fp8-channel"], {"hidden_size": 84}),
    "fp8 tensor, float16": (WeightFormat(Code.E4M3, 0, 0, Scale.BF16), {"dtype": DType.F16}),
}
HALF = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}


class As16Bits:
    """A source whose embedding is what a narrow one's values are, rounded to the model's type."""

    def __init__(self, weights):
        narrow = tuple(one for one in weights.spec.narrow if one[0] != "embed")
        self.spec, self.narrow, self._load = weights.spec.replace(narrow=narrow), weights.narrow, weights.load

    def load(self, name):
        return self._load(name).to(HALF[self.spec.dtype]) if name == "embed" else self._load(name)


def twins(spec, how):
    """Their o_proj are narrow in both, since what is narrow decides how all weights are laid out."""
    o_proj = tuple((f"layers.{i}.o_proj", FORMATS["int8-channel"]) for i in range(spec.num_layers))
    weights = NarrowWeights(spec.replace(narrow=(("embed", how), *o_proj)), ArrayWeights(spec))
    return weights, As16Bits(weights)


def pair(case, **changes):
    """Weights with a narrow embedding, and with a wide one of the same values."""
    how, sizes = CASES[case]
    return twins(spec_of(**FEW | {"num_layers": 1} | sizes | changes), how)


def lanes_of(case):
    """Likewise, of a model of four lanes."""
    return twins(lanes(2, hidden_size=96, tied_embeddings=False), CASES[case][0])
