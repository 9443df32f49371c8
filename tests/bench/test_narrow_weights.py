"""`kog bench --weights`: random weights in a narrow format, and how far their kernel may be from the reference."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.bench.arguments import parse
from kog_triton.bench.check import compare
from kog_triton.bench.kl_limit import UNPACKED, unpacked_kl_limit
from kog_triton.bench.model import Retyped, open_model
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights
from kog_triton.errors import ModelError, RequestError
from kog_triton.model.weight_format import FORMATS
from tests.lib.narrow_stream import narrow_spec

SPEC = narrow_spec(FORMATS["fp8-block"], hidden_size=96, intermediate_size=160)
CPU = torch.device("cpu")
IDS = [3, 77, 12, 5, 98]


def test_a_shape_is_made_narrow():
    model = open_model(None, "smollm2-135m", CPU, format="fp8-channel")
    weights = model.weights
    assert model.describe()["weights"].endswith("layers round to nearest fp8-channel")
    stored = weights.narrow("layers.3.up_proj")
    assert stored.format == FORMATS["fp8-channel"] and stored.codes.dtype == torch.uint8
    assert weights.load("layers.3.up_proj").equal(stored.unpack())
    assert (
        "embed" not in dict(weights.spec.narrow) and weights.load("embed").dtype == torch.bfloat16
    )
    again = open_model(None, "smollm2-135m", CPU, format="fp8-channel").weights
    assert again.narrow("layers.3.up_proj").codes.equal(stored.codes)


def test_a_checkpoint_is_not_made_narrow():
    with pytest.raises(RequestError, match="name a --shape"):
        open_model("folder", None, CPU, format="fp8-channel")
    with pytest.raises(ModelError, match="576 columns do not divide into groups of 128"):
        open_model(None, "smollm2-135m", CPU, format="int4-g128")


def test_the_flag_takes_formats_that_can_be_made(capsys):
    assert parse(["decode", "--shape", "qwen3-8b", "--weights", "int4-g128"]).weights == "int4-g128"
    with pytest.raises(SystemExit):
        parse(["decode", "--shape", "qwen3-8b", "--weights", "mxfp4"])
    assert "invalid choice: 'mxfp4'" in capsys.readouterr().err


def test_the_limit_is_what_16_bits_make_of_the_unpacked_weights():
    weights = NarrowRandomWeights(SPEC)
    want = ReferenceBackend(weights, BackendOptions()).forward_logits(IDS)
    limit = unpacked_kl_limit(weights, ReferenceBackend, BackendOptions(), IDS, want)
    wide = Retyped(weights, SPEC.dtype)
    assert not wide.spec.narrow and wide.load("layers.0.q_proj").dtype == torch.bfloat16
    theirs = ReferenceBackend(wide, BackendOptions()).forward_logits(IDS)
    kl = float(compare(want, theirs)[1].mean())
    assert kl > 0 and limit.backend == pytest.approx(UNPACKED * kl)
    assert "on the unpacked weights" in limit.reason
