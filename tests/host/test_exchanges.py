"""What the blocks of every kernel exchange is proved from its declaration, and a fault in a declaration is refused."""

import itertools
from dataclasses import replace
from itertools import pairwise

import pytest

from kog_triton.backends.cuda.layout.exchanges import column_kernel, decode_kernel
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.errors import ModelError
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import Head, Reduce
from kog_triton.model.weight_format import FORMATS
from kog_triton.schedule import triton
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.exchanges import (
    Exchange,
    Fence,
    Kernel,
    Mark,
    Of,
    Reader,
    Who,
    check_kernel,
    distances,
    fewest_buffers,
    lay_out_regions,
)
from kog_triton.schedule.schedule import Scope, build
from kog_triton.schedule.topology import GPUS
from tests.lib.exchange_cases import KERNELS, MODELS, change, kernel_of
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.ring_walker import spec_of

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
SHARED = MODELS | {"narrow": with_format(named_shape("qwen3-8b"), FORMATS["int4-g128"])}
ENDS = ("plain", "lanes, MEAN", "lanes, CONCAT")  # the ways in which tokens end


def without_fence(kernel, step):
    return replace(kernel, fences=tuple(f for f in kernel.fences if f.step != step))


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_every_exchange_of_every_kernel_is_proved(model, which):
    check_kernel(kernel_of(MODELS[model], which), ends=model in ENDS)


@pytest.mark.parametrize("model, meetings_of_a_layer", [("plain", 8), ("narrow", 10)])
def test_every_exchange_of_a_shared_step_is_proved(model, meetings_of_a_layer):
    """All its vectors lie in plain memory; without any one of a layer's meetings some reader would be too early, or
    a writer; and requests choose one after the other, with no layer between."""
    kernel = kernel_of(SHARED[model], "shared")
    check_kernel(kernel, ends=True)
    meetings = [i for i, step in enumerate(kernel.layer) if step == "arrive"]
    assert len(meetings) == meetings_of_a_layer
    for at in meetings:
        with pytest.raises(ModelError, match=r"lack a fence|could rewrite one before"):
            check_kernel(replace(kernel, layer=kernel.layer[:at] + kernel.layer[at + 2 :]))
    early = replace(kernel, ends=tuple(tuple(s for s in end if s[:4] != "arri") for end in kernel.ends))
    with pytest.raises(ModelError, match=r"^x: feed and its readers lack a fence"):
        check_kernel(early, ends=True)
    with pytest.raises(ModelError, match="argmax: 1 buffers rotate"):
        check_kernel(change(kernel, "argmax", buffers=1), ends=True)
    for step in ("arrive", "arrivals"):
        with pytest.raises(ModelError, match="lack a fence"):
            check_kernel(without_fence(kernel, step))


def test_operands_of_narrow_weights_have_room():
    """Of each stage's tiles, in the region that it reads."""
    tiles = triton.lower_tiles(build(SHARED["narrow"]), 132, 1024)
    for stage, region in zip(tiles.stages, ("x", "attention_operands", "x", "mlp_operands"), strict=False):
        assert tiles.regions[region][1] >= stage.operands > stage.row_words
    assert tiles.regions["x"][1] >= tiles.hidden_size // 2


def alone(which):
    """Of contexts walked by one split each, which publishes the outputs itself, a step before others would join."""
    return change(kernel_of(MODELS["plain"], which), "attention", producer="attention")


def test_outputs_that_one_split_publishes_are_proved():
    """As joined ones: what a layer's modules put out tells that all have read them."""
    kernel = alone("triton")
    check_kernel(kernel, ends=True)
    for name in ("attention_out", "mlp_out"):
        readers = tuple(replace(r, of=Of.SOME) for r in kernel.exchange(name).readers)
        kernel = change(kernel, name, readers=readers)
    with pytest.raises(ModelError, match="could rewrite one before o_proj has read it"):
        check_kernel(change(kernel, "qkv", words=0))


def test_outputs_that_one_split_publishes_are_proved_in_a_shared_step():
    kernel = alone("shared")
    check_kernel(kernel, ends=True)
    first, last = (kernel.layer.index(step) for step in ("attention", "o_proj"))
    unmet = (*kernel.layer[: first + 1], "attention_join", *kernel.layer[last:])
    with pytest.raises(ModelError, match=r"^attention: attention and its readers lack a fence"):
        check_kernel(replace(change(kernel, "splits", words=0), layer=unmet))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_exchange_of_ranks_is_proved(ranks):
    """Plain tensor parallelism: a lane a rank, all of whose outputs go to all at once."""
    spec = spec_of(num_heads=8, num_kv_heads=8, vocab_size=104)
    kernel = kernel_of(spec, "decode", ranks)
    used = {e.name for e in kernel.exchanges if e.is_used and e.name.startswith(("mlp_", "attention_"))}
    assert {n for n in used if kernel.exchange(n).layers != ()} == {"attention_out_now", "mlp_out_now"}
    check_kernel(kernel, ends=True)
    with pytest.raises(ModelError, match="argmax: 1 buffers rotate"):
        check_kernel(change(kernel, "argmax", buffers=1), ends=True)
    for name in ("attention_out_now", "mlp_out_now"):
        hasty = tuple(replace(r, of=Of.SOME) for r in kernel.exchange(name).readers)
        kernel = change(kernel, name, readers=hasty)
    with pytest.raises(ModelError, match="could rewrite one before"):
        check_kernel(kernel)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_exchange_of_columns_on_ranks_is_proved(ranks):
    """Owners of rows add up what all ranks sent, and tell their own rank alone; each rank picks the argmax itself."""
    kernel = kernel_of(spec_of(num_heads=8, num_kv_heads=8, vocab_size=104), "columns", ranks)
    assert kernel.exchange("column_argmax").scope is Scope.RANK
    check_kernel(kernel, ends=True)
    with pytest.raises(ModelError, match="column_best: 1 buffers rotate"):
        check_kernel(change(kernel, "column_best", buffers=1), ends=True)
    sent = "attention_out_sent", "mlp_out_sent"
    for name, other in (sent, sent[::-1]):  # each has buffers enough without the other
        alone = change(kernel, other, words=0)
        check_kernel(alone)
        with pytest.raises(ModelError, match=f"{name}: 1 buffers rotate"):
            check_kernel(change(alone, name, buffers=1))
    for name in sent:
        hasty = tuple(replace(r, of=Of.SOME) for r in kernel.exchange(name).readers)
        kernel = change(kernel, name, readers=hasty)
    with pytest.raises(ModelError, match="could rewrite one before"):
        check_kernel(kernel)


def test_columns_of_one_rank_pick_from_one_buffer():
    kernel = kernel_of(MODELS["lanes, VOCAB_PARALLEL"], "columns")
    assert kernel.exchange("column_best").buffers == 1
    check_kernel(kernel, ends=True)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("which", "late"), [("decode", "delayed"), ("columns", "sent")])
def test_late_sums_of_ranks_need_as_many_buffers_as_those_of_lanes(which, late, ranks):
    spec = named_shape("laneformer-2b")
    kernel = kernel_of(spec, which, ranks)
    check_kernel(kernel, ends=ranks == 2)
    for name in (f"attention_out_{late}", f"mlp_out_{late}"):
        buffers = kernel.exchange(name).buffers
        assert buffers == kernel_of(spec, which).exchange(name).buffers
        with pytest.raises(ModelError, match=f"{name}: {buffers - 1} buffers rotate"):
            check_kernel(change(kernel, name, buffers=buffers - 1))


def test_a_mix_that_crosses_no_rank_is_proved_within_each():
    """Each rank mixes for itself."""
    kernel = kernel_of(MODELS["lanes, MEAN"], "decode", 2)
    assert kernel.exchange("y").scope is Scope.RANK
    check_kernel(kernel, ends=True)


@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("decode", "attention_out_delayed"),
        ("decode", "mlp_out_delayed"),
        ("decode", "argmax"),
        ("columns", "attention_out_sent"),
        ("columns", "argmax"),
        ("triton", "all_reduce"),
        ("triton", "argmax"),
        ("prompt", "arrivals"),
        ("prompt", "attention_out"),
    ],
)
def test_one_buffer_fewer_is_refused(which, name):
    kernel = kernel_of(named_shape("laneformer-2b"), which)
    fewer = change(kernel, name, buffers=kernel.exchange(name).buffers - 1)
    with pytest.raises(ModelError, match=f"{name}: [0-9] buffers rotate, and .* could rewrite one"):
        check_kernel(fewer, ends=name in ("argmax", "all_reduce"))


def test_outputs_for_all_lanes_need_two_buffers_beside_layers_that_need_none():
    reduces = (NOW, OWN, OWN, NOW)
    spec = mixed_lanes(Head.MEAN, num_layers=4, reduce_attention=reduces, reduce_mlp=(OWN,) * 4)
    kernel = kernel_of(spec, "decode")
    with pytest.raises(ModelError, match="attention_out_now: 1 buffers rotate"):
        check_kernel(change(kernel, "attention_out_now", buffers=1))
    with pytest.raises(ModelError, match="the triton backend cannot reduce lanes so: attention_out: 1"):
        kernel_of(spec, "triton")


@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("decode", "attention_out"),
        ("decode", "mlp_out"),
        ("decode", "argmax"),
        ("decode", "shares"),
        ("decode", "bin"),
        ("columns", "attention_out"),
        ("columns", "column_argmax"),
        ("triton", "argmax"),
        ("triton", "mlp_out"),
        ("prompt", "arrivals"),
    ],
)
def test_what_blocks_do_not_wait_for_proves_nothing(which, name):
    """As if a step looked at some rows of an exchange where it must wait for all of them."""
    kernel = kernel_of(MODELS["plain"], which)
    readers = tuple(replace(r, of=Of.SOME) for r in kernel.exchange(name).readers)
    with pytest.raises(ModelError, match="could rewrite one before"):
        check_kernel(change(kernel, name, readers=readers), ends=True)


@pytest.mark.parametrize("which", KERNELS)
def test_an_exchange_without_a_writer_or_a_reader_is_refused(which):
    kernel = kernel_of(MODELS["plain"], which)
    for exchange in kernel.exchanges:
        if not exchange.is_used:
            continue
        for changes, says in (
            ({"readers": ()}, "nothing reads it"),
            ({"readers": (Reader("nobody"),)}, "nothing named nobody reads it"),
            ({"producer": "nobody"}, "nothing named nobody writes it"),
        ):
            with pytest.raises(ModelError, match=f"^{exchange.name}: {says}"):
                check_kernel(change(kernel, exchange.name, **changes))


@pytest.mark.parametrize(
    ("which", "step", "name"),
    [
        ("decode", "down_proj", "cache"),
        ("decode", "layer_end", "cache"),
        ("columns", "attention_flag", "splits"),
        ("columns", "attention_join", "splits"),
        ("columns", "down_proj_sum", "cache"),
        ("columns", "layer_end", "cache"),
        ("triton", "down_proj", "cache"),
        ("triton", "argmax", "cache"),
        ("prompt", "arrive", "x"),
        ("prompt", "arrivals", "x"),
    ],
)
def test_plain_memory_without_a_fence_is_refused(which, step, name):
    with pytest.raises(ModelError, match=f"^{name}: .* and its readers lack a fence"):
        check_kernel(without_fence(kernel_of(MODELS["plain"], which), step))


def test_a_fence_ahead_of_what_it_publishes_is_refused():
    """Fence, words, flag in one step: nothing orders the words of splits and their flag."""
    kernel = change(kernel_of(MODELS["plain"], "columns"), "attention_flags", producer="attention")
    fences = tuple(replace(f, step="attention") if f.step == "attention_flag" else f for f in kernel.fences)
    with pytest.raises(ModelError, match=r"^splits: "):
        check_kernel(replace(kernel, fences=fences))


def test_late_outputs_that_leave_before_the_others_came_need_more_buffers():
    """A lane may then be two layers that need no other's outputs ahead of one that still waits."""
    kernel = kernel_of(named_shape("laneformer-2b"), "decode")
    for name, stage in (("attention_out_delayed", "o_proj"), ("mlp_out_delayed", "down_proj")):
        (late,) = kernel.exchange(name).readers
        kernel = change(kernel, name, readers=(replace(late, step=f"{stage}_sum"),))
    with pytest.raises(ModelError, match="attention_out_delayed: 6 buffers rotate"):
        check_kernel(kernel)
    assert fewest_buffers(kernel, "attention_out_delayed") == 7


@pytest.mark.parametrize("which", KERNELS[:-1])
def test_one_order_of_a_layer_passes(which):
    """Of the 120 orders of a layer's stages, only the one in which every wait is for what was written."""
    schedule = build(MODELS["plain"])
    head, layers, tail = schedule.segments
    lowering = lower(schedule, GPUS["h200"])
    tiles = triton.lower_tiles(schedule, 132, 1024)
    accepted = []
    for stages in itertools.permutations(layers.stages):
        other = replace(schedule, segments=(head, replace(layers, stages=stages), tail))
        kernel = {
            "decode": lambda s: decode_kernel(replace(lowering, schedule=s), 4),
            "columns": lambda s: column_kernel(replace(lowering, schedule=s), 4, 2),
            "triton": lambda s: triton.decode_kernel(tiles, s),
        }[which](other)
        try:
            check_kernel(kernel)
        except ModelError:
            continue
        accepted.append([s.name for s in stages])
    assert accepted == [["qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj"]]


# ---- the proof itself, on walks that are known ----


def walk(*exchanges, layer=("a", "b"), fences=(), lanes=1):
    return Kernel(lanes, 2, exchanges, layer, ((),), fences)


def test_a_word_that_all_read_at_once_needs_two_buffers():
    """Whoever has read it may write the next one while another has yet to read; but no two ahead."""
    meeting = Exchange("meeting", "a", (Reader("b"),), 1, who=Who.EACH)
    assert distances(walk(meeting))["meeting"] == {1}
    assert fewest_buffers(walk(meeting), "meeting") == 2


def test_an_answer_from_all_readers_makes_one_buffer_enough():
    there = Exchange("there", "a", (Reader("b"),), 1)
    back = Exchange("back", "b", (Reader("c"),), 1)
    kernel = walk(there, back, layer=("a", "b", "c"))
    assert distances(kernel) == {"there": set(), "back": set()}
    few = change(kernel, "back", who=Who.FEW)
    assert distances(few)["there"] == {1}


def test_a_number_needs_no_order_of_its_writers_but_of_its_readers():
    meeting = Exchange("meeting", "a", (Reader("b"),), 1, mark=Mark.NUMBER)
    assert distances(walk(meeting))["meeting"] == {1}


def test_lanes_that_exchange_nothing_drift_apart_for_ever():
    far = Exchange("far", "b", (Reader("c", tokens=1),), 1, mark=Mark.GUARDED, scope=Scope.ALL)
    near = Exchange("near", "a", (Reader("b"),), 1, buffers=2)
    fences = (Fence("a"), Fence("c"))
    kernel = walk(near, far, layer=("a", "b", "c"), fences=fences, lanes=2)
    with pytest.raises(ModelError, match=r"^far: "):
        check_kernel(kernel)


# ---- the room ----


@pytest.mark.parametrize("model", MODELS)
def test_regions_hold_every_buffer_and_lie_apart(model):
    for which, align in itertools.product(KERNELS, (1, 4)):
        exchanges = kernel_of(MODELS[model], which).exchanges
        regions = lay_out_regions(exchanges, align)
        for left, right in pairwise(regions.values()):
            assert right.offset % 32 == 0 and left.end <= right.offset < left.end + 32
        words = sum(e.words * e.rows * max(1, e.buffers) for e in exchanges if e.words is not None)
        assert words <= sum(r.size for r in regions.values())
        assert all(r.stride % align == 0 for r in regions.values())


def test_a_layout_is_refused_when_its_exchanges_are_not_proved(monkeypatch):
    lowering = lower(build(MODELS["plain"]), GPUS["h200"])
    kernel = decode_kernel(lowering, 4)
    readers = tuple(replace(r, of=Of.SOME) for r in kernel.exchange("mlp_out").readers)
    broken = change(kernel, "mlp_out", readers=readers)
    monkeypatch.setattr("kog_triton.backends.cuda.layout.layout.decode_kernel", lambda lowering, splits: broken)
    with pytest.raises(ModelError, match="could rewrite one before"):
        lay_out(lowering, 64)
