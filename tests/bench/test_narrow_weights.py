"""`kog bench --weights`: random weights in a narrow format, and how far their kernel may be from the reference."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.bench.arguments import parse
from kog_triton.bench.check import compare
from kog_triton.bench.kl_limit import MOST_OF_LARGE, UNPACKED, unpacked_kl_limit
from kog_triton.bench.model import Retyped, open_model
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights, nearest
from kog_triton.errors import ModelError, RequestError
from kog_triton.model.weight_format import FORMATS, Code
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
    assert "embed" not in dict(weights.spec.narrow) and weights.load("embed").dtype == torch.bfloat16
    again = open_model(None, "smollm2-135m", CPU, format="fp8-channel").weights
    assert again.narrow("layers.3.up_proj").codes.equal(stored.codes)


def test_a_checkpoint_is_not_made_narrow():
    with pytest.raises(RequestError, match="name a --shape"):
        open_model("folder", None, CPU, format="fp8-channel")
    with pytest.raises(ModelError, match="576 columns do not divide into groups of 128"):
        open_model(None, "smollm2-135m", CPU, format="int4-g128")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_that_has_a_name_is_made(name, capsys):
    assert parse(["decode", "--shape", "qwen3-8b", "--weights", name]).weights == name
    how = FORMATS[name]
    wide = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) + 0.5
    stored = nearest(wide, how)
    error = (stored.unpack() - wide).abs()
    scales = stored.scale_values()
    if how.code in (Code.INT8, Code.UINT4):
        step = scales.repeat_interleave(wide.shape[1] // scales.shape[1], 1)
        # Half a step, and what rounding a scale, a zero point or a minimum adds.
        assert (error <= 1.02 * step).all() and 0.2 < error.mean() / step.mean() < 0.32
    else:
        assert error.mean() < 0.12 * wide.abs().mean()
    assert len(stored.codes.unique()) > (13 if how.code.bits == 4 else 150)


def test_nearest_of_e2m1_is_by_the_table():
    values = torch.tensor([0.2, 0.3, 0.74, -0.76, 1.2, 1.3, 2.6, -3.4, 3.6, 4.9, 5.1, -6])
    stored = nearest(torch.cat([values, torch.zeros(20)])[None], FORMATS["mxfp4"])
    near = [0, 0.5, 0.5, -1, 1, 1.5, 3, -3, 4, 4, 6, -6]
    assert int(stored.scales) == 127 and stored.unpack()[0, :12].tolist() == near


def test_the_flag_takes_no_other(capsys):
    with pytest.raises(SystemExit):
        parse(["decode", "--shape", "qwen3-8b", "--weights", "int5"])
    assert "invalid choice: 'int5'" in capsys.readouterr().err


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


@pytest.mark.parametrize(("parameters", "most"), [(7e9, MOST_OF_LARGE), (7e9 - 1, 1)])
def test_a_large_model_has_a_limit_that_no_rounding_widens(monkeypatch, parameters, most):
    weights = NarrowRandomWeights(SPEC)
    monkeypatch.setattr(type(SPEC), "num_parameters", parameters)
    want = torch.randn(len(IDS), SPEC.vocab_size).numpy()  # far from what any kernel makes
    limit = unpacked_kl_limit(weights, ReferenceBackend, BackendOptions(), IDS, want)
    assert (limit.backend == most) is (most < 1)
