"""The reference's keys and values: slots grow apart, and one that could not grow grows later."""

import pytest
import torch

from kog_triton.backends.kv_cache import KVCache
from kog_triton.schedule.schedule import build
from tests.lib.ring_walker import spec_of

SPEC = spec_of(num_layers=3)
SCHEDULE = build(SPEC)


def row(value):
    return torch.full((SCHEDULE.num_shards, SCHEDULE.shard_kv_heads, 1, SPEC.head_dim), value)


def test_a_slot_takes_memory_once_it_is_used():
    cache = KVCache(SCHEDULE, 9999, 1024, torch.device("cpu"))
    assert cache.nbytes == 0
    cache.reserve(7, 1)
    one = cache.nbytes
    cache.reserve(8, 1)
    assert one > 0 and cache.nbytes == 2 * one


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("before", [0, 200])
def test_a_slot_whose_growth_ran_out_of_memory_keeps_what_it_had_and_grows_later(monkeypatch, layers, before):
    cache = KVCache(SCHEDULE, 1, 2048, torch.device("cpu"))
    if before:
        cache.reserve(0, before)
        for layer in range(SPEC.num_layers):
            cache.append(layer, 0, before - 1, row(layer + 1.0), row(-layer - 1.0))
    right, calls = torch.Tensor.new_zeros, []

    def once(tensor, *sizes):
        calls.append(sizes)
        if len(calls) == layers + 1:
            raise torch.OutOfMemoryError("no room")
        return right(tensor, *sizes)

    monkeypatch.setattr(torch.Tensor, "new_zeros", once)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(0, 400)
    for end in (300, 900):
        cache.reserve(0, end)
        for layer in range(SPEC.num_layers):
            k, v = cache.append(layer, 0, end - 1, row(0.5), row(0.25))
            assert k.shape[2] == v.shape[2] == end
            if before:
                assert (k[:, :, before - 1] == layer + 1).all()
                assert (v[:, :, before - 1] == -layer - 1).all()
