"""Uploads: the numbers arrive where they should, in the stream's order, and the host does not wait."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.mailbox import Request
from kog_triton.backends.prefill.upload import upload
from kog_triton.backends.request_words import OFFSETS, encode
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from kog_triton.sampling.params import SamplingParams
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import spec_of


def test_a_part_of_a_tensor_is_written_and_no_more():
    home = torch.full((3, 8), -1, dtype=torch.int32)
    upload(torch.tensor([5, 6, 7], dtype=torch.int32), home[1, 2:5])
    expected = np.full((3, 8), -1)
    expected[1, 2:5] = (5, 6, 7)
    assert np.array_equal(home.numpy(), expected)


def test_a_request_lies_in_its_slot_alone():
    spec = spec_of(dtype=DType.F16)
    backend = FiberBackend(RandomWeights(spec), BackendOptions(num_slots=3))
    memory = backend.memory
    for tensor in (memory.request, memory.tokens, memory.states):
        tensor.fill_(-7)
    params = SamplingParams(temperature=0.0, max_tokens=4, seed=0).resolve(spec.vocab_size, (), list)
    prompt = (9, 3, 5, 8)
    words = encode(Request(1, prompt, params, seed=0, max_tokens=4), spec.vocab_size)
    memory.write_request(1, words, prompt, 2)
    assert memory.request[1, OFFSETS["prompt"]] == 4 and memory.request[1, OFFSETS["most"]] == 4
    assert np.array_equal(memory.request[1, : words.size].numpy().view(np.uint32), words)
    assert memory.tokens[1, :5].tolist() == [*prompt, -7] and memory.states[1].tolist() == [2, 5]
    for tensor in (memory.request, memory.tokens, memory.states):
        assert (tensor[[0, 2]] == -7).all()
    backend.close()


@pytest.mark.parametrize("longer", [False, True])
def test_a_launch_finds_its_words_zero(longer):
    """Also one with more words than the one before: another kernel's."""
    backend = FiberBackend(RandomWeights(spec_of(dtype=DType.F16)), BackendOptions())
    memory = backend.memory
    CudaBackend._clear(backend, 0, memory)
    if longer:
        memory = replace(memory, words=torch.zeros(2 * len(memory.words) + 3, dtype=torch.int32))
    for tensor in (memory.words, memory.error, memory.mailbox):
        tensor.fill_(7)
    CudaBackend._clear(backend, 0, memory)
    assert not any(t.any() for t in (memory.words, memory.error, memory.mailbox))
    backend.close()


@pytest.mark.gpu
def test_an_upload_follows_the_stream_and_waits_for_nothing():
    """The kernels queued before it still read what lay there; the source may go at once."""
    home = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    big = torch.ones(4096, 4096, device="cuda")
    upload(torch.full((1 << 20,), 1, dtype=torch.int32), home)  # pins its first memory
    torch.cuda.synchronize()
    seen = []
    torch.cuda._sleep(2_000_000_000)  # cycles, about a second: more than a loaded host takes to queue all that follows
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in range(2, 12):
            big = big @ big * 1e-4
            seen.append(home.float().mean())
            upload(torch.full((1 << 20,), value, dtype=torch.int32), home)
        ahead = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ahead, "the host waited"
    assert [int(s) for s in seen] == list(range(1, 11)) and (home == 11).all()
