"""Prompts in chunks: several positions of one request in a step of the CUDA kernel, its own C++ on a CPU
(cuda_walk.py).

Whatever a prompt's length, and wherever it is taken up, it leaves the keys, values and tokens of the same prompt
on the kernel of one token, bit for bit.
"""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import chunks
from kog_triton.backends.cuda.layout import columns as layout_columns
from kog_triton.backends.cuda.layout.attention import attention_bytes
from kog_triton.backends.cuda.layout.columns import lay_out_columns
from kog_triton.backends.prefill.library import BY_TOKEN, Crossover, choose_prefill
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError, ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.cuda import WINDOW_BYTES
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.column_cases import ALLOWED, EXTRAS, MIXED, ODD
from tests.lib.conformance_requests import at_look
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import (
    GREEDY,
    alone,
    assert_expired,
    error_of,
    idle,
    join,
    make,
    prompt_of,
    request,
    run,
    serve,
    timeless,
    without_a_block,
)
from tests.lib.cuda_walk import BothBackend, ChunkBackend, FiberBackend, compile_walk, header, lower
from tests.lib.ring_walker import f16_spec, spec_of
from tests.lib.slow import some_always

TOLD = SamplingParams(temperature=1.0, logprobs=2, seed=3)


def layout_of(spec, positions=8, num_blocks=0):
    return lay_out_columns(lower(build(spec), GPUS["h200"], num_blocks), 1024, positions, chunk=True)


def launched(backend):
    """Launches of the kernel of chunks and of that of one token."""
    return backend.chunks.kernel.kernel.launches, backend.kernel.launches


# ---- layout ----


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "qwen3-8b", "laneformer-2b"])
def test_a_chunk_is_a_step_of_as_many_columns_with_room_for_its_keys(name):
    spec = named_shape(name)
    chunk = layout_of(spec)
    columns = lay_out_columns(chunk.lowering, 1024, 8)
    assert chunk.regions == columns.regions
    assert chunk.shared_bytes <= GPUS["h200"].shared_bytes
    assert chunk.ring_slots >= chunk.lowering.slots_in_flight(WINDOW_BYTES)
    keys = attention_bytes(spec, chunk.splits, 8) - attention_bytes(spec, chunk.splits)
    assert keys == 7 * 2 * 2 * spec.head_dim  # and values, 16 bits each
    assert "bool kChunk = true" in header.render(chunk)
    assert "bool kChunk = false" in header.render(columns)


# ---- equal to a token at a time ----

# spec, positions of a chunk, blocks; what changes where splits of the context begin and end
SHAPES = {
    "bf16, biases, norms, tied": (spec_of(**EXTRAS, tied_embeddings=True), 4, 2, {}),
    "sizes that divide by nothing": (ODD, 2, 4, {}),
    "windows, splits": (f16_spec(num_layers=2, windows=(5, 0)), 8, 3, {"split_least": lambda spec: 2}),
    "joins of many splits": (
        f16_spec(num_layers=2, num_heads=9, num_kv_heads=1),
        4,
        4,
        {"split_least": lambda spec: 3, "MERGED_LENGTH": 12},
    ),
}
MORE = {
    "fp16, biases, norms, tied, all blocks": (f16_spec(**EXTRAS, tied_embeddings=True), 8, 0, {}),
    "windows within a chunk, joins": (
        f16_spec(hidden_size=88, num_heads=6, num_kv_heads=1, windows=(3, 0, 11)),
        8,
        9,
        {"split_least": lambda spec: 1, "MERGED_LENGTH": 9},
    ),
    "a long K": (spec_of(hidden_size=64, num_layers=1, intermediate_size=4608), 8, 3, {}),
}


@pytest.mark.parametrize(("name", "shape"), some_always((SHAPES | MORE).items(), *SHAPES))
def test_chunks_leave_what_a_token_at_a_time_leaves(monkeypatch, name, shape):
    """Prompts that end within a chunk, with it, and with its first position; tokens behind them."""
    spec, positions, blocks, constants = shape
    for constant, value in constants.items():
        monkeypatch.setattr(header, constant, value)
    lengths = (positions + 1, 2 * positions, 3 * positions + 3)
    requests = [request(i, prompt_of(n, i), 2, TOLD if i % 2 else GREEDY) for i, n in enumerate(lengths)]
    steps, cache = alone(spec, requests, blocks)
    backend = make(ChunkBackend, spec, len(lengths), blocks, -7, positions=positions)
    assert run(backend, *requests) == steps
    # All of it: columns behind a prompt's end have written nothing.
    assert torch.equal(backend.memory.cache, cache)
    assert launched(backend)[0] == len(lengths)


@pytest.fixture(scope="module")
def spec():
    return f16_spec(num_layers=2)


def test_a_prompt_is_taken_up_wherever_it_stands(spec, monkeypatch):
    """Behind a cached prefix that ends anywhere, in launches of two chunks."""
    monkeypatch.setattr("kog_triton.backends.cuda.launcher.MOST_CHUNKS", 2)
    whole = prompt_of(37)
    steps, cache = alone(spec, [request(0, whole, 3)])
    backend = make(ChunkBackend, spec, 1, seed=2)
    for cached in (0, 1, 9, 33):
        backend.memory.cache.zero_()
        if cached:
            run(backend, request(0, whole[:cached], 1))
        before = launched(backend)
        assert run(backend, request(0, whole, 3, cached=cached)) == steps
        assert torch.equal(backend.memory.cache, cache)
        needed = -(-(37 - cached) // 8)
        assert launched(backend)[0] - before[0] == -(-needed // 2)
        assert launched(backend)[1] - before[1] == 1


def test_the_first_token_is_chosen_in_every_way(spec):
    requests = [
        request(i, prompt_of(6 + i, i), 3, params, mask=(lambda out: ALLOWED) if n == "masked" else None)
        for i, (n, params) in enumerate(MIXED.items())
    ]
    steps, cache = alone(spec, requests)
    backend = make(ChunkBackend, spec, len(MIXED), seed=-3)
    assert run(backend, *requests) == steps
    assert torch.equal(backend.memory.cache, cache)


@pytest.mark.parametrize(
    "region", some_always(["", "qkv", "attention", "splits", "attention_out", "mlp", "mlp_out"], "")
)
def test_stores_that_land_late_change_nothing(spec, monkeypatch, region):
    """A word's writers change from layer to layer: only what they have read of it orders their stores."""
    monkeypatch.setattr(header, "split_least", lambda spec: 3)
    monkeypatch.setattr(header, "MERGED_LENGTH", 12)
    r = request(0, prompt_of(27), 2)
    steps, cache = alone(spec, [r], 5)
    backend = make(ChunkBackend, spec, 1, 5, seed=1)
    step = backend.chunks.kernel
    regions = step.layout.regions
    places = [regions[region]] if region else [regions["qkv"], regions["mlp_flags"]]
    first, count = places[0].offset, places[-1].end - places[0].offset
    at = ctypes.c_void_p(step.words[0].data_ptr() + 4 * first)
    step.kernel.library.kog_store_late(at, ctypes.c_long(count), ctypes.c_long(100))
    assert run(backend, r) == steps
    assert torch.equal(backend.memory.cache, cache)


# ---- life ----


@pytest.fixture
def backend(spec):
    return make(ChunkBackend, spec, 3)


def test_a_short_prompt_is_one_launch_of_the_kernel_of_one_token(backend):
    run(backend, request(0, prompt_of(chunks.CHUNKS_FROM - 1)))
    assert launched(backend) == (0, 1)
    run(backend, request(1, prompt_of(chunks.CHUNKS_FROM)))
    assert launched(backend) == (1, 2)


def test_a_request_that_is_to_be_one_kernel_is_one_launch(spec, monkeypatch):
    """However long its prompt: no chunks, and no end to hear a cancel (`kog bench --no-kernel-switches`)."""
    monkeypatch.setattr("kog_triton.backends.cuda.launcher.MOST_SILENT", 4)
    asked = request(0, prompt_of(30), 3)
    steps, cache = alone(spec, [asked])
    backend = ChunkBackend(RandomWeights(spec), BackendOptions(prefill="decode"))
    assert run(backend, asked) == steps and torch.equal(backend.memory.cache, cache)
    assert backend.chunks.kernel is None and backend.kernel.launches == 1


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_request_may_end_with_its_first_token(backend, spec, finish):
    whole = request(0, prompt_of(13), 4)
    steps, _ = alone(spec, [whole])
    first = steps[0][0].token
    options = {"stop_token_ids": frozenset({first})} if finish == "stop" else {}
    got = run(backend, request(0, whole.prompt, 4 if finish == "stop" else 1, **options))
    assert [(step.token, step.finish) for step in got[0]] == [(first, finish)]
    assert launched(backend) == (1, 0)


@pytest.mark.parametrize("crossover", [chunks.CHUNKED, chunks.CHUNKED_LANES, chunks.CHUNKED_NARROW, Crossover(60, 279)])
def test_auto_gives_the_library_longer_prompts_than_without_chunks(crossover):
    tokens = range(1, 300)
    for first in (0, 200):
        chosen = [choose_prefill(n, first, crossover) for n in tokens]
        assert chosen == sorted(chosen) and set(chosen) == {"kernel", "library"}
        assert chosen.count("kernel") > [choose_prefill(n, first) for n in tokens].count("kernel")


@pytest.mark.parametrize(("name", "gpus"), [("llama-3.2-1b", 1), ("laneformer-2b", 1), ("llama-3.2-1b", 2)])
@pytest.mark.parametrize("positions", [2, 4, 8])
def test_chunks_of_fewer_positions_leave_the_library_shorter_prompts(name, gpus, positions):
    """As many chunks' worth of tokens as of eight positions, and never less than a token at a time gets."""
    expected = {
        ("llama-3.2-1b", 1): {2: (3, 12), 4: (4, 24), 8: (8, 48)},
        ("laneformer-2b", 1): {2: (3, 8), 4: (4, 12), 8: (8, 24)},
        ("llama-3.2-1b", 2): {2: (15, 69), 4: (30, 139), 8: (60, 279)},
    }[name, gpus][positions]
    lowering = lower(build(named_shape(name), gpus), GPUS["h200"])
    with ThreadPoolExecutor(1) as compiler:
        ready = chunks.Chunks(lowering, 64, positions, compiler, lambda _: None, lambda _: None, graphs=True)
    assert ready.crossover == Crossover(*expected)


def test_prompts_that_arrive_go_first_and_join_in_columns(spec):
    requests = [request(0, prompt_of(5), 30), request(1, prompt_of(20, 5), 4)]
    steps, cache = alone(spec, requests)
    backend = make(BothBackend, spec, 2, counts=(2,))
    said = join(backend, *requests)
    assert {slot: timeless(said[slot]) for slot in said} == steps
    assert torch.equal(backend.memory.cache, cache)
    assert launched(backend)[0] == 2
    assert sum(k.kernel.launches for k in backend.columns.kernels) == 1


@pytest.mark.parametrize("word", ["cancel", "yield"])
def test_a_word_of_the_host_is_heard_in_a_prompt(backend, spec, monkeypatch, word):
    monkeypatch.setattr("kog_triton.backends.cuda.launcher.MOST_CHUNKS", 1)
    prompt = prompt_of(45)
    steps, cache = alone(spec, [request(0, prompt, 3)])
    server = idle(backend)
    say = server.mailbox.yield_now if word == "yield" else partial(server.mailbox.cancel, 0)
    at_look(server.mailbox, 3, say)  # the second and third come while chunks run, or between them
    server.post(request(0, prompt, 3))
    server.start()
    said = server.finish()[0]
    going_on = server.mailbox.resumed
    cached = said[-1].held if word == "cancel" else going_on[0].position
    assert 8 <= cached < len(prompt) and cached % 8 == 0
    if word == "cancel":
        assert [step.finish for step in said] == ["cancel"]
        assert run(backend, request(0, prompt, 3, cached=cached))[0] == steps[0]
    else:
        assert said == []
        backend.forward_logits([1, 2, 3])  # leaves all slots alone
        server.mailbox.resume()
        server.start()
        assert timeless(server.finish()[0]) == steps[0]
    assert torch.equal(backend.memory.cache[0], cache[0])


def test_a_nan_in_a_prompt_is_an_error_of_its_request_alone(backend, spec):
    steps, _ = alone(spec, [request(0, prompt_of(12), 3)])
    backend.memory.embed[99, 3] = torch.nan
    prompts = prompt_of(12), [*prompt_of(9), 99, 5]
    said = serve(backend, *(request(slot, prompt, 3) for slot, prompt in enumerate(prompts)))
    assert timeless(said[0]) == steps[0]
    assert "hold NaN or +inf: the run is void" in str(error_of(said[1]))


def test_an_expired_wait_names_its_place_and_the_next_prompt_runs(backend):
    prompt = request(0, prompt_of(20), 3)
    expected = run(backend, prompt)
    places = r"attention_qkv, word \d+ of qkv", r"o_proj_input, word \d+ of attention_flags"
    with without_a_block(backend, backend.chunks.kernel.kernel):
        assert_expired(error_of(serve(backend, prompt)[0]), *places)
    assert run(backend, prompt) == expected


class FailingBackend(ChunkBackend):
    """A backend whose compiler refuses the kernel of chunks."""

    def _compile(self, source, layout):
        if layout.chunk:
            raise DeviceError("the compiler is out of room")
        super()._compile(source, layout)


class LateBackend(FiberBackend):
    """A backend whose compiler takes until `done` over the kernel of chunks."""

    chunk_positions = 8

    def __init__(self, *arguments):
        self.done = threading.Event()
        super().__init__(*arguments)

    def _compile(self, source, layout):
        if layout.chunk:
            assert self.done.wait(60)
        super()._compile(source, layout)


def test_prompts_that_come_before_the_kernel_go_a_token_at_a_time(spec):
    r = request(0, prompt_of(11), 3)
    steps, _ = alone(spec, [r])
    backend = make(LateBackend, spec, 1)
    early = backend.chunks.crossover
    assert run(backend, r) == steps and backend.chunks.kernel is None
    backend.done.set()
    backend.settle()
    assert run(backend, r) == steps and launched(backend) == (1, 2)
    assert backend.chunks.crossover == early != BY_TOKEN


class OrderBackend(ChunkBackend):
    """A backend that notes what its compiler begins and ends."""

    def __init__(self, *arguments):
        self.order = []
        super().__init__(*arguments)

    def _compile(self, source, layout):
        what = "chunks" if layout.chunk else "decode"
        self.order.append(what)
        time.sleep(0.2)  # in which the other begins
        super()._compile(source, layout)
        self.order.append(what)


def test_the_kernel_of_prompts_is_compiled_beside_the_one_that_a_start_waits_for(spec):
    backend = make(OrderBackend, spec, 1)
    backend.settle()
    assert backend.order[:2] == ["decode", "chunks"] and len(backend.order) == 4


class FullBackend(ChunkBackend):
    """A backend on a GPU that has no room for the kernel of chunks."""

    def _load(self, source, entry, layout):
        if layout.chunk:
            raise torch.OutOfMemoryError("the GPU is out of room")
        return super()._load(source, entry, layout)


@pytest.mark.parametrize("kind", [FailingBackend, FullBackend])
def test_without_the_kernel_prompts_go_a_token_at_a_time_and_the_log_says_so(spec, caplog, kind):
    caplog.set_level("INFO")
    r = request(0, prompt_of(11), 3)
    steps, _ = alone(spec, [r])
    backend = make(kind, spec, 1)
    assert backend.chunks.kernel is None and run(backend, r) == steps
    assert backend.chunks.crossover == BY_TOKEN
    who = "compiler" if kind is FailingBackend else "GPU"
    assert f"prompts run a token at a time: the {who} is out of room" in caplog.text


def test_prompts_run_as_many_positions_at_a_time_as_fit_and_the_log_says_so(spec, monkeypatch, caplog):
    caplog.set_level("INFO")
    r = request(0, prompt_of(11), 3)
    steps, _ = alone(spec, [r])

    def lay_out(lowering, max_context, columns, chunk):
        if columns > most:
            raise ModelError("no room")
        return lay_out_columns(lowering, max_context, columns, chunk)

    monkeypatch.setattr(layout_columns, "lay_out_columns", lay_out)
    most = 4
    backend = make(ChunkBackend, spec, 1)
    assert backend.chunks.kernel.layout.columns == 4 and run(backend, r) == steps
    assert caplog.text.count("prompts run 4 positions at a time: no room") == 1
    most = 1
    backend = make(ChunkBackend, spec, 1)
    assert backend.chunks.kernel is None and run(backend, r) == steps
    assert "prompts run a token at a time: no room" in caplog.text


# ---- planted faults ----


FAULTS = {
    "a column that misses its own key": ("heads.h", "? span.end - start : 0", "? span.end - start - 1 : 0"),
    "another column's key": ("heads.h", "is_query || !kChunk ? b.column : at - first", "b.column"),
    "a key turned to another's position": ("heads.h", "item < queries || row > position", "true"),
    "another head's value": (
        "heads.h",
        "words + n / kOne * kKvHeads * (kHeadDim / 2)",
        "words + n / kOne * (kHeadDim / 2)",
    ),
    "a row that is not kept": ("heads.h", "at == position && at - first == b.column", "false"),
    "every column with the first one's token": (
        "columns/chunk.h",
        "position_of(b, b.thread, 0)",
        "position_of(b, 0, 0)",
    ),
    "a state behind the prompt's end": ("columns/chunk.h", "next > last ? last + 1 : next;", "next;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(spec, monkeypatch, tmp_path, name):
    include = plant(tmp_path, FAULTS[name])
    monkeypatch.setattr(header, "split_least", lambda spec: 2)
    requests = [request(0, prompt_of(21), 3), request(1, prompt_of(13, 9), 3)]
    steps, cache = alone(spec, requests)
    backend = make(ChunkBackend, spec, 2, seed=-1)
    kernel = backend.chunks.kernel.kernel
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=include)
    backend.wait_ns = 5000
    with pytest.raises(AssertionError):
        assert run(backend, *requests) == steps
        assert torch.equal(backend.memory.cache, cache)
