"""The faults of cuda_shared_injection.py, in the CUDA kernels' own C++ on a CPU (cuda_walk.py)."""

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.checkpoint.random_weights import RandomWeights
from tests.lib.cuda_injection import Weights
from tests.lib.cuda_planting import plant
from tests.lib.cuda_shared_injection import (
    SHARED_EDITS,
    SHARED_MODELS,
    SLOTS,
    SPECS,
    answers,
    assert_alike,
    assert_delays_change_nothing,
    assert_nan_ends_one_request,
    assert_nan_is_nobodys_answer,
    assert_silence_is_named,
)
from tests.lib.cuda_walk import ChunkBackend, ColumnBackend, FiberBackend, compile_walk


def opened(kind, weights):
    options = BackendOptions(num_slots=SLOTS[kind])
    if kind == "columns":
        return ColumnBackend(weights, options, counts=(SLOTS[kind],))
    return ChunkBackend(weights, options)


def alone(weights):
    return answers(FiberBackend(weights, BackendOptions(num_slots=8)), one_by_one=True)


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.fixture(scope="module")
def expected(spec):
    return alone(RandomWeights(spec))


@pytest.fixture(scope="module", params=SLOTS)
def shared(request, spec):
    return opened(request.param, RandomWeights(spec))


@pytest.fixture(scope="module", params=SLOTS)
def faulty(request, spec, tmp_path_factory):
    """The kernels of SHARED_EDITS."""
    backend = opened(request.param, RandomWeights(spec))
    include = plant(tmp_path_factory.mktemp("faulty"), *SHARED_EDITS)
    step = backend.chunks.kernel or backend.columns.take(SLOTS[request.param], backend.devices)
    step.kernel.library = compile_walk(step.layout, step.kernel.flags, include=include)
    backend.wait_ns = 1 << 13
    return backend


@pytest.mark.parametrize(
    "name",
    [*("huge", "patterned"), *(pytest.param(n, marks=pytest.mark.slow) for n in ("silent_modules", "tiny", "level"))],
)
def test_values_that_look_like_tags_are_values(name, spec):
    weights = Weights(spec, SHARED_MODELS[name])
    expected = alone(weights)
    for kind in SLOTS:
        assert_alike(answers(opened(kind, weights)), expected)


def test_a_nan_ends_one_request_of_several(shared, expected):
    assert_nan_ends_one_request(shared, expected, (4,))


def test_nan_is_nobodys_answer(shared, expected):
    ring_slots = shared.memory.weights.numel() // shared.layout.lowering.ring_slot_bytes
    assert_nan_is_nobodys_answer(shared, expected, (0, ring_slots - 1))


# Which words are late says nothing about what they hold: test_injected_faults.py asks it of both types.
LATE = pytest.mark.parametrize("spec", ["bf16"], indirect=True)


@LATE
def test_delays_change_nothing(faulty, expected):
    assert_delays_change_nothing(faulty, expected, (1,))


@LATE
def test_a_silent_block_is_named_and_the_next_requests_run(faulty, expected):
    assert_silence_is_named(faulty, expected)
