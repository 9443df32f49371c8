"""Suffixes behind a cached prefix: their place and slot are read from memory, and what they leave is the reference's.

Triton's kernels run in its interpreter, and flash attention, a GPU's, has a stand-in that reads the same words.
"""

import math
import os

import pytest
import torch

from kog_triton.backends.prefill import suffixes
from kog_triton.backends.prefill.forward import band
from kog_triton.backends.prefill.graphs import Graphed
from kog_triton.backends.prefill.library import BUCKET, SUFFIX, LibraryPrefill
from tests.lib.prefill_cases import (
    BF16,
    CPU,
    F32,
    SPECS,
    TOLERANCE,
    assert_filled,
    empty_cache,
    errors,
    expected,
    expected_streams,
    prefill_of,
    tokens_of,
)

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here")
SLOTS, SIZES = 3, (8, 4)


def attend_told(q, keys, values, queries, row, count, most_keys, window):
    """What suffixes ask of flash attention, on a CPU."""
    (begin, end), seen = queries.tolist(), int(count)
    assert begin == 0 and seen <= most_keys
    out = torch.full_like(q, torch.nan)
    if not end:
        return out
    step = (seen, *keys.shape[1:])
    offset = keys.storage_offset() + int(row[0]) * keys.stride(0)
    k = torch.as_strided(keys, step, keys.stride(), offset).transpose(0, 1)
    offset += values.storage_offset() - keys.storage_offset()
    v = torch.as_strided(values, step, values.stride(), offset).transpose(0, 1)
    group = q.shape[1] // len(k)
    k, v = (t.repeat_interleave(group, 0).float() for t in (k, v))
    mask = band(seen - end, seen, 0, window or seen, F32, CPU)
    scores = q[:end].transpose(0, 1).float() @ k.mT / math.sqrt(q.shape[2]) + mask
    out[:end] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(suffixes, "aligns_ends", lambda *what: True)
    monkeypatch.setattr(suffixes, "attend_told", attend_told)
    monkeypatch.setattr(suffixes, "SIZES", SIZES)
    monkeypatch.setattr(suffixes, "DEEPEST", 1000)


def slots_of(name, dtype=F32):
    return torch.stack([empty_cache(name, dtype)] * SLOTS)


def library_with(slots, name, dtype=F32, **changes):
    return prefill_of(name, dtype, fused=True, slots=slots, to_head=True, **changes)


def run(ours, name, first, end, cache, at_once=True):
    streams = torch.full((1, SPECS[name].hidden_size), torch.nan)
    tokens = tokens_of(end)[first:]
    ours.begin(tokens, first, cache, streams).advance(math.inf, at_once)
    return streams


@interpreted
@pytest.mark.parametrize(("name", "dtype"), [("llama", F32), ("qwen3", BF16), ("mistral", F32), ("biases", F32)])
def test_a_suffix_leaves_what_the_reference_leaves_in_its_slot_alone(name, dtype, on_a_cpu):
    slots = slots_of(name, dtype)
    ours, took = library_with(slots, name, dtype), []
    right = ours._suffixes.pieces
    ours._suffixes.pieces = lambda ids, *where: took.append(len(ids)) or right(ids, *where)
    for first, end in ((0, 3), (3, 6), (6, 14)):
        streams = run(ours, name, first, end, slots[1])
        assert_filled(slots[1], name, dtype, end)
        want = expected_streams(name, dtype, end)
        assert (streams - want).norm() < TOLERANCE[dtype] * want.norm()
    assert took == [3, 8]
    assert ours._ran == {BUCKET, SUFFIX}  # each compiles kernels of its own, and says so if that takes long
    assert slots[0].isnan().all() and slots[2].isnan().all()


@interpreted
@pytest.mark.parametrize("change", ["row", "first", "count", "keys"])
def test_a_wrong_word_is_seen(change, on_a_cpu, monkeypatch):
    write = suffixes.SuffixWords.write

    def wrong(self, ids, first, row):
        write(self, ids, first, row)
        at, by = {
            "row": (suffixes.ROW, 64),
            "first": (suffixes.FIRST, 1),
            "count": (suffixes.COUNT, 1),
            "keys": (suffixes.KEYS, -1),
        }[change]
        self.words[at] += by

    monkeypatch.setattr(suffixes.SuffixWords, "write", wrong)
    slots = slots_of("llama")
    ours = library_with(slots, "llama")
    run(ours, "llama", 0, 3, slots[1])
    run(ours, "llama", 3, 6, slots[1])
    with pytest.raises(AssertionError):
        assert_filled(slots[1], "llama", F32, 6)


class Graph:
    """A graph's stand-in: a replay runs what was captured, on the words as they then are."""

    def pool(self):
        return "pool"


@interpreted
def test_a_graph_serves_every_suffix_of_its_size(on_a_cpu, monkeypatch):
    """And to capture it writes into no slot, whatever ran before."""
    slots = slots_of("llama")
    ours, replayed = library_with(slots, "llama"), []
    run(ours, "llama", 0, 3, slots[0])
    run(ours, "llama", 3, 5, slots[0])
    ours._suffixes.write(torch.tensor([1, 2]), 5, 0)  # of a suffix that a graph ran
    before = slots.clone()
    for size in SIZES:
        ours._empty()
        ours._run(Graphed(SUFFIX, size))
    assert torch.equal(slots.isnan(), before.isnan())
    assert torch.equal(slots.nan_to_num(), before.nan_to_num())

    def replay(wanted):
        replayed.append(wanted.size)
        ours._run(wanted)

    monkeypatch.setattr(type(ours._graphs), "__contains__", lambda self, wanted: True)
    ours._graphs.replay = replay
    monkeypatch.setattr(LibraryPrefill, "_size_for", lambda self, count: 0)
    run(ours, "llama", 0, 4, slots[2])
    for first, end, slot in ((5, 12, 0), (4, 6, 2), (12, 14, 0)):
        streams = run(ours, "llama", first, end, slots[slot])
        assert_filled(slots[slot], "llama", F32, end)
        want = expected_streams("llama", F32, end)
        assert (streams - want).norm() < TOLERANCE[F32] * want.norm()
    assert replayed == [8, 4, 4] and slots[1].isnan().all()


@interpreted
def test_beside_others_a_suffix_runs_piece_by_piece_and_leaves_the_same(on_a_cpu):
    slots = slots_of("llama")
    ours = library_with(slots, "llama")
    for slot in (0, 1):
        run(ours, "llama", 0, 9, slots[slot])
    run(ours, "llama", 9, 15, slots[0])
    sliced = ours.begin(tokens_of(15)[9:], 9, slots[1])
    calls = 0
    while not sliced.advance(0.0):
        assert sliced.filled == 9
        calls += 1
    assert calls > 4 * SPECS["llama"].num_layers and sliced.filled == 15
    assert torch.equal(slots[0, ..., :15, :], slots[1, ..., :15, :])


@interpreted
def test_what_no_suffix_can_be_runs_in_chunks(on_a_cpu, monkeypatch):
    """A cache that is no slot, a fresh prompt, more tokens than a size, and few ones behind many positions."""
    slots = slots_of("llama")
    ours, other = library_with(slots, "llama"), empty_cache("llama")
    row_of = ours._suffixes.row_of
    assert row_of(3, 8, slots[2]) == 2 * slots[0].numel() // SPECS["llama"].head_dim
    assert row_of(3, 8, other) is None and row_of(3, 8, slots[2][..., :32, :].clone()) is None
    assert row_of(3, 8, slots[2][..., 1:, :]) is None and row_of(3, 8, slots[1:]) is None
    assert row_of(0, 8, slots[0]) is None and row_of(3, 9, slots[0]) is None
    ours._suffixes._blocks = 132
    monkeypatch.setattr(suffixes, "DEEPEST", 12)
    heads = SPECS["llama"].num_heads
    deepest = int(12 / (1 - heads / 132))
    assert row_of(deepest - 4, 4, slots[0]) == 0 and row_of(deepest - 3, 4, slots[0]) is None
    ours.run(tokens_of(40)[:3], 0, other)
    ours.run(tokens_of(40)[3:40], 3, other)
    assert errors(other[..., :40, :], expected("llama", F32, 40)).max() < TOLERANCE[F32]


def test_lanes_and_rows_that_no_word_counts_have_none(monkeypatch):
    monkeypatch.setattr(suffixes, "aligns_ends", lambda *what: True)
    assert suffixes.reads_suffixes(torch.zeros(2, 3, 1, 2, 2, 8, 16))
    assert not suffixes.reads_suffixes(torch.zeros(2, 3, 4, 2, 2, 8, 16))
    far = torch.empty(2, 1 << 20, 1, 8, 2, 64, 16, device="meta")
    assert not suffixes.reads_suffixes(far) and suffixes.reads_suffixes(far[:1])
    odd = torch.zeros(300).as_strided((2, 1, 1, 1, 2, 4, 16), (133, 0, 0, 0, 64, 16, 1))
    assert not suffixes.reads_suffixes(odd)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "biases"])
def test_a_gpu_takes_suffixes_in_graphs_and_leaves_the_same_bits_as_without(name):
    from tests.lib.prefill_cases import PlainMatrices, weights_of

    device, spec = torch.device("cuda"), SPECS[name]
    kept = PlainMatrices(weights_of(name, BF16), BF16, device)
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    matrices = {(i, n): kept.unpack(i, n) for i in range(spec.num_layers) for n in names}
    kept.unpack = lambda layer, stage: matrices[layer, stage]
    slots = torch.stack([empty_cache(name, BF16)] * SLOTS).to(device)
    ours = prefill_of(name, BF16, device, matrices=kept, slots=slots, to_head=True)
    assert ours._suffixes is not None
    ends = (3, 8, 30, 31, 60)
    found = []
    for slot in (1, 2):
        for first, end in zip((0, *ends), ends, strict=False):
            streams = torch.full((1, spec.hidden_size), torch.nan, device=device)
            ours.begin(tokens_of(end)[first:], first, slots[slot], streams).advance(math.inf, True)
            assert_filled(slots[slot].cpu(), name, BF16, end)
            want = expected_streams(name, BF16, end)
            assert (streams.cpu() - want).norm() < TOLERANCE[BF16] * want.norm()
            found.append(streams.cpu())
        while ours.make_ready():
            pass
    assert len(ours._graphs._graphs) >= len(suffixes.SIZES)
    assert torch.equal(slots[1, ..., :60, :], slots[2, ..., :60, :])
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))
    assert slots[0].isnan().all()
