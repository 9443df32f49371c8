"""Token columns: several requests in one step of the CUDA kernel, its own C++ on a CPU (cuda_walk.py).

Whoever shares a step, a request's tokens, log-probabilities, keys and values are those of the same request
alone on the kernel of one token, bit for bit.
"""

import math
import re
from itertools import pairwise

import pytest
import torch

from kog_triton.backends.cuda.layout import batches
from kog_triton.backends.cuda.layout.columns import COUNTS, lay_out_columns
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.mailbox import Failure
from kog_triton.errors import ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.cuda import WINDOW_BYTES
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS, KB
from tests.lib.column_cases import ALLOWED, EXTRAS, MIXED, ODD, layout_of
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import GREEDY, PROMPTS, alone, make, request, run, serve, staggered
from tests.lib.cuda_walk import ColumnBackend, compile_walk, header, lower
from tests.lib.real_shapes import REAL, real_shape
from tests.lib.ring_walker import f16_spec, spec_of
from tests.lib.slow import some_always

# ---- layout ----


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "qwen2.5-coder-1.5b", "qwen3-8b", "laneformer-2b"])
@pytest.mark.parametrize("columns", COUNTS)
def test_regions_do_not_overlap_and_shared_memory_fits(name, columns):
    layout = layout_of(named_shape(name), columns)
    regions = sorted(layout.regions.values(), key=lambda r: r.offset)
    for left, right in pairwise(regions):
        assert left.end <= right.offset
    assert all(r.offset % 32 == 0 and r.stride % 4 == 0 for r in regions)
    assert layout.shared_bytes <= GPUS["h200"].shared_bytes
    assert layout.ring_slots >= layout.lowering.slots_in_flight(WINDOW_BYTES)
    # The weights are packed once: both kernels read the same stream.
    one = lay_out(layout.lowering, 1024)
    numbers = [dict(re.findall(r"int (k\w+) = (\d+);", header.render(x))) for x in (one, layout)]
    for key in ("kFragK", "kFragments", "kRingSlotBytes", "kBlocks"):
        assert numbers[0][key] == numbers[1][key]
    # What columns were measured with, in chunks of 16 KB or as much of others.
    chunk = layout.lowering.ring_slot_bytes / KB
    assert int(numbers[1]["kWindowSlots"]) == math.ceil(48 / chunk)
    assert int(numbers[1]["kCalmSlots"]) == math.ceil(32 / chunk)
    assert int(numbers[1]["kAheadTicks"]) == 100 * chunk


@pytest.mark.parametrize("name", REAL)
def test_eight_requests_or_positions_share_a_step(name):
    """Also where rows of x's stages come in fours (Qwen2.5-0.5B), where a K outgrows shared memory (Llama-3.1-8B)
    and where x leaves it no more than a window (Qwen2.5-14B). Fewer where x is wider."""
    lowering = lower(build(real_shape(name)), GPUS["h200"])
    most = {"llama-3.3-70b": 4, "mistral-large-123b": 2}.get(name, 8)
    for columns in COUNTS:
        for chunk in (False, True):
            if columns > most:
                with pytest.raises(ModelError, match=f"activations of {columns} requests"):
                    lay_out_columns(lowering, 4096, columns, chunk)
                continue
            layout = lay_out_columns(lowering, 4096, columns, chunk)
            assert layout.shared_bytes <= GPUS["h200"].shared_bytes
            assert layout.ring_slots >= lowering.slots_in_flight(WINDOW_BYTES)


def test_what_is_held_staged_and_read_of_a_long_k_is_all_of_it():
    lowering = lower(build(real_shape("qwen2.5-7b")), GPUS["h200"])
    stage = lowering.schedule.stage("down_proj")
    steps, each = lowering.steps(stage), batches.step_bytes(lowering, stage, 8)
    held, read = (f(lowering, stage, 8) for f in (batches.held_steps, batches.read_steps))
    assert steps == held + batches.staged_bytes(lowering, stage, 8) // each + read
    assert held and read and read % (batches.READ_SLOTS * lowering.fragments) == 0
    assert lowering.padded_k(stage) * 8 * 2 == steps * each  # a step's bytes, of 16-bit values
    assert [batches.read_steps(lowering, stage, n) for n in (1, 2, 4)] == [0, 0, 0]


def test_too_much_at_once_is_refused():
    with pytest.raises(ModelError, match="activations of 8 requests leave"):
        layout_of(spec_of(hidden_size=6144), 8)


def refuse(*_, **__):
    raise ModelError("no room")


def test_a_model_without_columns_takes_turns(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("kog_triton.backends.cuda.layout.columns.lay_out_columns", refuse)
    backend = make(ColumnBackend)
    assert backend.columns.counts == () and not backend.columns.ready(2)
    assert "no kernel of 2 columns: no room" in caplog.text
    got = run(backend, request(0, PROMPTS[0], 2), request(1, PROMPTS[1], 2))
    assert [len(steps) for steps in got.values()] == [2, 2]


# ---- equal to alone ----

ONE_HEAD = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
# spec, columns, blocks; what changes where splits of the context begin and end, or how much room there is
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
    "three steps of K, in units of as many fragments": (
        f16_spec(hidden_size=96, num_layers=2, intermediate_size=100),
        8,
        2,
        {},
    ),
    "four rows a fragment": (f16_spec(hidden_size=36, num_layers=2, intermediate_size=2048), 8, 2, {}),
    # Where norms are too: qkv_proj and gate_up_proj, by chunks that end behind three units.
    "four rows a fragment of x": (f16_spec(hidden_size=300, num_layers=2, intermediate_size=12, **ONE_HEAD), 8, 6, {}),
    # Units of eight rows: half of a warp's lanes have a sum of two columns. Those of gate_up_proj lie over
    # other warps' operands.
    "two columns of eight rows": (f16_spec(hidden_size=500, num_layers=2, intermediate_size=100, **ONE_HEAD), 2, 2, {}),
    # The tensor core's other side; all units of gate_up_proj in one batch; and the weights of the first unit of
    # the stages that multiply x wait in registers.
    "tokens as rows": (f16_spec(hidden_size=1500, num_layers=1, intermediate_size=106, **ONE_HEAD), 8, 2, {}),
    "tokens as rows, batch by batch": (
        spec_of(hidden_size=1500, num_layers=1, intermediate_size=114, **ONE_HEAD),
        8,
        2,
        {},
    ),
    # The last steps of down_proj, whose operands find no room, are read for each unit.
    "a K beyond shared memory": (
        f16_spec(hidden_size=128, num_layers=1, intermediate_size=2400, **ONE_HEAD),
        4,
        2,
        {"scratch_room": lambda lowering: 16_000},
    ),
    # Of which scratch holds fewer than registers take at once.
    "a K hardly any of which finds room": (
        f16_spec(hidden_size=128, num_layers=1, intermediate_size=2400, **ONE_HEAD),
        8,
        2,
        {"scratch_room": lambda lowering: 12_000},
    ),
}
MORE = {
    "fp16, biases, norms, tied": (f16_spec(**EXTRAS, tied_embeddings=True), 8, 3, {}),
    "sizes that divide by nothing, eight columns": (ODD, 8, 3, {}),
    "windows, joins of many splits by several warps": (
        f16_spec(hidden_size=88, num_heads=6, num_kv_heads=1, windows=(3, 0, 11)),
        4,
        9,
        {"split_least": lambda spec: 1, "MERGED_LENGTH": 9},
    ),
    "bf16, all blocks": (spec_of(), 8, 0, {}),
    "four rows a fragment, two columns": (f16_spec(hidden_size=36, intermediate_size=1536), 2, 2, {}),
    "four rows a fragment of x, once the head's": (
        spec_of(hidden_size=500, num_layers=2, intermediate_size=12, **ONE_HEAD),
        4,
        2,
        {},
    ),
    "four rows a fragment of x in chunks of two": (
        f16_spec(hidden_size=900, num_layers=2, intermediate_size=100, **ONE_HEAD),
        8,
        2,
        {},
    ),
    "a K beyond shared memory, units of it": (
        spec_of(hidden_size=256, num_layers=2, intermediate_size=2400, **ONE_HEAD),
        8,
        2,
        {"scratch_room": lambda lowering: 24_000},
    ),
}


def test_shapes_have_what_they_are_there_for():
    def stages(shape):
        spec, columns, blocks, _ = SHAPES[shape]
        text = header.render(layout_of(spec, columns, blocks))
        numbers = {k: int(v) for k, v in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
        bodies = re.findall(r"struct (\w+) \{ static constexpr int (.*?); .*\};", text)
        return numbers, {name: dict(re.findall(r"(k\w+) = (\w+)", body)) for name, body in bodies}

    for shape in ("tokens as rows", "tokens as rows, batch by batch"):
        numbers, of = stages(shape)
        assert numbers["kFragK"] == 32
        for name in ("QkvProj", "GateUpProj", "LmHead"):
            assert of[name]["kFragmentRows"] == "8" and of[name]["kHeld"] == of[name]["kSteps"]
        # A unit's words in registers (columns/layer.h, LayerAhead).
        chunk = numbers["kFragments"] * numbers["kFragK"] // 8
        unit = int(of["GateUpProj"]["kSteps"]) // numbers["kFragments"] * chunk
        assert of["GateUpProj"]["kPeriod"] == of["QkvProj"]["kPeriod"] == "1"
        assert 0 < unit <= numbers["kTakenWords"]
        assert of["GateUpProj"]["kSumsOver"] == str(shape == "tokens as rows").lower()
    _, of = stages("two columns of eight rows")
    assert of["LmHead"]["kUnitRows"] == "8" and of["GateUpProj"]["kSumsOver"] == "true"


@pytest.mark.parametrize(
    ("name", "shape"),
    some_always(
        (SHAPES | MORE).items(),
        "bf16, biases, norms, tied",
        "sizes that divide by nothing",
        "joins of many splits",
        "four rows a fragment",
        "tokens as rows",
        "a K beyond shared memory",
    ),
)
def test_columns_compute_what_a_kernel_of_one_token_does(monkeypatch, name, shape):
    spec, columns, blocks, constants = shape
    for name, value in constants.items():
        monkeypatch.setattr(batches if name == "scratch_room" else header, name, value)
    told = SamplingParams(temperature=1.0, logprobs=2, seed=3)
    requests = [request(i, PROMPTS[i] * 2, 6 if constants else 2, told if i == 1 else GREEDY) for i in range(columns)]
    steps, cache = alone(spec, requests, blocks)
    backend = make(ColumnBackend, spec, columns, blocks, -7, counts=(columns,))
    assert run(backend, *staggered(backend, requests)) == steps
    assert torch.equal(backend.memory.cache, cache)
    assert sum(k.kernel.launches for k in backend.columns.kernels) > 0


@pytest.fixture(scope="module")
def spec():
    return f16_spec()


def test_every_way_to_choose_works_beside_every_other(spec):
    """Plain columns, whose argmax one block picks, beside those that all blocks choose one by one."""
    requests = [
        request(i, PROMPTS[i], 4, params, mask=(lambda out: ALLOWED) if name == "masked" else None)
        for i, (name, params) in enumerate(MIXED.items())
    ]
    steps, cache = alone(spec, requests)
    for seed in (0, -3):
        backend = make(ColumnBackend, spec, 7, seed=seed, counts=(8,))
        assert run(backend, *requests) == steps
        assert torch.equal(backend.memory.cache, cache)


# ---- planted faults ----


FAULTS = {
    "a column that reads another's stream": (
        "columns/stream.h",
        "x.words + first_column(b) * kHiddenStride + e",
        "x.words + e",
    ),
    "both halves of a warp with the same columns": (
        "columns/stream.h",
        "b.in_warp / (kWarpThreads / kSharing) * kMine",
        "0 * b.in_warp",
    ),
    "every request in one slot's cache": ("cursor.h", "small->slot = cursor.slot", "small->slot = 0"),
    "an operand in another's place": ("operands.h", "kHalves == 1 ? 2 * token + odd", "kHalves == 1 ? 2 * token"),
    "sums that a slower warp still reads": (
        "rows.h",
        "  if (!Share::kAll && (Stage::kSumBuffers == 1 || last)) sync_consumers();  // the sums have been read\n",
        "",
    ),
    "the streams' rms of another column": (
        "values.h",
        "b.small->squares + column * kWarps + i",
        "b.small->squares + i",
    ),
    "the argmax of the last step": (
        "columns/head.h",
        "static_cast<u64>(count_up(b, &WarpState::heads)) << 32",
        "static_cast<u64>(1) << 32",
    ),
    "another column's position": (
        "columns/splits.h",
        "position = position_of(b, b.column, steps_of(b));",
        "position = position_of(b, 0, steps_of(b));",
    ),
    "one split for both halves of the warps": ("columns/splits.h", "split += side(b);", ""),
    "splits that weigh alike": ("kv_task.h", "share[s] = exp2_fast(top[s] - best);", "share[s] = 1;"),
}


# Of shapes that have what is changed.
SHAPE_FAULTS = {
    "another token's operand of four rows": (
        "four rows a fragment of x",
        "operands.h",
        "token % 2 * (16 * kOperandWords)",
        "0 * token",
    ),
    "low parts that four rows leave out": (
        "four rows a fragment of x",
        "matvec.h",
        "          even += v[0][1] + v[1][1];\n",
        "",
    ),
    "a lane without a sum that leads": (
        "two columns of eight rows",
        "columns/head.h",
        " && b.in_warp < OperandLayout<LmHead>::kPieceWords",
        "",
    ),
    "sums over operands that another warp still takes": ("tokens as rows", "rows.h", "Stage::kSumsOver || ", ""),
    "low parts that rows of tokens leave out": (
        "tokens as rows",
        "matvec.h",
        "part[odd] += v[0][2 + i] + v[1][2 + i];",
        "",
    ),
    "even words for odd ones": (
        "tokens as rows, batch by batch",
        "matvec.h",
        "{w.w[set], w.w[2 + set]}",
        "{w.w[0], w.w[2]}",
    ),
    "queries of another block": (
        "joins of many splits",
        "columns/kv_tasks.h",
        "n % kHeadParts * kPartQueries",
        "0 * n",
    ),
    "operands of a chunk that was multiplied": (
        "a K beyond shared memory",
        "matvec.h",
        "int next = first + n + kReadSlots;",
        "int next = first + n;",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPE_FAULTS)
def test_a_fault_planted_in_a_shape_is_seen(monkeypatch, tmp_path, name):
    shape, *edit = SHAPE_FAULTS[name]
    spec, columns, blocks, constants = SHAPES[shape]
    for constant, value in constants.items():
        monkeypatch.setattr(batches if constant == "scratch_room" else header, constant, value)
    requests = [request(i, PROMPTS[i], 2) for i in range(columns)]
    steps, cache = alone(spec, requests, blocks)
    backend = make(ColumnBackend, spec, columns, blocks, -3, counts=(columns,))
    run(backend, *requests)  # loads the kernel
    (kernel,) = (k.kernel for k in backend.columns.kernels)
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=plant(tmp_path, tuple(edit)))
    backend.wait_ns = 5000
    with pytest.raises(AssertionError):
        assert run(backend, *requests) == steps
        assert torch.equal(backend.memory.cache, cache)


@pytest.mark.slow
def test_a_hint_that_never_comes_is_named(tmp_path):
    """Who finds none of its words there waits for hints alone: that wait is bounded as others are."""
    edit = ("columns/stream.h", "store_relaxed(lane_words<Hints>(b) + row / 4, epoch)", "epoch = 0")
    requests = [request(i, PROMPTS[i], 3) for i in range(4)]
    backend = make(ColumnBackend, f16_spec(), 4, 6, -3, counts=(4,))
    run(backend, *requests)  # loads the kernel
    (kernel,) = (k.kernel for k in backend.columns.kernels)
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=plant(tmp_path, edit))
    backend.wait_ns = 5000
    said = [step for steps in serve(backend, *requests).values() for step in steps]
    errors = [str(step.error) for step in said if isinstance(step, Failure)]
    place = r"expired: .*word \d+ of (attention|mlp)_out_flags, seen"
    assert errors and all(re.search(place, error) for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(monkeypatch, tmp_path, name):
    include = plant(tmp_path, FAULTS[name])
    monkeypatch.setattr(header, "split_least", lambda spec: 2)
    spec = f16_spec(num_layers=6)
    requests = [request(i, p, 6) for i, p in enumerate(PROMPTS[:4])]
    steps, cache = alone(spec, requests, 6)
    backend = make(ColumnBackend, spec, 4, 6, -1, counts=(4,))
    run(backend, *requests[:2])  # loads the kernel
    (kernel,) = (k.kernel for k in backend.columns.kernels)
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=include)
    requests = staggered(backend, requests)
    backend.wait_ns = 5000
    with pytest.raises(AssertionError):
        assert run(backend, *requests) == steps
        assert torch.equal(backend.memory.cache, cache)
