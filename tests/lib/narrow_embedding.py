"""Models whose embedding alone is narrow, and the same with its values as 16 bits: every bit behind it is the same."""

from dataclasses import replace

import torch

from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.narrow_stages import AWQ, FEW
from tests.lib.narrow_stream import NarrowWeights
from tests.lib.ring_walker import spec_of

CASES = {
    "int8 g32 (Q8_0)": FORMATS["q8_0"],
    "int8 g64, zero points": WeightFormat(Code.INT8, 1, 64, Scale.BF16, Offset.ZERO_POINT),
    "int4 g32 (Q4_0)": FORMATS["q4_0"],
    "int4 g32, minimums (Q4_1)": FORMATS["q4_1"],
    "int4 g32, zero points": replace(AWQ, group_cols=32),
    "mxfp4": FORMATS["mxfp4"],
    "fp8 blocks": FORMATS["fp8-block"],
    "fp8 channels": FORMATS["fp8-channel"],
    "fp8 tensor, float16": WeightFormat(Code.E4M3, 0, 0, Scale.BF16),
}
HALF = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}


class As16Bits:
    """A source whose narrow weights are their values, rounded to the model's type."""

    def __init__(self, weights):
        self.spec, self._weights = weights.spec.replace(narrow=()), weights

    def load(self, name):
        return self._weights.load(name).to(HALF[self.spec.dtype])


def pair(case, **changes):
    """Weights with a narrow embedding, and with a wide one of the same values."""
    dtype = {"dtype": DType.F16} if "float16" in case else {}
    spec = spec_of(**FEW | {"num_layers": 1} | dtype | changes)
    weights = NarrowWeights(spec.replace(narrow=(("embed", CASES[case]),)), ArrayWeights(spec))
    return weights, As16Bits(weights)
