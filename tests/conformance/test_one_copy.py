"""A backend holds the weights once, prompts by the library or not, and a start reads every matrix once."""

import gc
import weakref
from collections import Counter

import pytest
import torch

from kog_triton.backends import BackendOptions, find_backend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import spec_of

CPU = torch.device("cpu")
SPEC = spec_of(num_layers=2, dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)


class Counted:
    """Random weights; how often each was read, and those that still live."""

    def __init__(self, spec):
        self.spec, self.reads, self._weights = spec, Counter(), RandomWeights(spec)
        self._given = []

    def load(self, name):
        self.reads[name] += 1
        tensor = self._weights.load(name)
        self._given.append((name, weakref.ref(tensor)))
        return tensor

    def reads_of_matrices(self):
        return {n: c for n, c in self.reads.items() if n.endswith("_proj") or "." not in n}

    @property
    def alive(self):
        gc.collect()
        return {name for name, ref in self._given if ref() is not None}


def triton_on_a_cpu(weights, options):
    from kog_triton.backends.triton import TritonBackend

    return TritonBackend(weights, options, num_blocks=2, device=CPU)


@pytest.mark.parametrize("make", [FiberBackend, triton_on_a_cpu], ids=["cuda", "triton"])
def test_the_library_takes_the_kernels_own_matrices(make):
    held = {}
    for prefill in ("kernel", "library"):
        weights = Counted(SPEC)
        backend = make(weights, BackendOptions(prefill=prefill, max_context=64))
        held[prefill] = backend.memory_bytes()
        matrices = weights.reads_of_matrices()
        assert set(matrices.values()) == {1} and len(matrices) > 14
        assert not {name for name in weights.alive if name.endswith("_proj")}
        backend.close()
    assert held["library"]["weights"] == held["kernel"]["weights"]
    assert held["library"]["other"] > held["kernel"]["other"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_start_on_a_gpu_reads_every_matrix_once(name):
    weights = Counted(SPEC)
    backend = find_backend(name)(weights, BackendOptions(device="nvidia", max_context=64))
    assert backend.library is not None
    assert set(weights.reads_of_matrices().values()) == {1}
    backend.close()
