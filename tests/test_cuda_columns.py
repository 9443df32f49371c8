"""Token columns: several requests in one step of the CUDA kernel, its own C++ on a CPU (cuda_walk.py).

Whoever shares a step, a request's tokens, log-probabilities, keys and values are those of the same request
alone on the kernel of one token, bit for bit, and it may go from one kernel to the other.
"""

import re
import shutil
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from cuda_walk import INCLUDE, ColumnBackend, FiberBackend, compile_walk, header, lower
from kog_triton.backends.cuda import serving
from kog_triton.backends.cuda.columns import COUNTS, lay_out_columns
from kog_triton.backends.cuda.layout import lay_out
from ring_walker import spec_of
from test_cuda import assert_weight_loops_hardly_spill, f16_spec, is_local, machine_code
from test_cuda_life import Server, ended, held, tokens_of

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure, Request
from kog_triton.errors import DeviceError, ModelError, RunError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType, Head
from kog_triton.random_weights import RandomWeights
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS

GREEDY = SamplingParams(temperature=0)
PROMPTS = (
    (5, 17, 60),
    (5, 90),
    (31, 2, 8, 77),
    (9, 9, 9),
    (4, 77, 4, 1, 3),
    (8, 1),
    (3, 3, 60),
    (1,),
)
COUNT = 5


def layout_of(spec, columns, num_blocks=0, max_context=1024):
    return lay_out_columns(lower(build(spec), GPUS["h200"], num_blocks), max_context, columns)


def make(kind, spec=None, num_slots=3, num_blocks=2, seed=0, **options):
    spec = spec or spec_of(dtype=DType.F16)
    weights, slots = RandomWeights(spec), BackendOptions(num_slots=num_slots)
    return kind(weights, slots, num_blocks, seed, **options)


def request(slot, prompt, count=COUNT, params=GREEDY, **options):
    return Request(slot, tuple(prompt), params, params.seed or 0, count, **options)


def run(backend, *requests):
    """All steps of requests that were posted at once, slot by slot, without their times."""
    mailbox = backend.new_mailbox()
    for r in requests:
        mailbox.post(r)
    backend.generate(mailbox)
    return {r.slot: [said(step) for step in mailbox.read(r.slot)] for r in requests}


def said(step):
    assert not isinstance(step, Failure), step.error
    return step.token, step.finish, step.logprob, step.top


def alone(spec, requests, num_blocks=2):
    """What each request says alone in a slot of its own, and what it leaves there."""
    backend = make(FiberBackend, spec, len(requests), num_blocks)
    steps = {r.slot: run(backend, r)[r.slot] for r in requests}
    return steps, backend.memory.cache.clone()


def staggered(backend, requests):
    """The same steps from different positions on: what every other slot begins with is there already."""
    out = []
    for r in requests:
        held = len(r.prompt) - 1 if r.slot % 2 else 0
        if held:
            run(backend, request(r.slot, r.prompt[:held], 1))
        out.append(replace(r, cached=held))
    return out


# ---- layout ----


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "qwen3-0.6b", "qwen2.5-coder-1.5b", "qwen3-8b", "laneformer-2b"]
)
@pytest.mark.parametrize("columns", COUNTS)
def test_regions_do_not_overlap_and_shared_memory_fits(name, columns):
    layout = layout_of(named_shape(name), columns)
    regions = sorted(layout.regions.values(), key=lambda r: r.offset)
    for left, right in pairwise(regions):
        assert left.end <= right.offset
    assert all(r.offset % 32 == 0 and r.stride % 4 == 0 for r in regions)
    assert layout.shared_bytes <= GPUS["h200"].shared_bytes
    assert layout.ring_chunks > layout.lowering.window_chunks
    # The weights are packed once: both kernels read the same stream.
    one = lay_out(layout.lowering, 1024)
    numbers = [dict(re.findall(r"int (k\w+) = (\d+);", header.render(x))) for x in (one, layout)]
    for key in ("kFragK", "kFragments", "kChunkBytes", "kBlocks"):
        assert numbers[0][key] == numbers[1][key]
    # What columns were measured with.
    assert [numbers[1][k] for k in ("kWindowChunks", "kCalmChunks", "kAheadTicks")] == [
        "3",
        "2",
        "1600",
    ]


def test_lanes_side_by_side_and_too_much_at_once_are_refused():
    with pytest.raises(ModelError, match="lanes are scored side by side share the cuda kernel"):
        layout_of(spec_of(num_lanes=2, head=Head.CONCAT), 2)
    lowering = lower(build(spec_of(dtype=DType.F16)), GPUS["h200"], 2)
    narrow = replace(lowering.tilings["qkv_proj"], unit_rows=4, fragment_rows=4)
    lowering = replace(lowering, tilings=lowering.tilings | {"qkv_proj": narrow})
    with pytest.raises(ModelError, match="qkv_proj: columns take norms in fragments of 8 rows"):
        lay_out_columns(lowering, 64, 2)
    wide = spec_of(hidden_size=64, intermediate_size=40_000)
    with pytest.raises(ModelError, match="activations of 8 requests leave"):
        layout_of(wide, 8)


def test_a_model_without_columns_takes_turns():
    backend = make(ColumnBackend, spec_of(num_lanes=2, head=Head.CONCAT), num_blocks=4)
    assert backend.columns.counts == () and not backend.columns.ready(2)
    got = run(backend, request(0, PROMPTS[0], 2), request(1, PROMPTS[1], 2))
    assert [len(steps) for steps in got.values()] == [2, 2]


# ---- equal to alone ----

ODD = f16_spec(hidden_size=54, intermediate_size=90, num_heads=4, head_dim=8, qkv_bias=True)
EXTRAS = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True}
# spec, columns, blocks; what changes where splits of the context begin and end
SHAPES = {
    "bf16, biases, norms, tied": (spec_of(**EXTRAS, tied_embeddings=True), 4, 2, {}),
    "sizes that divide by nothing": (ODD, 2, 4, {}),
    "windows, splits": (f16_spec(windows=(5, 0, 3)), 8, 3, {"split_least": lambda spec: 2}),
    "joins of many splits": (
        f16_spec(num_layers=2, num_heads=6, num_kv_heads=1, head_dim=24),
        2,
        6,
        {"split_least": lambda spec: 1, "MERGED_LENGTH": 6},
    ),
    # Operands of down_proj in registers and in shared memory; chunks of two fragments of 32 values.
    "a long K": (spec_of(hidden_size=64, num_layers=1, intermediate_size=4608), 8, 3, {}),
    # The first unit of the stages that multiply x: its weights wait in registers.
    "weights taken ahead": (
        f16_spec(hidden_size=96, num_layers=2, intermediate_size=100),
        8,
        2,
        {},
    ),
    "four rows a fragment": (
        f16_spec(hidden_size=36, num_layers=2, intermediate_size=2048),
        8,
        2,
        {},
    ),
}
MORE = {
    "fp16, biases, norms, tied": (f16_spec(**EXTRAS, tied_embeddings=True), 8, 3, {}),
    "sizes that divide by nothing": (ODD, 8, 3, {}),
    "windows, joins of many splits by several warps": (
        f16_spec(hidden_size=88, num_heads=6, num_kv_heads=1, windows=(3, 0, 11)),
        4,
        9,
        {"split_least": lambda spec: 1, "MERGED_LENGTH": 9},
    ),
    "bf16, all blocks": (spec_of(), 8, 0, {}),
    "four rows a fragment": (f16_spec(hidden_size=36, intermediate_size=1536), 2, 2, {}),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *SHAPES.items(),
        *(pytest.param(*item, marks=pytest.mark.slow) for item in MORE.items()),
    ],
)
def test_columns_compute_what_a_kernel_of_one_token_does(monkeypatch, name, shape):
    spec, columns, blocks, constants = shape
    for name, value in constants.items():
        monkeypatch.setattr(header, name, value)
    told = SamplingParams(temperature=1.0, logprobs=2, seed=3)
    requests = [
        request(i, PROMPTS[i] * 2, 6 if constants else 2, told if i == 1 else GREEDY)
        for i in range(columns)
    ]
    steps, cache = alone(spec, requests, blocks)
    backend = make(ColumnBackend, spec, columns, blocks, -7, counts=(columns,))
    assert run(backend, *staggered(backend, requests)) == steps
    assert torch.equal(backend.memory.cache, cache)
    assert sum(k.kernel.launches for k in backend.columns.kernels) > 0


@pytest.fixture(scope="module")
def spec():
    return spec_of(dtype=DType.F16)


ALLOWED = np.array([0x0F0F0F0F] * 4, np.uint32)
MIXED = {  # of each column
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=2.0, seed=7),
    "cut": SamplingParams(temperature=3.0, seed=8, top_k=9, top_p=0.8, logprobs=3),
    "penalized": SamplingParams(
        temperature=1.5, seed=9, repetition_penalty=1.7, logit_bias={3: 2.0, 60: -4.0}
    ),
    "masked": SamplingParams(temperature=1.0, seed=10, min_p=0.01),
    "banned": SamplingParams(
        temperature=0, min_tokens=2, end_token_ids=(5, 60), bad_words_token_ids=((9, 8), (7,))
    ),
    "told": SamplingParams(temperature=0, logprobs=5),
}


def test_every_way_to_choose_works_beside_every_other(spec):
    """Plain columns, whose winners one block picks, beside those that all blocks choose one by one."""
    requests = [
        request(i, PROMPTS[i], 4, params, mask=(lambda out: ALLOWED) if name == "masked" else None)
        for i, (name, params) in enumerate(MIXED.items())
    ]
    steps, cache = alone(spec, requests)
    for seed in (0, -3):
        backend = make(ColumnBackend, spec, 7, seed=seed, counts=(8,))
        assert run(backend, *requests) == steps
        assert torch.equal(backend.memory.cache, cache)


# ---- life ----


@pytest.fixture
def backend(spec):
    return make(ColumnBackend, spec, 3, counts=(2, 4))


@pytest.fixture(scope="module")
def apart(spec):
    """What each prompt gives alone: steps, and keys and values."""
    requests = [request(i, prompt, 8) for i, prompt in enumerate(PROMPTS)]
    steps, cache = alone(spec, requests)
    return {p: ([s[0] for s in steps[i]], cache[i]) for i, p in enumerate(PROMPTS)}


def launches(backend):
    """Of the kernel of one token and of those of columns."""
    return backend.kernel.launches, {
        k.layout.columns: k.kernel.launches for k in backend.columns.kernels
    }


def assert_alone(backend, steps, slot, prompt, apart, count=COUNT):
    tokens, cache = apart[prompt]
    assert tokens_of(steps)[:count] == tokens[:count]
    positions = len(prompt) + min(len(steps), 8) - 1
    assert torch.equal(held(backend, slot, positions), cache[..., :positions, :])


def test_requests_run_together_until_one_is_left(backend, apart):
    """Three, then two, then one: every launch has a kernel that fits, and all make a token a step."""
    mailbox = backend.new_mailbox()
    for slot, count in enumerate((3, 5, 8)):
        mailbox.post(request(slot, PROMPTS[slot], count))
    backend.generate(mailbox)
    steps = [mailbox.read(slot) for slot in range(3)]
    for slot, count in enumerate((3, 5, 8)):
        assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, count)
        assert steps[slot][-1].finish == "length" and len(steps[slot]) == count
    assert launches(backend) == (1, {4: 1, 2: 1})
    assert mailbox.prefilled == {
        slot: len(PROMPTS[slot]) + c - 1 for slot, c in enumerate((3, 5, 8))
    }


def test_a_request_joins_one_that_runs(backend, apart):
    server = Server(backend, request(1, PROMPTS[0], 40))
    server.read(1, 3)
    server.post(request(0, PROMPTS[1]))
    steps = server.finish()
    assert_alone(backend, steps[0], 0, PROMPTS[1], apart)
    assert_alone(backend, steps[1], 1, PROMPTS[0], apart, 8)
    assert len(steps[1]) == 40 and launches(backend) == (2, {2: 1})


class LateBackend(FiberBackend):
    """A backend whose compiler waits for a word."""

    column_counts = (4,)

    def __init__(self, *arguments, compiled):
        self._compiled = compiled
        super().__init__(*arguments)

    def _compile(self, source, layout):
        assert source == "decode.cu" or self._compiled.wait(60)
        super()._compile(source, layout)


def test_requests_take_turns_while_their_kernel_is_compiled(spec, apart):
    compiled = threading.Event()
    backend = make(LateBackend, spec, compiled=compiled)
    server = Server(backend, *(request(slot, PROMPTS[slot], 40) for slot in range(3)))
    server.read(0, 3)
    assert not backend.columns.kernels  # three tokens came in turn
    compiled.set()
    steps = server.finish()
    for slot in range(3):
        assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, 8)
    assert backend.kernel.launches >= 1 and launches(backend)[1][4] >= 1


class FailingBackend(FiberBackend):
    """A backend whose compiler refuses kernels of columns."""

    column_counts = (4,)

    def _compile(self, source, layout):
        if source != "decode.cu":
            raise DeviceError("the compiler is out of room")
        super()._compile(source, layout)


def test_requests_take_turns_where_the_compiler_fails(spec, apart, caplog):
    backend = make(FailingBackend, spec)
    for _ in range(2):  # the second time it has failed before
        server = Server(backend, *(request(slot, PROMPTS[slot], 12) for slot in range(3)))
        steps = server.finish()
        for slot in range(3):
            assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, 8)
    assert not backend.columns.kernels
    assert "no kernel of 4 columns, requests take turns: the compiler is out" in caplog.text


def interrupt(backend, monkeypatch, word, *requests):
    """Steps of requests, of which the third token of slot 0 says a word to the mailbox; launches of 4 steps."""
    monkeypatch.setattr(serving, "_most_steps", lambda live, slots: 4)
    server = Server(backend)
    server.thread.join()
    push, mailbox, pushed = server.mailbox.push, server.mailbox, []

    def say(slot, step):
        push(slot, step)
        pushed.append(slot)
        if slot == 0 and pushed.count(0) == 3:
            word(mailbox)

    monkeypatch.setattr(mailbox, "push", say)
    server.post(*requests)
    server.start()
    return server


def test_a_cancel_ends_one_of_them(backend, apart, monkeypatch):
    requests = [request(slot, PROMPTS[slot], 12) for slot in range(3)]
    server = interrupt(backend, monkeypatch, lambda mailbox: mailbox.cancel(0), *requests)
    steps = server.finish()
    assert steps[0][-1].finish == "cancel" and len(steps[0]) < 12
    for slot in (1, 2):
        assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, 8)
        assert len(steps[slot]) == 12


def test_a_yield_returns_at_a_step_and_all_resume(backend, apart, monkeypatch):
    requests = [request(slot, PROMPTS[slot], 12) for slot in range(3)]
    server = interrupt(backend, monkeypatch, lambda mailbox: mailbox.yield_now(), *requests)
    assert not any(ended(steps) for steps in server.finish().values())
    backend.forward_logits([1, 2, 3])  # leaves all slots alone
    server.mailbox.resume()
    server.start()
    steps = server.finish()
    for slot in range(3):
        assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, 8)
        assert len(steps[slot]) == 12


def test_requests_that_end_in_the_same_step_all_end(backend, apart):
    stop = apart[PROMPTS[0]][0][4]
    got = run(
        backend,
        request(0, PROMPTS[0], 8, stop_token_ids=frozenset({stop})),
        request(1, PROMPTS[3], 5),
    )
    assert [got[0][-1][1], got[1][-1][1]] == ["stop", "length"]
    assert launches(backend) == (0, {2: 1})


def test_a_nan_is_an_error_of_its_request_alone(backend, apart):
    backend.memory.embed[99, 3] = torch.nan
    mailbox = backend.new_mailbox()
    for slot, prompt in enumerate([PROMPTS[0], (7, 99), PROMPTS[1]]):
        mailbox.post(request(slot, prompt))
    backend.generate(mailbox)
    for slot, prompt in ((0, PROMPTS[0]), (2, PROMPTS[1])):
        assert tokens_of(mailbox.read(slot)) == apart[prompt][0][:COUNT]
    (failure,) = mailbox.read(1)
    assert "NaN or +inf after 0 tokens" in str(failure.error)


def test_more_requests_than_columns_all_progress(spec, apart, monkeypatch):
    monkeypatch.setattr(serving, "MOST_SILENT", 4)
    backend = make(ColumnBackend, spec, 5, counts=(2,))
    got = run(backend, *(request(i, PROMPTS[i], 8) for i in range(5)))
    for i in range(5):
        assert [s[0] for s in got[i]] == apart[PROMPTS[i]][0]
    assert set(launches(backend)[1]) == {2}


def test_a_long_prompt_beside_an_answer(spec):
    """A column without logits beside one that has them, and steps in which none has."""
    requests = [request(0, range(3, 43), 3), request(1, range(9, 21), 30)]
    steps, cache = alone(spec, requests)
    backend = make(ColumnBackend, spec, 2, counts=(2,), seed=5)
    assert run(backend, *requests) == steps
    assert torch.equal(backend.memory.cache, cache)


def test_an_expired_wait_names_its_place_and_the_next_requests_run(backend, apart):
    requests = [request(slot, PROMPTS[slot]) for slot in range(2)]
    run(backend, *requests)  # loads the kernel
    (kernel,) = (k.kernel for k in backend.columns.kernels)
    backend.wait_ticks, kernel.absent = 2000, 1
    mailbox = backend.new_mailbox()
    for r in requests:
        mailbox.post(r)
    backend.generate(mailbox)
    for slot in range(2):
        (failure,) = mailbox.read(slot)
        assert isinstance(failure.error, RunError)
        assert re.search(
            r"expired: rank 0, block 0, layer 0, (attention_qkv, word \d+ of qkv|"
            r"o_proj_input, word \d+ of tops), seen 0, wanted 1",
            str(failure.error),
        )
    backend.wait_ticks, kernel.absent = 1 << 20, -1
    got = run(backend, *requests)
    assert [s[0] for s in got[1]] == apart[PROMPTS[1]][0][:COUNT]


# ---- machine code ----


MOST_SPILLS = 232  # loads and stores: joins of splits, and the head once a step; 227 in the kernel of the records


@pytest.mark.parametrize(
    ("name", "columns"),
    [("llama-3.2-1b", 8), pytest.param("qwen3-0.6b", 2, marks=pytest.mark.slow)],
)
def test_loops_that_stream_weights_hardly_spill(name, columns, tmp_path):
    code = machine_code(layout_of(named_shape(name), columns), tmp_path, "columns.cu")
    assert_weight_loops_hardly_spill(code)
    assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS


FAULTS = {
    "a column that reads another's stream": (
        "columns/stream.h",
        "x.words + c * kHiddenStride + e",
        "x.words + e",
    ),
    "lowest bits of other columns": (
        "columns/stream.h",
        "mark[c / 4] >> 4 * (c % 4)",
        "mark[c / 4] >> 4 * (3 - c % 4)",
    ),
    "every request in one slot's cache": ("seat.h", "small->slot = seat.slot", "small->slot = 0"),
    "an operand in another's place": (
        "columns/matvec.h",
        "kHalves == 1 ? 2 * token + odd",
        "kHalves == 1 ? 2 * token",
    ),
    "sums that a slower warp still reads": (
        "columns/matvec.h",
        "  if (Stage::kRooms == 1 || last) sync_consumers();  // the sums have been read\n",
        "",
    ),
    "the streams' rms of another column": (
        "columns/stream.h",
        "i * kColumns + b.in_warp % kColumns",
        "i * kColumns",
    ),
    "the winner of the last step": (
        "columns/head.h",
        "static_cast<u64>(++k.heads) << 32",
        "static_cast<u64>(1) << 32",
    ),
    "splits of another column's length": (
        "columns/attention.h",
        "mine[set] ? images_of(b, column, steps)",
        "mine[set] ? images_of(b, 0, steps)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, tmp_path, name):
    file, before, after = FAULTS[name]
    shutil.copytree(INCLUDE, tmp_path / "include")
    path = tmp_path / "include/kog" / file
    assert path.read_text().count(before) == 1
    path.write_text(path.read_text().replace(before, after))
    monkeypatch.setattr(header, "split_least", lambda spec: 2)
    spec = f16_spec(num_layers=6)
    requests = [request(i, p, 6) for i, p in enumerate(PROMPTS[:4])]
    steps, cache = alone(spec, requests, 6)
    backend = make(ColumnBackend, spec, 4, 6, -1, counts=(4,))
    run(backend, *requests[:2])  # loads the kernel
    (kernel,) = (k.kernel for k in backend.columns.kernels)
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=tmp_path / "include")
    requests = staggered(backend, requests)
    backend.wait_ticks = 5000
    with pytest.raises(AssertionError):
        assert run(backend, *requests) == steps
        assert torch.equal(backend.memory.cache, cache)
