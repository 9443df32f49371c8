"""A start reads every weight once though the kernel and the library both take it, and holds none behind that."""

import gc
import weakref
from collections import Counter

import pytest
import torch

from kog_triton.backends import BackendOptions, find_backend
from kog_triton.backends.prefill.read_once import ReadOnce, has_room, read_once
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import spec_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPEC = spec_of(
    num_layers=2, dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True
)
LIBRARY = BackendOptions(prefill="library", max_context=64)


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

    @property
    def alive(self):
        gc.collect()
        return {name for name, ref in self._given if ref() is not None}


def triton_on_a_cpu(weights, options):
    from kog_triton.backends.triton import TritonBackend

    return TritonBackend(weights, options, num_blocks=2, device=CPU)


@pytest.mark.parametrize("make", [FiberBackend, triton_on_a_cpu], ids=["cuda", "triton"])
def test_a_start_reads_every_weight_once(make):
    weights = Counted(SPEC)
    backend = make(weights, LIBRARY)
    assert set(weights.reads.values()) == {1} and len(weights.reads) > 20
    packed = {name for name in weights.alive if not name.endswith(("o_proj", "down_proj"))}
    # the library keeps what it takes as it is: those two matrices, and biases and norms
    assert not packed & {"layers.0.q_proj", "layers.1.gate_proj", "layers.0.up_proj", "lm_head"}
    backend.close()


def test_both_readers_get_the_same():
    once = ReadOnce(RandomWeights(SPEC), CPU)
    for name in ("embed", "layers.1.q_proj"):
        first, second = once.load(name), once.load(name)
        assert first is second and torch.equal(first, RandomWeights(SPEC).load(name))
        assert once.load(name) is not first


@pytest.mark.parametrize("prefill", ["kernel", "decode", "auto"])
def test_one_reader_gets_the_weights_themselves(prefill):
    """On a CPU "auto" makes no library."""
    weights = RandomWeights(SPEC)
    with read_once(weights, SPEC, BackendOptions(prefill=prefill), CPU) as same:
        assert same is weights


def test_nothing_is_held_behind_an_error():
    weights = Counted(SPEC)
    with pytest.raises(ValueError), read_once(weights, SPEC, LIBRARY, CPU) as once:
        once.load("embed")
        assert weights.alive == {"embed"}
        raise ValueError
    assert weights.alive == set()


def test_where_memory_is_short_nothing_is_held(monkeypatch):
    """Beside what is held the library must find what it asks for, as if nothing were."""
    options = BackendOptions(num_slots=2, max_context=64)
    packed = 2 * (SPEC.num_parameters + SPEC.vocab_size * SPEC.hidden_size)
    held, cache = 4 * SPEC.num_parameters, 2 * 64 * SPEC.kv_bytes_per_position
    packing = 8 * 2 * SPEC.vocab_size * SPEC.hidden_size  # copies of the largest matrix
    enough = packed + held + cache + packing + 2 * packed
    for free, room in ((enough, True), (enough - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1 << 40))
        assert has_room(SPEC, options, GPU) == room
        weights = RandomWeights(SPEC)
        if not room:
            with read_once(weights, SPEC, options, GPU) as same:
                assert same is weights


def test_what_was_held_is_given_back_to_other_processes(monkeypatch):
    """Not behind an error, where the GPU may refuse that, too."""
    given = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("all"))
    options = BackendOptions(max_context=64)
    with pytest.raises(ValueError), read_once(RandomWeights(SPEC), SPEC, options, GPU):
        raise ValueError
    assert given == []
    with read_once(RandomWeights(SPEC), SPEC, options, GPU) as once:
        assert isinstance(once, ReadOnce)
    assert given == ["all"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_start_on_a_gpu_reads_every_weight_once(name):
    weights = Counted(SPEC)
    backend = find_backend(name)(weights, BackendOptions(device="nvidia", max_context=64))
    assert backend.library is not None
    assert set(weights.reads.values()) == {1} and len(weights.reads) > 20
    backend.close()
