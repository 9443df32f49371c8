"""One suite for every backend: each stage on the same inputs, and whole steps, against the reference.

A backend joins by one line of BACKENDS. A stage starts from given tensors, so that an error is charged to the
stage that made it. What is compared is what ReferenceBackend.run_stage names. Requests are the affair of
test_conformance_requests.py and test_conformance_sampling.py, on the same backends.
"""

import functools
import itertools

import numpy as np
import pytest
import torch

from kog_triton.backends import STAGE_READS, BackendOptions, BackgroundCompiler
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import ModelError, RequestError
from kog_triton.model.spec import DType, Head
from kog_triton.sampling import SamplingParams
from kog_triton.stage_check import mixes, stage_inputs
from tests.lib.conformance_backends import BACKENDS, HIP, IN_LOGITS, LIMITS, OF_FIBERS, ON_GPU, marks
from tests.lib.conformance_requests import NARROW, marked_narrow, planted_in
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.ring_walker import spec_of

TOKENS, CACHED, CONTEXT = 2, 150, 256
ATTENTION_LIMITS = {DType.F16: 1.5e-3, DType.BF16: 7e-3}
X_ROUNDED = 2  # times as much in the other stages of Triton, which rounds their x to 16 bits


def lanes(head, **changes):
    return mixed_lanes(head, max_context=CONTEXT, **changes)


SPECS = {
    "bf16, windows": spec_of(dtype=DType.BF16, windows=(5, 0, 100), max_context=CONTEXT),
    "all options, awkward sizes": spec_of(
        dtype=DType.F16, hidden_size=54, intermediate_size=90, num_heads=10, num_kv_heads=2,
        head_dim=8, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tied_embeddings=True,
        max_context=CONTEXT,
    ),
    "all options, steps of four": spec_of(
        dtype=DType.F16, hidden_size=52, intermediate_size=92, num_heads=10, num_kv_heads=2,
        head_dim=24, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tied_embeddings=True,
        max_context=CONTEXT,
    ),
    "lanes, mean": lanes(Head.MEAN, lane_norms=True),
    "lanes, sum": lanes(Head.SUM_THEN_NORM),
    "lanes, concat": lanes(Head.CONCAT, hidden_size=104, num_heads=4, head_dim=16),
    "lanes, vocabulary": lanes(Head.VOCAB_PARALLEL),
}  # fmt: skip
# Of whole steps alone: tests/cuda/test_cuda_narrow.py and tests/gpu/test_cuda_narrow_gpu.py have their stages.
NARROW_SPECS = {name: spec for name, (_, spec) in NARROW.items()}


@functools.cache
def opened(name, spec_name):
    """A backend and the reference on the same weights."""
    spec = (SPECS | NARROW_SPECS)[spec_name]
    device = "nvidia" if name in ON_GPU else ""
    kind = NarrowRandomWeights if spec.narrow else RandomWeights
    weights = kind(spec, device="cuda" if device else "cpu")
    ours = BACKENDS[name](weights, BackendOptions(device=device))
    if isinstance(ours, BackgroundCompiler):
        ours.settle()  # so that it is always the same kernel that is judged
    return ours, ReferenceBackend(weights, BackendOptions())


def refuses(name, spec_name):
    """Triton loads four values at a time; instead of one model it takes the next."""
    return name.startswith("triton") and spec_name == "all options, awkward sizes"


def backends(among=BACKENDS):
    """Every backend by name."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name, steps=False)) for name in among])


def backends_and_models(steps=False):
    """Every backend with every model that it does not refuse; where `steps` are, CUDA's with narrow weights too."""
    narrow = [name for name in BACKENDS if name.startswith("cuda") and steps]
    return pytest.mark.parametrize(
        ("name", "spec_name"),
        [
            *(
                pytest.param(name, spec_name, marks=marks(name, steps))
                for name in BACKENDS
                for spec_name in SPECS
                if not refuses(name, spec_name)
            ),
            *(marked_narrow(name, spec_name) for name in narrow for spec_name in NARROW_SPECS),
        ],
    )


def inputs(spec, stage, layer):
    return stage_inputs(spec, stage, layer, TOKENS, CACHED)


@backends([name for name in BACKENDS if name.startswith("triton")])
def test_a_size_that_is_not_in_steps_of_four_is_refused_by_name(name):
    with pytest.raises(ModelError, match="hidden_size 54 in steps of four"):
        opened(name, "all options, awkward sizes")


@backends_and_models()
@pytest.mark.parametrize("stage", STAGE_READS)
def test_a_stage_computes_what_the_reference_says(name, spec_name, stage):
    spec = SPECS[spec_name]
    ours, reference = opened(name, spec_name)
    if stage == "mix" and not mixes(spec):
        with pytest.raises(RequestError, match="no stage named 'mix'"):
            ours.run_stage(stage, 0, inputs(spec, stage, 0))
        return
    limit = (ATTENTION_LIMITS if stage == "attention" else LIMITS)[spec.dtype]
    limit *= X_ROUNDED if name.startswith("triton") and stage != "attention" else 1
    once = stage in ("embed", "mix", "lm_head")
    for layer in range(1 if once else spec.num_layers):
        state = inputs(spec, stage, layer)
        expected = reference.run_stage(stage, layer, state)
        got = ours.run_stage(stage, layer, state)
        assert got.keys() == expected.keys()
        for key, want in expected.items():
            have = got[key].cpu()
            assert have.shape == want.shape, (layer, key)
            error = (have - want).square().mean().sqrt() / want.square().mean().sqrt()
            assert error < limit, (layer, key, float(error))


@backends()
@pytest.mark.parametrize("size", [0.0, 1e-23])
def test_next_to_nothing_travels_as_next_to_nothing(name, size):
    """The first value of a word of bfloat16 has neither a zero nor small exponents (schedule/wire.py)."""
    ours, _ = opened(name, "bf16, windows")
    x = torch.full((1, 1, ours.spec.hidden_size), size)
    got = ours.run_stage("qkv_proj", 0, {"x": x})
    assert all((value.abs() < 1e-18).all() for value in got.values())


@backends()
@pytest.mark.parametrize("changes", [{}, {"num_heads": 18, "num_kv_heads": 2}, {"num_heads": 20, "num_kv_heads": 1}])
def test_attention_over_more_tiles_than_warps_have_room_for(name, changes):
    spec = spec_of(dtype=DType.F16, num_layers=1, max_context=1024, **changes)
    weights = RandomWeights(spec, device="cuda" if name in ON_GPU else "cpu")
    ours = BACKENDS[name](weights, BackendOptions(device="nvidia" if name in ON_GPU else ""))
    g = torch.Generator().manual_seed(3)
    kv, d = spec.num_kv_heads, spec.head_dim
    state = {
        n: torch.randn(1, *shape, d, generator=g)
        for n, shape in {
            "q": (1, spec.num_heads),
            "k": (1, kv),
            "v": (1, kv),
            "keys": (kv, 900),
            "values": (kv, 900),
        }.items()
    }
    want = ReferenceBackend(weights, BackendOptions()).run_stage("attention", 0, state)["attention"]
    have = ours.run_stage("attention", 0, state)["attention"].cpu()
    assert (have - want).square().mean().sqrt() < 2 * LIMITS[DType.F16] * want.square().mean().sqrt()


@backends()
def test_a_key_that_float16_cannot_hold_shows(name):
    """Rotated beyond its range against the query: an infinity would weigh nothing, and nobody would know."""
    ours, _ = opened(name, "lanes, sum")
    state = inputs(ours.spec, "attention", 0)
    state = {key: t[:, :1] if key in "qkv" else t for key, t in state.items()}
    half, rotation = ours.spec.head_dim // 2, np.exp(-1j * CACHED)
    for key, size in (("k", 80_000), ("q", -1)):  # what the first pair is once it is rotated
        state[key][..., 0], state[key][..., half] = size * rotation.real, size * rotation.imag
    assert state["k"].abs().max() < 65_504
    got = ours.run_stage("attention", 0, state)
    assert got["keys"][:, :, -1, 0].isnan().all()
    assert got["attention"].isnan().all()


@backends_and_models(steps=True)
def test_whole_steps_repeat_and_agree_with_the_reference(name, spec_name):
    ours, reference = opened(name, spec_name)
    ids = np.random.default_rng(0).integers(0, ours.spec.vocab_size, 6).tolist()
    got, expected = ours.forward_logits(ids), reference.forward_logits(ids)
    assert np.array_equal(got, ours.forward_logits(ids))
    assert expected.std() > 4
    assert np.sqrt(((got - expected) ** 2).mean()) < IN_LOGITS * LIMITS[ours.spec.dtype]


@backends_and_models(steps=True)
def test_greedy_tokens_may_first_differ_where_the_reference_is_nearly_tied(name, spec_name):
    ours, reference = opened(name, spec_name)
    prompt, tokens = (3, 50, 71), []
    for backend in (ours, reference):
        mailbox = Mailbox()
        mailbox.post(Request(0, prompt, SamplingParams(temperature=0), 0, 6))
        backend.generate(mailbox)
        tokens.append([step.token for step in mailbox.read(0)])
    logits = reference.forward_logits([*prompt, *tokens[1]])
    for n, (a, b) in enumerate(zip(*tokens, strict=True)):
        if a != b:
            second, first = np.sort(logits[len(prompt) + n - 1])[-2:]
            assert first - second < 60 * LIMITS[ours.spec.dtype]
            break


# file, before, after, the stages that must be charged, the model
FAULTS = {
    "one window for all": ("join.h", "kWindows[b.layer]", "kWindows[0]", {"attention"},
                           "bf16, windows"),
    "own outputs not scaled": ("outputs.h", "return y * kRootLanes;", "return y;", {"o_proj", "down_proj"},
                               "lanes, sum"),
    "other lanes' late outputs lost": ("outputs.h", "y + late()", "y + 0 * late()",
                                       {"o_proj", "down_proj"}, "lanes, sum"),
    "streams not behind each other": ("mix.h", "lane * kHidden + row + i,", "row + i,",
                                      {"lm_head"}, "lanes, concat"),
}  # fmt: skip


HIP_FAULTS = {  # of headers that no other backend compiles
    "threads of a row that do not meet": ("dot/products.h", "mask = 1; mask <", "mask = 2; mask <",
                                          {s for s in STAGE_READS if s.endswith(("_proj", "head"))},
                                          "all options, steps of four"),
    "a score of another key": ("scores.h", "shuffle(mine[0], from + 4 * i)",
                               "shuffle(mine[0], from + 4 - 4 * i)", {"attention"},
                               "all options, steps of four"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), [*itertools.product(OF_FIBERS, FAULTS), *((HIP, f) for f in HIP_FAULTS)])
def test_a_planted_fault_is_charged_to_its_stages(fault, name):
    *edit, wrong, spec_name = (FAULTS | HIP_FAULTS)[fault]
    ours, _ = opened(name, spec_name)
    ours.run_stage("embed", 0, inputs(SPECS[spec_name], "embed", 0))
    kernel = ours._kernels[-1]
    with planted_in(kernel, edit):
        for stage in STAGE_READS:
            if stage in wrong:
                with pytest.raises(AssertionError):
                    test_a_stage_computes_what_the_reference_says(name, spec_name, stage)
            else:
                test_a_stage_computes_what_the_reference_says(name, spec_name, stage)
