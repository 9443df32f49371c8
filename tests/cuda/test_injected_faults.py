"""The faults of cuda_injection.py, planted in the CUDA kernel's own C++ on a CPU (cuda_walk.py)."""

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.checkpoint.random_weights import RandomWeights
from tests.lib.cuda_injection import (
    EDITS,
    MODELS,
    SPECS,
    Weights,
    assert_delays_change_nothing,
    assert_logits_agree,
    assert_nan_is_never_lost,
    assert_patterns_travel,
    assert_silence_is_named,
    selecting,
)
from tests.lib.cuda_planting import plant
from tests.lib.cuda_walk import FiberBackend, compile_walk


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.fixture(scope="module")
def faulty(spec, tmp_path_factory):
    """The kernel of EDITS."""
    backend = FiberBackend(RandomWeights(spec), BackendOptions(), 3)
    include = plant(tmp_path_factory.mktemp("faulty"), *EDITS)
    backend.kernel.library = compile_walk(backend.layout, include=include)
    backend.wait_ns = 1 << 13
    return backend


def test_a_silent_block_is_named_and_the_next_request_runs(faulty):
    assert_silence_is_named(faulty)


def test_delays_change_nothing(faulty):
    assert_delays_change_nothing(faulty, (1, 2))


def test_nan_is_never_lost(spec):
    backend = FiberBackend(RandomWeights(spec), BackendOptions())
    ring_slots = backend.memory.weights.numel() // backend.layout.lowering.ring_slot_bytes
    assert_nan_is_never_lost(backend, range(0, ring_slots, max(1, ring_slots // 8)))


@pytest.mark.parametrize("name", MODELS)
def test_values_that_look_like_tags_are_values(name, spec):
    weights = Weights(spec, MODELS[name])
    assert_logits_agree(FiberBackend(weights, BackendOptions()), weights)


def test_every_kind_of_pattern_travels(spec):
    backend = FiberBackend(Weights(spec, selecting), BackendOptions())
    assert_patterns_travel(backend, 29)
