"""A start reads every weight once though the kernel and the library both take it, and holds none behind that."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from cuda_walk import FiberBackend
from ring_walker import spec_of

from kog_triton.backends import BackendOptions
from kog_triton.backends.library_prefill import open_library
from kog_triton.backends.read_once import ReadOnce, has_room, read_once
from kog_triton.model.spec import DType
from kog_triton.random_weights import RandomWeights

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPEC = spec_of(
    num_layers=2, dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True
)
LIBRARY = BackendOptions(prefill="library", max_context=64)


class Counted:
    """Random weights; how often each was read, and those that still live."""

    def __init__(self, spec, device=CPU):
        self.spec, self.reads, self._weights = spec, Counter(), RandomWeights(spec, 0, device)
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
    enough = packed + held + cache + 2 * packed
    for free, room in ((enough, True), (enough - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1 << 40))
        assert has_room(SPEC, options, GPU) == room
        weights = RandomWeights(SPEC)
        if not room:
            with read_once(weights, SPEC, options, GPU) as same:
                assert same is weights


@pytest.mark.gpu
def test_a_gpu_holds_no_more_behind_a_start_than_without():
    """The first library leaves what torch's matrix products keep."""
    weights, options = RandomWeights(SPEC, 0, "cuda"), BackendOptions(max_context=64)
    kept = []
    for hold in (False, False, True):
        before = torch.cuda.memory_allocated()
        if hold:
            with read_once(weights, SPEC, options, GPU) as source:
                assert source is not weights
                library = opened(source, options)
        else:
            library = opened(weights, options)
        kept.append(torch.cuda.memory_allocated() - before)
        del library
    assert kept[2] == kept[1] > 0


def opened(source, options):
    for layer in range(SPEC.num_layers):
        source.load(f"layers.{layer}.q_proj")
    embed = source.load("embed").half()
    return open_library(options, source, SPEC, 64, embed, embed.nbytes)
