"""Engines of one process on a real GPU: one does not wait for another's request, and closing gives memory back."""

import threading
from unittest import mock

import pytest
import torch

from kog_triton import LLM, SamplingParams
from kog_triton.backends import launch_queue
from kog_triton.backends.launch_queue import kills_long_kernels

pytestmark = pytest.mark.gpu
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
MARGIN = 96 << 20  # of a GPU's free memory: what the driver keeps of kernels that were loaded
QUANTUM_S = 0.002  # of a launch while another engine waits: the long request takes 0.06 s


def backends():
    return ["triton", "cuda"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"]


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_closing_gives_memory_back_to_the_driver(name):
    if name not in backends():
        pytest.skip("this GPU runs Triton alone")
    free = []
    for _ in range(3):
        with LLM(backend=name) as llm:
            llm.generate("def f(x):\n" * 30, SHORT)
            held = sum(llm.engine.backend.memory_bytes().values())
            free.append(free_bytes())
        free.append(free_bytes())
    opened, closed = free[::2], free[1::2]
    assert closed[0] - opened[0] > 0.5 * held
    assert max(closed) - min(closed) < MARGIN, "what a second and third opening leave"


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_short_request_of_another_engine_ends_before_a_long_one(name):
    if name not in backends():
        pytest.skip("this GPU runs Triton alone")
    with LLM(backend=name) as first, LLM(backend=name) as second:
        alone = [llm.generate("def g(y):", SHORT)[0].outputs[0].token_ids for llm in (first, second)]
        whole = first.generate("def f(x):", LONG)[0].outputs[0].token_ids
        seen, begun = [], threading.Event()

        def read():
            for delta in long:
                seen.extend(delta.token_ids)
                begun.set()

        reader = threading.Thread(target=read)
        with mock.patch.object(launch_queue, "QUANTUM_S", QUANTUM_S):
            long = first.stream("def f(x):", LONG)
            reader.start()
            assert begun.wait(60)
            short = second.stream("def g(y):", SHORT)
            told = [token for delta in short for token in delta.token_ids]
            reader.join(120)
        assert told == alone[1] and seen == whole
        assert short._device_ns[-1] < long._device_ns[-1], "the GPU's own time of the last tokens"


def test_the_driver_says_whether_it_kills_kernels():
    """A data center's GPU drives no display."""
    if any(word in torch.cuda.get_device_name() for word in ("H100", "H200", "A100", "B200")):
        assert kills_long_kernels(0) is False
