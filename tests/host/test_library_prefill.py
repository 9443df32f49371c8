"""Library prefill: its keys and values are the reference backend's.

On a CPU a bucket's pass runs uncaptured: the same tokens, padding and copy as on a GPU.
"""

import math
from contextlib import contextmanager

import pytest
import torch

from kog_triton.backends.embedding import Embedding
from kog_triton.backends.prefill import forward as walk
from kog_triton.backends.prefill.graphs import Graphed, PassGraphs
from kog_triton.backends.prefill.library import BUCKET, BUCKETS, BY_TOKEN, choose_prefill
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import ModelError, RequestError
from tests.lib.prefill_cases import (
    BF16,
    CPU,
    DELAYED,
    F16,
    F32,
    NOW,
    OWN,
    SPECS,
    TOLERANCE,
    PlainMatrices,
    assert_filled,
    empty_cache,
    errors,
    expected,
    expected_streams,
    prefill_of,
    tokens_of,
    weights_of,
)

# name -> how a prompt of so many tokens comes in: a request ends where the next one begins
WAYS = {
    "a token": [1],
    "a padded bucket": [11],
    "a full bucket": [16],
    "chunks": [40],
    "behind a bucket, then token by token": [3, 30, 31, 32, 33],
    "behind chunks": [17, 29],
    "behind chunks, many": [26, 64],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPECS)
def test_keys_and_values_equal_the_reference(name, way):
    ours, held, first = prefill_of(name), empty_cache(name), 0
    tokens = tokens_of(WAYS[way][-1])
    for end in WAYS[way]:
        ours.run(tokens[first:end], first, held)
        assert_filled(held, name, F32, end)
        first = end


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPECS)
def test_the_last_tokens_streams_equal_the_reference(name, way, dtype):
    """Whatever is padded behind it, and in which chunk it stands."""
    ours, held, first = prefill_of(name, dtype, to_head=True), empty_cache(name, dtype), 0
    tokens = tokens_of(WAYS[way][-1])
    for end in WAYS[way]:
        streams = torch.full((SPECS[name].num_lanes, SPECS[name].hidden_size), torch.nan)
        ours.begin(tokens[first:end], first, held, streams).advance(math.inf, at_once=True)
        want = expected_streams(name, dtype, end)
        assert (streams - want).norm() < TOLERANCE[dtype] * want.norm()
        assert_filled(held, name, dtype, end)
        first = end


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", SPECS)
def test_half_precision_rounds_and_no_more(name, dtype):
    ours, held = prefill_of(name, dtype), empty_cache(name, dtype)
    ours.run(tokens_of(13), 0, held)
    assert_filled(held, name, dtype, 13)
    ours.run(tokens_of(50)[13:], 13, held)
    assert_filled(held, name, dtype, 50)
    assert errors(held[..., :50, :], expected(name, dtype, 50)).max() > 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral", "lanes of all kinds"])
def test_attention_behind_many_positions_is_cut_by_their_numbers(name, monkeypatch):
    """Into calls that see the keys of their own tokens and of those before."""
    monkeypatch.setattr(walk, "DEEP", 20)
    monkeypatch.setattr(walk, "DEEP_ROWS", 3)
    calls, right = [], walk.attend
    monkeypatch.setattr(walk, "attend", lambda q, kv, mask: calls.append(q.shape[2]) or right(q, kv, mask))
    ours, held = prefill_of(name), empty_cache(name)
    ours.run(tokens_of(40), 0, held)
    assert_filled(held, name, F32, 40)
    attentions = SPECS[name].num_layers - 1
    assert calls == [7] * 2 * attentions + [3, 3, 1] * 3 * attentions + [3, 2] * attentions


def test_padding_may_pass_the_end_of_the_context():
    """And buckets that no prompt needs are not made."""
    ours = prefill_of("llama", buckets=(16, 40, 512), max_context=20)
    held = empty_cache("llama", positions=20)
    ours.run(tokens_of(20), 0, held)
    assert_filled(held, "llama", F32, 20)
    assert ours.memory_bytes() == prefill_of("llama", buckets=(40,), max_context=20).memory_bytes()


def test_a_later_request_writes_over_a_slot():
    ours, held = prefill_of("mistral"), empty_cache("mistral")
    ours.run(tokens_of(60, seed=1), 0, held)
    ours.run(tokens_of(40), 0, held)
    assert errors(held[..., :40, :], expected("mistral", F32, 40)).max() < TOLERANCE[F32]


def test_caches_of_any_strides_are_filled():
    ours = prefill_of("lanes of all kinds")
    order = (4, 0, 3, 1, 2, 5)  # positions outermost
    held = empty_cache("lanes of all kinds").permute(order).contiguous()
    held = held.permute([order.index(dim) for dim in range(6)])
    assert not held.is_contiguous()
    for first, end in ((0, 9), (9, 30)):
        ours.run(tokens_of(30)[first:end], first, held)
    assert_filled(held, "lanes of all kinds", F32, 30)


def test_a_mask_says_what_fused_attention_would_align_otherwise(monkeypatch):
    nvidia, capability = torch.device("cuda"), [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    assert walk.aligns_ends(nvidia, BF16, 64) and walk.aligns_ends(nvidia, BF16, 256)
    assert not walk.aligns_ends(nvidia, BF16, 12) and not walk.aligns_ends(nvidia, BF16, 264)
    assert not walk.aligns_ends(nvidia, F32, 64) and not walk.aligns_ends(CPU, BF16, 64)
    capability[0] = 7
    assert not walk.aligns_ends(nvidia, BF16, 64)
    capability[0] = 9
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not walk.aligns_ends(nvidia, BF16, 64)


class Poisoned(RandomWeights):
    """Token 7 is embedded as NaN."""

    def load(self, name):
        out = super().load(name)
        if name == "embed":
            out[7] = torch.nan
        return out


def test_padding_holds_nothing_of_another_request():
    ours = prefill_of("llama", weights=Poisoned(SPECS["llama"]), buckets=(16,))
    held = empty_cache("llama")
    ours.run([7] * 16, 0, held)
    ours.run([3, 4], 0, held)
    assert held[..., :2, :].isfinite().all()


def test_the_callers_embedding_is_used_and_left_alone():
    weights, spec = weights_of("llama", BF16), SPECS["llama"]
    wide = torch.nn.functional.pad(weights.load("embed"), (0, 8))
    before = wide.clone()
    embed = Embedding.of(wide[:, : spec.hidden_size])
    held = empty_cache("llama", BF16)
    ours = prefill_of("llama", BF16, embed=embed)
    ours.run(tokens_of(30), 0, held)
    assert_filled(held, "llama", BF16, 30)
    assert torch.equal(wide, before)


def test_memory_is_counted():
    """No matrix, embedding or table of RoPE: those are the caller's."""
    spec = SPECS["biases"]
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    biases = spec.num_layers * (qkv + 2 * spec.hidden_size + 2 * spec.intermediate_size)
    norms = 2 * spec.num_layers * spec.hidden_size
    assert prefill_of("biases", BF16).memory_bytes() == (
        2 * biases
        + 4 * norms
        + 16 * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 2  # the buckets' cache
        + 17 * 8  # token ids, and the last one's number
    )
    to_head = prefill_of("biases", BF16, to_head=True).memory_bytes()
    assert to_head == prefill_of("biases", BF16).memory_bytes() + 4 * spec.hidden_size


def test_what_does_not_fit_is_refused():
    ours, held = prefill_of("llama"), empty_cache("llama")
    with pytest.raises(RequestError, match="positions 60 to 64 do not fit a cache of 64"):
        ours.run([1] * 5, 60, held)
    with pytest.raises(RequestError, match="do not fit a cache of 64"):
        ours.run([1] * 5, -1, held)
    with pytest.raises(RequestError, match="do not fit a cache of 8"):
        ours.run([1] * 9, 0, held[..., :8, :])
    for token in (-1, 101):
        with pytest.raises(RequestError, match=f"token id {token} is outside the vocabulary"):
            ours.run([1, token], 0, held)
    for wrong in (held.half(), held[..., :8], held[:, :, :1], held[..., 0, :], held[None]):
        with pytest.raises(ModelError, match=r"library prefill wants torch.float32 \[3, 1, 2, 2"):
            ours.run([1], 0, wrong)
    ours.run([], 64, held)
    assert held.isnan().all()


def test_auto_leaves_short_prompts_to_the_kernel():
    assert choose_prefill(1) == "kernel" and choose_prefill(BUCKETS[-1]) == "library"
    for first, least in ((0, BY_TOKEN.fresh), (1, BY_TOKEN.behind), (500, BY_TOKEN.behind)):
        chosen = [choose_prefill(n, first) for n in range(1, 600)]
        assert chosen == sorted(chosen) and chosen.index("library") + 1 == least


def test_captures_take_no_streams_and_what_they_hold_is_counted(monkeypatch):
    """A GPU's allocator and graphs are fakes here. cuBLAS has a workspace a stream, which torch keeps. A prompt
    that ran before was longer than the smaller bucket."""
    reserved, told = [100 << 20], []

    class Graph:
        def pool(self):
            return "pool"

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        told.append(pool)
        reserved[0] += 7 << 20
        yield

    def stream(*arguments):
        raise AssertionError("a capture takes another stream")

    fakes = {"CUDAGraph": Graph, "graph": capture, "Stream": stream, "empty_cache": lambda: None}
    fakes["memory_reserved"] = lambda device: reserved[0]
    ours = prefill_of("llama", to_head=True)
    streams = torch.zeros(1, SPECS["llama"].hidden_size)
    ours.begin(tokens_of(13), 0, empty_cache("llama"), streams).advance(math.inf, at_once=True)
    before = ours.memory_bytes()
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = ours._graphs
    graphs._to_capture = PassGraphs(torch.device("cuda"), [Graphed(BUCKET, 16), Graphed(BUCKET, 4)])._to_capture
    more = [ours.make_ready() for _ in range(4)]
    count = len(graphs._graphs)
    assert more == [True] * (count - 1) + [False] * (5 - count)
    assert [wanted.size for wanted in graphs._graphs] == [16, 4]
    assert told == [None, *["pool"] * (count - 1)] and count > 1
    assert ours.memory_bytes() - before == count * 7 << 20
    monkeypatch.undo()
    graphs._graphs.clear()


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", SPECS)
def test_a_gpu_fills_the_same_cache_without_waiting(name, dtype):
    """Graphs, fused attention and masks; equal runs give equal bits; nothing synchronizes."""
    spec, tokens = SPECS[name], tokens_of(60)
    device = torch.device("cuda")
    kept = PlainMatrices(weights_of(name, dtype), dtype, device)
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    held_matrices = {(i, n): kept.unpack(i, n) for i in range(spec.num_layers) for n in names}
    kept.unpack = lambda layer, stage: held_matrices[layer, stage]
    ours = prefill_of(name, dtype, device, matrices=kept)
    runs = []
    for _ in range(2):
        held = empty_cache(name, dtype).to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for first, end in ((0, 3), (3, 4), (4, 60)):
                ours.run(tokens[first:end], first, held)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runs.append(held.cpu())
        assert_filled(runs[-1], name, dtype, 60)
    assert torch.equal(*(held[..., :60, :] for held in runs))


# ---- planted faults ----


def aligned_at_starts(first, end, start, window, dtype, device):
    query = torch.arange(end - first, device=device)[:, None]
    mask = torch.zeros(end - first, end - start, dtype=dtype, device=device)
    return mask.masked_fill_(torch.arange(start, end, device=device) > query, torch.finfo(dtype).min)


def shifted_band(first, end, start, window, dtype, device):
    return BAND(first, end, start, window + 1, dtype, device)


def stacked(self, layer, stage):
    """Not what stages call the dealt-out order: all gates, then all of up."""
    w = UNPACK(self, layer, stage)
    return w.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if stage == "gate_up_proj" else w


def without_bias(self, layer, stage, x, bias):
    return PRODUCT(self, layer, stage, x, None)


def early(self, x, o, how, delayed):
    """What should arrive `delay` layers late arrives one layer late."""
    if how is DELAYED:
        delayed[0] = delayed[-1]
    JOIN(self, x, o, how, delayed)


def plain_sum(self, x, o, how, delayed):
    JOIN(self, x, o, NOW if how is OWN else how, delayed)


def gate_alone(x, inplace=False):
    return torch.relu(x)


BAND, PRODUCT, JOIN = walk.band, PlainMatrices.product, walk.PrefillPass._join
UNPACK = PlainMatrices.unpack
FAULTS = {
    "windows are one key too wide": (walk, "band", shifted_band, "mistral"),
    "gate above up": (PlainMatrices, "unpack", stacked, "llama"),
    "keys are seen from the first": (walk, "band", aligned_at_starts, "llama"),
    "biases are left out": (PlainMatrices, "product", without_bias, "biases"),
    "late outputs come early": (walk.PrefillPass, "_join", early, "lanes, far apart"),
    "a lane's own output is summed": (walk.PrefillPass, "_join", plain_sum, "lanes of all kinds"),
    "another gate": (walk, "silu", gate_alone, "qwen3"),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, dtype, monkeypatch):
    place, name, wrong, model = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong)
    ours, held = prefill_of(model, dtype), empty_cache(model, dtype)
    ours.run(tokens_of(40), 0, held)
    with pytest.raises(AssertionError):
        assert_filled(held, model, dtype, 40)
