"""What the CUDA monokernel samples on a Hopper GPU: the definition's tokens on its own logits.

The settings and the comparison are those of cuda_sampling.py; vocabularies, grids and the order
of memory are real ones.
"""

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from tests.lib.cuda_sampling import (
    LANES,
    SETTINGS,
    Triplets,
    assert_defined,
    assert_histories_are_apart,
    odd_or_even_of,
    resolved,
    steps_of,
)
from tests.lib.ring_walker import spec_of

pytestmark = pytest.mark.gpu
PROMPT = [1, 2, 3, 2]
MODELS = {
    "vocabulary of qwen3": (RandomWeights, {"vocab_size": 151_936}),
    "ties": (Triplets, {"vocab_size": 128_256}),
    "fewer ids than blocks": (RandomWeights, {"vocab_size": 101}),
    "vocabulary by lane": (RandomWeights, LANES | {"vocab_size": 50_256}),
}


def backend_of(model, slots=1):
    weights, changes = MODELS[model]
    spec = spec_of(dtype=DType.F16, max_context=512, **({"num_layers": 2} | changes))
    # A library rounds otherwise, so that its keys and values would not give the logits compared with.
    options = BackendOptions(device="nvidia", max_context=512, num_slots=slots, prefill="kernel")
    return CudaBackend(weights(spec, device="cuda"), options)


@pytest.fixture(scope="module")
def backends():
    made = {}

    def get(model):
        if model not in made:
            made[model] = backend_of(model, slots=2)
        return made[model]

    yield get
    for backend in made.values():
        backend.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_the_definitions_and_repeat(backends, model, name):
    backend = backends(model)
    params = resolved(backend.spec.vocab_size, **SETTINGS[name])
    steps = steps_of(backend, PROMPT, 24, params)
    assert_defined(backend, PROMPT, steps, params)
    again = steps_of(backend, PROMPT, 24, params)
    assert [(s.token, s.logprob, s.top) for s in again] == [(s.token, s.logprob, s.top) for s in steps]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "logprobs": 2}, {"temperature": 0}])
def test_a_mask_decides_who_is_allowed(backends, settings):
    backend = backends("vocabulary of qwen3")
    vocab = backend.spec.vocab_size
    params, mask = resolved(vocab, **settings), odd_or_even_of(vocab)
    steps = steps_of(backend, PROMPT, 40, params, mask=mask)
    assert_defined(backend, PROMPT, steps, params, mask)


def test_a_long_prompt_and_output_are_penalized(backends):
    backend = backends("fewer ids than blocks")
    prompt = [(7 * i) % 101 for i in range(200)]
    params = resolved(101, frequency_penalty=0.25, repetition_penalty=1.5, presence_penalty=-0.5)
    assert_defined(backend, prompt, steps_of(backend, prompt, 300, params), params)


def test_requests_of_two_slots_have_their_own_history(backends):
    assert_histories_are_apart(backends("vocabulary of qwen3"), PROMPT, 40)
