"""Prompts in chunks by the Triton kernel, in the concurrent interpreter: their keys and values are the reference's.

Each layer's are compared with those of the torch reference; seeds and memory models must agree bit for bit, and
planted faults show that these gates close.
"""

import os
from dataclasses import dataclass, replace
from functools import cache

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

import torch
import triton.language as tl

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.triton.host import launcher
from kog_triton.backends.triton.host.admission import admit
from kog_triton.backends.triton.host.backend import IN_CHUNKS
from kog_triton.backends.triton.kernel import chunk, chunk_attention, columns
from kog_triton.backends.triton.kernel.slots import HOST, YIELD
from kog_triton.errors import RunError
from kog_triton.model.spec import DType, Head, Reduce
from tests.lib.concurrent_interpreter import Deadlock, concurrent
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.planting import plant
from tests.lib.prefill_cases import STORED_TOLERANCE
from tests.lib.triton_cases import GREEDY, Case, backend_of, lanes, plain, serve

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
BF16 = DType.BF16
TOKENS = (3, 42, 12, 7, 8, 1, 9, 30, 4)
AHEAD, COLUMNS = 7, 4  # of those tokens, in chunks

CASES = {
    "llama": Case(plain(2, intermediate_size=64), 3),
    "qwen2": Case(plain(2, qkv_bias=True, tied_embeddings=True, dtype=BF16), 2),
    "qwen3": Case(plain(2, qk_norm=True, num_heads=6), 2),
    "window": Case(plain(2, windows=(3, 0)), 2),
    "biases": Case(plain(2, qkv_bias=True, o_bias=True, mlp_bias=True, hidden_size=36), 2),
    "widths": Case(  # rows in tiles of several
        plain(2, num_heads=3, num_kv_heads=3, hidden_size=288, intermediate_size=96), 2, narrow_cost=0
    ),
    "lanes at once": Case(lanes((NOW, NOW), 0)),
    "lanes, own then late": Case(
        lanes((OWN, DELAYED, DELAYED), 1, o_bias=True, mlp_bias=True), 2
    ),
    "lanes, at once then two late": Case(
        lanes((NOW, OWN, DELAYED, NOW), 2, Head.SUM_THEN_NORM), 2
    ),
    "lanes with norms of their own": Case(
        lanes((OWN, DELAYED), 1, Head.VOCAB_PARALLEL, lane_norms=True, dtype=BF16), 2
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Chunks and steps so short that a prompt of eight tokens has several."""
    for module in (chunk, launcher):
        monkeypatch.setattr(module, "CHUNKS_FROM", tl.constexpr(2))
    monkeypatch.setattr(chunk_attention, "KEYS", tl.constexpr(2))


def chunked(case: Case, columns: int = COLUMNS, **options):
    backend = backend_of(case, **options)
    backend.tiles = replace(backend.tiles, columns=columns)
    return backend


@cache
def expected(case: Case) -> torch.Tensor:
    """The reference's keys and values, float32 [layers, lanes, kv_heads, 2, AHEAD, head_dim]."""
    reference = ReferenceBackend(ArrayWeights(case.spec), BackendOptions())
    reference.forward(0, list(TOKENS[:AHEAD]), 0, last_only=True)
    homes = [home[..., :AHEAD, :].permute(1, 2, 0, 3, 4) for home in reference.kv._data[0]]
    return torch.stack(homes).float()


def run_chunks(backend, seed: int, memory: str) -> torch.Tensor:
    """Keys and values of AHEAD tokens, as `expected`: chunk after chunk, each in a launch that has to yield."""
    pointers = backend.memory.pointers
    pointers.kv.fill_(torch.nan)
    admit(pointers, backend.tiles, Request(0, TOKENS[: AHEAD + 1], GREEDY, 0, 1), 0)
    pointers.mailbox[0, HOST] = YIELD.value
    pointers.slot_order[:2] = torch.tensor([1, 0])
    while pointers.states[0, 0, 0] < AHEAD:
        before = pointers.states[:, :, 0].clone()
        with concurrent(seed, memory):
            backend._run(False, True, 1)
        assert backend.launcher._expired() is None and (pointers.states[:, :, 0] > before).all()
    held = pointers.kv[0]
    assert held[..., AHEAD:, :].isnan().all()
    return held[..., :AHEAD, :].clone()


def keys_of(case: Case, seed: int, memory: str, columns: int = COLUMNS) -> torch.Tensor:
    return run_chunks(chunked(case, columns), seed, memory)


def error_of(case: Case, keys: torch.Tensor) -> float:
    """Of the worst layer's keys or values, in units of what is allowed; NaN if one of them is."""
    want, dims = expected(case), (1, 2, 4, 5)
    assert want.std() > 0.5
    error = ((keys.float() - want).square().mean(dims) / want.square().mean(dims)).sqrt()
    return float(error.max()) / STORED_TOLERANCE[case.spec.dtype]


# ---- keys and values ----


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_in_chunks_leaves_the_references_keys(name):
    assert error_of(CASES[name], keys_of(CASES[name], 0, "stale")) < 1


@pytest.mark.parametrize("name", ["qwen3", "lanes, own then late"])
def test_equal_runs_are_equal_whoever_is_first(name):
    case = CASES[name]
    first = keys_of(case, 1, "sc")
    for seed in (2,):
        assert torch.equal(keys_of(case, seed, "stale"), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 20))
@pytest.mark.parametrize("name", CASES)
def test_many_runs(name, seed):
    case = CASES[name]
    assert error_of(case, keys_of(case, seed, ("sc", "stale")[seed % 2])) < 1


@pytest.mark.parametrize("columns, num_blocks", [(16, 4), (8, 1), (2, 5)])
def test_the_length_of_a_chunk_and_blocks_leave_the_function_alone(columns, num_blocks):
    """Also one that is longer than the prompt."""
    case = replace(CASES["qwen3"], num_blocks=num_blocks)
    assert error_of(case, keys_of(case, 0, "stale", columns)) < 1


def test_what_stood_there_before_does_not_matter():
    """NaN in the place of every token that a short chunk does not have."""
    case = CASES["llama"]
    backend = chunked(case, 16)
    backend.memory.pointers.chunk.fill_(torch.nan)
    tiles, half = backend.tiles, backend.memory.pointers.half_chunk
    for name, stage in (("x", 0), ("attention", 1), ("mlp", 3)):
        rows, wide = tiles.lanes * tiles.columns, columns.width(tiles, stage)
        at = columns.begins(tiles, name)
        half[at : at + rows * wide].view(rows, wide)[:, : tiles.stages[stage].cols] = torch.nan
    assert error_of(case, run_chunks(backend, 0, "sc")) < 1


# ---- serving ----


def watched(backend, *requests, host=lambda mailbox: None):
    """The steps of each request, and the positions that slot 0 was seen at."""
    positions = []

    def look(mailbox):
        positions.append(int(backend.memory.pointers.states[0, 0, 0]))
        host(mailbox)

    return serve(backend, *requests, host=look), sorted(set(positions))


def test_a_prompt_moves_on_by_chunks_and_its_rest_by_tokens():
    """Behind a cached prefix, and with another request beside it."""
    backend = chunked(CASES["qwen3"], num_slots=2)
    requests = Request(0, TOKENS[:8], GREEDY, 0, 2), Request(1, TOKENS[:2], GREEDY, 0, 1)
    (whole, short), positions = watched(backend, *requests)
    assert positions == [0, 4, 7, 8, 9]
    assert [len(whole), len(short)] == [2, 1]
    (again,), positions = watched(backend, Request(0, TOKENS[:8], GREEDY, 0, 1, cached=4))
    assert positions == [4, 7, 8]
    assert again[0].token == whole[0].token
    (_,), positions = watched(backend, Request(0, TOKENS[:8], GREEDY, 0, 1, cached=6))
    assert positions == [6, 7, 8]


def test_a_yield_cuts_a_prompt_between_chunks_and_changes_no_bit():
    requests = Request(0, TOKENS[:8], GREEDY, 0, 1), Request(1, TOKENS[3:9], GREEDY, 0, 1)
    whole = chunked(CASES["qwen3"], num_slots=2)
    want = serve(whole, *requests)
    backend = chunked(CASES["qwen3"], num_slots=2)
    mailbox, returns, seen = Mailbox(), 0, []
    for request in requests:
        mailbox.post(request)

    def host():
        backend.poll()
        mailbox.yield_now()

    while not returns or mailbox.resumed:
        mailbox.resume()
        with concurrent(returns, "stale", host):
            backend.generate(mailbox)
        seen.append(tuple(backend.memory.pointers.states[:, 0, 0].tolist()))
        returns += 1
        assert returns < 12
    assert seen[:3] == [(4, 0), (4, 4), (7, 4)]  # launches begin with the next slot
    got = [mailbox.read(slot, 0) for slot in range(2)]
    assert [[s.token for s in steps] for steps in got] == [[s.token for s in x] for x in want]
    kept = [b.memory.pointers.kv for b in (whole, backend)]
    assert torch.equal(*kept)


def test_a_cancel_in_a_prompt_leaves_the_others_alone():
    backend = chunked(CASES["qwen3"], num_slots=2)
    requests = Request(0, TOKENS[:8], GREEDY, 0, 1), Request(1, TOKENS[3:9], GREEDY, 0, 1)
    (first, second), positions = watched(backend, *requests, host=lambda mailbox: mailbox.cancel(0))
    assert [s.finish for s in first] == ["cancel"]
    assert positions == [0, 4]
    assert [s.finish for s in second] == ["length"]


@pytest.mark.parametrize("stalled, cancelled", [(0, False), (1, False), (1, True)])
def test_a_block_that_never_comes_is_named(stalled, cancelled):
    """Also to who has cancelled: keys and values of such a chunk are not to be used again."""
    backend = chunked(CASES["qwen3"], limit=5)
    mailbox = Mailbox()
    mailbox.post(Request(0, TOKENS[:8], GREEDY, 0, 1))

    def host():
        if cancelled:
            mailbox.cancel(0)
        backend.poll()

    with concurrent(0, "sc", host, stalled=stalled):
        backend.generate(mailbox)
    error = mailbox.read(0, 0)[0].error
    assert isinstance(error, RunError)
    assert f"stage meeting, layer 0, for word {stalled} of arrivals: seen 0x" in str(error)


def test_auto_takes_the_library_from_its_own_crossover_on():
    """Another one behind a cached prefix."""
    backend, taken = chunked(CASES["qwen3"]), []

    class Library:
        def begin(self, token_ids, first, cache):
            taken.append((len(token_ids), first))
            return "run"

    backend.library, backend.options = Library(), replace(backend.options, prefill="auto")
    for cached, least in ((0, IN_CHUNKS.fresh), (5, IN_CHUNKS.behind)):
        for count in (least - 1, least):
            request = Request(0, (3,) * (cached + count + 1), GREEDY, 0, 1, cached=cached)
            assert backend._prompt(request) == ("run" if count == least else None)
    assert taken == [(IN_CHUNKS.fresh, 0), (IN_CHUNKS.behind, 5)]


# ---- planted faults ----


@dataclass(frozen=True)
class Fault:
    """An edit of a module of the kernel that a case must notice under a memory model."""

    module: str
    before: str
    after: str
    case: str = "llama"
    memory: str = "sc"


FAULTS = {
    "a meeting releases nothing": Fault(
        "sync", 'tl.atomic_add(word, 1, sem="acq_rel"', 'tl.atomic_add(word, 1, sem="acquire"',
        memory="stale",
    ),
    "a meeting acquires nothing": Fault(
        "sync", 'tl.atomic_add(word, 1, sem="acq_rel"', 'tl.atomic_add(word, 1, sem="release"',
        memory="stale",
    ),
    "the narrow tiles of a row are read as wide ones": Fault(
        "columns", "tl.where(k < RUNS[run][1], at[i], here[i])", "at[i]", case="widths",
    ),
    "nobody waits": Fault(
        "chunk", "(i < S.num_blocks)[:, None]", "(i < 0)[:, None]",
    ),
    "one buffer of arrivals": Fault(
        "chunk", "(number & 1) * S.num_blocks\n    phase = ((number >> 1) + 1) & 1",
        "0\n    phase = (number + 1) & 1",
    ),
    "a query sees the next key": Fault(
        "chunk_attention", "tl.trans(n) <= token", "tl.trans(n) <= token + 1",
    ),
    "the window is one position long": Fault(
        "chunk_attention", "pos + token - window, -1)", "pos + token - window - 1, -1)", "window",
    ),
    "keys are appended unrotated": Fault(
        "chunk_attention", "lower, upper = rotated(lower, upper, gains + D", "_ = rotated(lower, upper, gains + D",
        "qwen3",
    ),
    "the cache is not looked at": Fault(
        "chunk_attention", "tl.range(start, pos, KEYS", "tl.range(pos, pos, KEYS",
    ),
    "one part of K is lost": Fault(
        "columns", "(part + 1) * STEPS // PARTS", "(part + 0) * STEPS // PARTS",
    ),
    "late outputs of the layer before": Fault(
        "chunk", "layer - S.delay, layer)", "layer - 1, layer)", "lanes, at once then two late",
    ),
    "own outputs not scaled": Fault(
        "chunk", "y * tl.sqrt(S.lanes * 1.0)", "y * 1.0", "lanes, own then late",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name, monkeypatch, tmp_path):
    fault = FAULTS[name]
    plant(monkeypatch, tmp_path, fault.module, fault.before, fault.after)
    assert is_red(CASES[fault.case], fault.memory)


def is_red(case: Case, memory: str) -> bool:
    """Whether any of a few seeds gives other logits, or hangs."""
    for seed in range(4):
        try:
            keys = keys_of(case, seed, memory)
        except Exception as error:  # Triton wraps what a program raises
            assert Deadlock.__name__ in repr(error)
            return True
        if not error_of(case, keys) < 1:
            return True
    return False
