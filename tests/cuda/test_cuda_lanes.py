"""Lanes in token columns of the CUDA kernel, its own C++ on a CPU (cuda_walk.py).

Several requests of a Laneformer, or positions of its prompt, share a step and each leaves the bits that it leaves
alone. How far lanes may drift apart is searched here state by state, without the formula that says so.
"""

import ctypes
from dataclasses import replace

import pytest
import torch

from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import Head, Reduce
from kog_triton.sampling import SamplingParams
from tests.lib.column_cases import EXTRAS, MIXED
from tests.lib.column_cases import layout_of as columns_of
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import GREEDY, PROMPTS, alone, join, make, request, run, staggered, timeless
from tests.lib.cuda_walk import ChunkBackend, ColumnBackend, compile_walk, header
from tests.lib.ring_walker import f16_spec, spec_of
from tests.lib.slow import some_always

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
TOLD = SamplingParams(temperature=1.0, logprobs=2, seed=3)


# ---- what lanes send each other ----

REDUCES = (
    ((OWN, OWN, DELAYED, DELAYED, DELAYED), 2),
    ((NOW, NOW, DELAYED, DELAYED, DELAYED), 2),
    ((OWN, DELAYED, DELAYED), 1),
    ((NOW, DELAYED, DELAYED), 1),
    ((OWN, OWN, OWN, DELAYED, OWN, OWN), 3),
    ((NOW, OWN, OWN, NOW), 0),
    ((NOW, OWN, DELAYED, OWN, DELAYED, NOW), 2),
    ((NOW, NOW), 0),
    ((OWN, OWN, OWN), 1),
)


def steps_of(reduces, delay):
    """What a lane does with its own and the others' outputs in three steps: ("send" or "read", which)."""
    layers = len(reduces)
    for n in range(3 * layers):
        layer = n % layers
        if reduces[layer] is DELAYED:
            yield "read", n - delay
        needed = layer + delay < layers and reduces[layer + delay] is DELAYED
        if reduces[layer] is NOW or needed:
            yield "send", n
        if reduces[layer] is NOW:
            yield "read", n


def is_overtaken(reduces, delay, buffers):
    """Whether one of two lanes can, in some order of their steps, overwrite what the other has yet to read."""
    program = list(steps_of(reduces, delay))
    sent = [n for what, n in program if what == "send"]
    order = {n: i for i, n in enumerate(sent)}
    seen, states = {(0, 0)}, [(0, 0)]
    while states:
        at = states.pop()
        for lane in (0, 1):
            mine, other = at[lane], at[1 - lane]
            if mine == len(program):
                continue
            what, n = program[mine]
            if what == "read" and ("send", n) not in program[:other]:
                continue  # it waits
            if what == "send" and order[n] >= buffers:
                lost = sent[order[n] - buffers]
                if ("read", lost) in program[other:]:
                    return True
            following = (mine + 1, other) if lane == 0 else (other, mine + 1)
            if following not in seen:
                seen.add(following)
                states.append(following)
    return False


@pytest.mark.parametrize(("reduces", "delay"), REDUCES)
def test_buffers_are_as_few_as_no_lane_can_overtake(reduces, delay):
    layers = len(reduces)
    spec = f16_spec(num_layers=layers, num_lanes=2, delay=delay, reduce_attention=reduces, reduce_mlp=(OWN,) * layers)
    layout = columns_of(spec, 2)
    sent = [n for what, n in steps_of(reduces, delay) if what == "send"]
    exchange = layout.kernel.exchange("attention_out_sent")
    assert list(exchange.layers) == [n for n in sent if n < layers]
    before = ", ".join(str(sum(n < i for n in sent)) for i in range(layers + 1))
    assert f"kAttentionSends[] = {{{before}}};" in header.render(layout)
    if not sent:
        assert not exchange.is_used
        return
    assert not is_overtaken(reduces, delay, exchange.buffers)
    assert exchange.buffers == 1 or is_overtaken(reduces, delay, exchange.buffers - 1)


def test_a_laneformer_has_rows_for_every_lane_and_column():
    spec = named_shape("laneformer-2b")
    layout = columns_of(spec, 8)
    assert layout.regions["mlp_out_sent"].buffers == 2 * spec.delay
    for name in ("qkv", "attention_out", "mlp_out", "mlp_out_sent", "part"):
        assert layout.regions[name].rows == 8 * spec.num_lanes
    assert layout.regions["y"].rows == 8


# ---- equal to alone ----

# spec, columns, blocks; what changes where splits of the context begin and end
SHAPES = {
    "all ways to reduce, the sum": (
        f16_spec(
            hidden_size=48,
            intermediate_size=48,
            num_heads=4,
            num_kv_heads=4,
            num_layers=5,
            num_lanes=4,
            delay=1,
            head=Head.SUM_THEN_NORM,
            reduce_attention=(NOW, DELAYED, DELAYED, DELAYED, DELAYED),
            reduce_mlp=(NOW, OWN, NOW, NOW, OWN),
        ),
        4,
        4,
        {},
    ),
    "bf16, biases, gains of each lane, the mean": (
        spec_of(
            **EXTRAS,
            intermediate_size=96,
            num_layers=4,
            num_lanes=2,
            delay=2,
            lane_norms=True,
            reduce_attention=(OWN, NOW, DELAYED, DELAYED),
            reduce_mlp=(NOW, OWN, DELAYED, DELAYED),
        ),
        4,
        4,
        {},
    ),
    "rows of each lane, windows, joins of many splits": (
        f16_spec(
            hidden_size=54,
            intermediate_size=92,
            vocab_size=100,
            num_heads=4,
            head_dim=8,
            windows=(5, 0, 11),
            num_lanes=2,
            delay=1,
            head=Head.VOCAB_PARALLEL,
            reduce_attention=(OWN, DELAYED, DELAYED),
            reduce_mlp=(OWN, OWN, OWN),
        ),
        2,
        8,
        {"split_least": lambda spec: 1, "MERGED_LENGTH": 6},
    ),
    # Lanes that begin within four values of another's, and a K of the head that ends in padding.
    "side by side, sizes that divide by nothing": (
        f16_spec(
            hidden_size=54,
            num_layers=2,
            num_lanes=2,
            head=Head.CONCAT,
            reduce_attention=(NOW, OWN),
            reduce_mlp=(OWN, NOW),
        ),
        4,
        4,
        {},
    ),
    # Operands of x that do not fit into registers: batches of gate_up_proj take turns with two rooms.
    "batch behind batch": (
        f16_spec(hidden_size=320, intermediate_size=400, num_layers=1, num_lanes=2, reduce_mlp=(OWN,)),
        8,
        4,
        {},
    ),
}
MORE = {
    # Eight tokens are rows of the tensor core's instruction; the head takes all lanes' streams.
    "tokens as rows, side by side": (
        f16_spec(
            hidden_size=300,
            intermediate_size=400,
            num_heads=2,
            num_kv_heads=2,
            head_dim=8,
            num_layers=2,
            num_lanes=2,
            head=Head.CONCAT,
        ),
        8,
        2,
        {},
    ),
    # Units of 64 rows, more of whose pieces than a block has warps.
    "pieces in several rounds": (
        f16_spec(hidden_size=160, num_heads=4, num_layers=2, num_lanes=2, reduce_attention=(OWN, NOW)),
        8,
        2,
        {},
    ),
    "nothing is sent": (spec_of(num_lanes=2, reduce_attention=(OWN,) * 3, reduce_mlp=(OWN,) * 3), 8, 0, {}),
    "side by side, nothing is sent": (
        spec_of(num_lanes=2, head=Head.CONCAT, reduce_attention=(OWN,) * 3, reduce_mlp=(OWN,) * 3),
        8,
        6,
        {},
    ),
    "a long delay": (
        f16_spec(
            num_layers=9,
            num_lanes=2,
            delay=4,
            reduce_attention=(OWN,) * 4 + (DELAYED,) * 5,
            reduce_mlp=(OWN,) * 4 + (DELAYED,) * 5,
        ),
        4,
        4,
        {"split_least": lambda spec: 3},
    ),
}
EACH = pytest.mark.parametrize(
    ("name", "shape"),
    some_always(
        (SHAPES | MORE).items(),
        "all ways to reduce, the sum",
        "rows of each lane, windows, joins of many splits",
        "side by side, sizes that divide by nothing",
    ),
)


def apply(monkeypatch, shape):
    spec, columns, blocks, constants = shape
    for name, value in constants.items():
        monkeypatch.setattr(header, name, value)
    return spec, columns, blocks


@EACH
def test_columns_compute_what_a_kernel_of_one_token_does(monkeypatch, name, shape):
    spec, columns, blocks = apply(monkeypatch, shape)
    requests = [request(i, PROMPTS[i], 3, TOLD if i == 1 else GREEDY) for i in range(columns)]
    steps, cache = alone(spec, requests, blocks)
    backend = make(ColumnBackend, spec, columns, blocks, -7, counts=(columns,))
    assert run(backend, *staggered(backend, requests)) == steps
    assert torch.equal(backend.memory.cache, cache)
    assert sum(k.kernel.launches for k in backend.columns.kernels) > 0


@EACH
def test_chunks_leave_what_a_token_at_a_time_leaves(monkeypatch, name, shape):
    spec, positions, blocks = apply(monkeypatch, shape)
    lengths = (positions + 1, 2 * positions + 3)
    requests = [
        request(i, [(i + 7 * n) % 97 for n in range(length)], 2, TOLD if i else GREEDY)
        for i, length in enumerate(lengths)
    ]
    steps, cache = alone(spec, requests, blocks)
    backend = make(ChunkBackend, spec, len(lengths), blocks, -7, positions=positions)
    assert run(backend, *requests) == steps
    assert torch.equal(backend.memory.cache, cache)
    assert backend.chunks.kernel.kernel.launches == len(lengths)


def test_every_way_to_choose_works_beside_every_other(spec):
    requests = [
        request(i, PROMPTS[i], 3, params)
        for i, params in enumerate(MIXED[k] for k in ("greedy", "cut", "penalized", "told"))
    ]
    steps, cache = alone(spec, requests, 4)
    backend = make(ColumnBackend, spec, 4, 4, counts=(4,))
    assert run(backend, *requests) == steps
    assert torch.equal(backend.memory.cache, cache)


@pytest.fixture(scope="module")
def spec():
    return SHAPES["all ways to reduce, the sum"][0]


# ---- life ----


def test_a_request_joins_one_that_runs_and_both_end_as_alone(spec):
    requests = [request(0, PROMPTS[0], 16), request(1, PROMPTS[2], 3)]
    steps, cache = alone(spec, requests, 4)
    backend = make(ColumnBackend, spec, 2, 4, counts=(2,))
    said = join(backend, *requests)
    assert {slot: timeless(said[slot]) for slot in said} == steps
    assert torch.equal(backend.memory.cache, cache)
    assert sum(k.kernel.launches for k in backend.columns.kernels) == 1


@pytest.mark.parametrize(
    "region", some_always(["mlp_out_sent", "attention_out_sent", "part", "y", "y_flags", "mlp_out"], "mlp_out_sent")
)
def test_stores_that_land_late_change_nothing(spec, region):
    requests = [request(i, PROMPTS[i], 3) for i in range(4)]
    steps, cache = alone(spec, requests, 4)
    backend = make(ColumnBackend, spec, 4, 4, 1, counts=(4,))
    run(backend, *requests)  # loads the kernel
    (step,) = backend.columns.kernels
    place = step.layout.regions[region]
    at = ctypes.c_void_p(step.words[0].data_ptr() + 4 * place.offset)
    step.kernel.library.kog_store_late(at, ctypes.c_long(place.end - place.offset), 100)
    backend.memory.cache.zero_()
    assert run(backend, *requests) == steps
    assert torch.equal(backend.memory.cache, cache)


# ---- planted faults ----


FAULTS = {
    "another lane's stream": (
        "words.h",
        "Words::kOffset + lane_of(b) * (Words::kRows / kLanes * Words::kStride)",
        "Words::kOffset",
    ),
    "an output that keeps its size": ("outputs.h", "return y * kRootLanes;", "return y;"),
    "lanes in another order": ("outputs.h", "unpack_f32(word(lane))", "unpack_f32(word(kLanes - 1 - lane))"),
    "an output of this layer for an older one": ("columns/lanes.h", "b.layer - kDelay", "b.layer"),
    "one buffer": ("columns/lanes.h", "index % Words::kBuffers", "0 * index"),
    "a phase of another use": ("columns/lanes.h", "phase_of(index / Words::kBuffers)", "1"),
    "a mean that is not normed": ("mix.h", "x * gain * scale()", "x"),
    "rows of another lane": ("outputs.h", "int first = first_id(b);", "int first = 0;"),
    "a piece in another's place": ("columns/rows.h", "piece % S::kPieces * S::kPieceWords +", ""),
    "one module's streams for the other's": (
        "columns/lanes.h",
        "kEndsLayer ? inner_streams(b) : layer_streams(b)",
        "kEndsLayer ? layer_streams(b) : inner_streams(b)",
    ),
    "one module's sends for the other's": (
        "columns/lanes.h",
        "(kEndsLayer ? kReduceMlp : kReduceAttention)",
        "(kEndsLayer ? kReduceAttention : kReduceMlp)",
    ),
    "candidates of half of the threads": ("threads.h", "mask = kThreads / 2", "mask = kThreads / 4"),
}
SHOWN_BY = {  # where it is not the first shape
    "a mean that is not normed": "bf16, biases, gains of each lane, the mean",
    "rows of another lane": "rows of each lane, windows, joins of many splits",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, tmp_path, name):
    shape = SHAPES[SHOWN_BY.get(name, "all ways to reduce, the sum")]
    spec, columns, blocks = apply(monkeypatch, shape)
    requests = [request(i, PROMPTS[i] * 2, 4) for i in range(columns)]
    steps, cache = alone(spec, requests, blocks)
    backend = make(ColumnBackend, spec, columns, blocks, -1, counts=(columns,))
    run(backend, *(replace(r, max_tokens=1) for r in requests))  # loads the kernel
    (kernel,) = (k.kernel for k in backend.columns.kernels)
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=plant(tmp_path, FAULTS[name]))
    backend.memory.cache.zero_()
    backend.wait_ns = 5000
    with pytest.raises(AssertionError):
        assert run(backend, *requests) == steps
        assert torch.equal(backend.memory.cache, cache)
