"""What the CUDA kernels of columns and of chunks withstand on a Hopper GPU: cuda_shared_injection.py's faults.

The oracle is the kernel of one token on the same GPU, a request at a time.
"""

import time

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import toolchain
from kog_triton.backends.cuda.backend import CudaBackend
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

pytestmark = pytest.mark.gpu
BLOCKS, SEEDS = 12, 20
FEW = 2  # blocks that all have rows of every stage: no ring slot of the weights is padding alone


class OneToken(CudaBackend):
    column_counts = ()
    chunk_positions = 0


class Columns(OneToken):
    column_counts = (SLOTS["columns"],)


class Chunks(OneToken):
    chunk_positions = 8


KINDS = {"columns": Columns, "chunks": Chunks}


def opened(kind, weights, num_slots, blocks=BLOCKS):
    options = BackendOptions(device="nvidia", prefill="kernel", num_slots=num_slots)
    backend = kind(weights, options, blocks)
    backend.settle()
    while kind is Columns and not backend.columns.ready(num_slots):
        time.sleep(0.1)
    return backend


def alone(weights, blocks=BLOCKS):
    backend = opened(OneToken, weights, max(SLOTS.values()), blocks)
    expected = answers(backend, one_by_one=True)
    backend.close()
    return expected


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.fixture(scope="module")
def expected(spec):
    return alone(RandomWeights(spec, device="cuda"))


@pytest.fixture(scope="module", params=KINDS)
def shared(request, spec):
    weights = RandomWeights(spec, device="cuda")
    backend = opened(KINDS[request.param], weights, SLOTS[request.param])
    yield backend
    backend.close()


@pytest.fixture(scope="module", params=KINDS)
def faulty(request, spec, tmp_path_factory):
    """The kernels of SHARED_EDITS."""
    include = plant(tmp_path_factory.mktemp("faulty"), *SHARED_EDITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "INCLUDE", include)
        weights = RandomWeights(spec, device="cuda")
        backend = opened(KINDS[request.param], weights, SLOTS[request.param])
        if request.param == "columns":
            backend.columns.take(SLOTS["columns"], backend.devices)
    yield backend
    backend.close()


@pytest.mark.parametrize("name", SHARED_MODELS)
def test_values_that_look_like_tags_are_values(name, spec):
    weights = Weights(spec, SHARED_MODELS[name], "cuda")
    expected = alone(weights)
    for name, kind in KINDS.items():
        backend = opened(kind, weights, SLOTS[name])
        assert_alike(answers(backend), expected)
        backend.close()


def test_a_nan_ends_one_request_of_several(shared, expected):
    assert_nan_ends_one_request(shared, expected, range(8))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_nobodys_answer(kind, spec):
    weights = RandomWeights(spec, device="cuda")
    backend = opened(KINDS[kind], weights, SLOTS[kind], FEW)
    ring_slots = backend.memory.weights.numel() // backend.layout.lowering.ring_slot_bytes
    assert_nan_is_nobodys_answer(backend, alone(weights, FEW), range(ring_slots))
    backend.close()


def test_delays_change_nothing(faulty, expected):
    faulty.wait_ns = 1 << 31  # two seconds
    assert_delays_change_nothing(faulty, expected, range(1, SEEDS + 1))


def test_a_silent_block_is_named_and_the_gpu_goes_on(faulty, expected):
    faulty.wait_ns = 1 << 24  # 17 ms
    assert_silence_is_named(faulty, expected)
