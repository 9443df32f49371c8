"""The CUDA kernel's exchange protocol with a CPU thread for every block, judged by ThreadSanitizer.

Green means: of the runs made, no two accesses to one place, from warps of one block or of several, lack an order
that barriers, fences and the words behind them give; and words that are seen late and in any order change no bit.
The faults below have been seen red. What the lanes of one warp do among themselves is not judged, nor what a GPU
does between its generic and its asynchronous accesses.
"""

import itertools

import numpy as np
import pytest

from kog_triton.backends.cuda.layout.header import STEPS
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_planting import plant
from tests.lib.cuda_threads import BOUNDED, JUDGED, RACE, ThreadWalk
from tests.lib.cuda_walk import INCLUDE, Walk
from tests.lib.narrow_stages import AWQ, FEW
from tests.lib.narrow_stream import narrow_spec, random_weights
from tests.lib.ring_walker import spec_of
from tests.lib.slow import some_always

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
IDS = [5, 17, 60, 31]
LIMIT = 1 << 21  # microseconds that a wait may take beside a fault
# Everything that makes blocks talk about a token.
EVERY = SamplingParams(
    temperature=0.9, seed=5, top_k=30, top_p=0.9, min_p=0.01, frequency_penalty=0.3, logprobs=3,
    bad_words_token_ids=((7, 8),),
)  # fmt: skip

# name -> spec, blocks, changes of the header. Two blocks each take a split of a head's context, so that they read
# what others have appended.
SPECS = {
    "splits": (spec_of(num_layers=2, dtype=DType.F16), 4, {"split_least": 2}),
    # What attention finds reaches over the partial sums: two groups of eight heads. In bfloat16, whose words
    # have their phase elsewhere.
    "long heads": (
        spec_of(num_layers=1, num_heads=16, num_kv_heads=1, head_dim=128, dtype=DType.BF16),
        2,
        {"split_least": 2},
    ),
    "lanes": (
        spec_of(
            num_layers=5,
            hidden_size=48,
            num_heads=4,
            num_kv_heads=4,
            intermediate_size=48,
            num_lanes=4,
            delay=1,
            dtype=DType.F16,
            head=Head.SUM_THEN_NORM,
            reduce_attention=(NOW, NOW, NOW, DELAYED, NOW),
            reduce_mlp=(OWN, OWN, OWN, DELAYED, DELAYED),
        ),
        4,
        {},
    ),
}
# Narrow weights: 16-bit values that are unpacked, by scales of granules or of rows; bytes of one scale a fragment, the
# same with their sums, and bytes of a scale a step.
NARROW = {
    name: (narrow_spec(how, **FEW), 4, {"split_least": 2})
    for name, how in {
        "fp8 blocks": FORMATS["fp8-block"],
        "fp8 channels": FORMATS["fp8-channel"],
        "int4 g128": FORMATS["int4-g128"],
        "int4 g128, zero points": AWQ,
        "mxfp4": FORMATS["mxfp4"],
    }.items()
}
JUDGES = {"races": JUDGED, "bounds": BOUNDED}


def of(kind, name, **options):
    spec, blocks, changes = (SPECS | NARROW)[name]
    return kind(spec, random_weights(spec), blocks, **changes, **options)


def walks(name, include=INCLUDE, judge=JUDGED):
    return of(ThreadWalk, name, include=include, judge=judge)


def expected_of(name):
    return of(Walk, name)


@pytest.mark.parametrize("name", some_always(SPECS, "splits", "lanes"))
def test_concurrent_blocks_race_for_nothing(name):
    """Bit for bit what one thread computes, with single warps held back (seed 1) and without."""
    check_judged(walks(name), expected_of(name))


@pytest.mark.parametrize(("name", "judge"), some_always(itertools.product(NARROW, JUDGES), ("int4 g128", "races")))
def test_blocks_of_narrow_weights_race_for_nothing_and_stay_in_bounds(name, judge):
    check_judged(walks(name, judge=JUDGES[judge]), expected_of(name))


def check_judged(ours, one_thread):
    assert np.array_equal(ours.forward_logits(IDS, 1), one_thread.forward_logits(IDS))
    assert (ours.verdict.code, ours.verdict.report) == (0, "")
    tokens = ours.generate(IDS[:2], 2, EVERY, seed=2)
    assert tokens == one_thread.generate(IDS[:2], 2, EVERY)
    assert (ours.verdict.code, ours.verdict.report) == (0, "")


# Faults that the limit of a wait asks for: its lowest bits mean nothing by themselves.
CHOICES = 64


def chosen(number, block="b.p"):
    return f"({block}.limit % {CHOICES} == {number})"


# name -> where it shows, and the edits of one kernel that holds them all
RACES = {
    "rows of the cache are sent without a fence": {"append"},
    "rows of the cache are read without a fence": {"append"},
    "a word is read as plain memory": {"poll_vectors"},
    "partial sums are added before all are there": {"put_sums", "run_batch", "multiply"},
    "a chunk is handed back before it is read": {"take_there", "load"},
}
EDITS = (
    ("layer.h", "&& sends) release_gpu();", f"&& sends && !{chosen(1)}) release_gpu();"),
    ("layer.h", "  acquire_gpu();\n", f"  if (!{chosen(2)}) acquire_gpu();\n"),
    (
        "words.h",
        "if (late[i] != 0) q[i] = load_relaxed4(address(i));",
        f"if (late[i] != 0) q[i] = {chosen(3)} ? *reinterpret_cast<const uint4*>(address(i))"
        " : load_relaxed4(address(i));",
    ),
    ("rows.h", "put_ring(b, ring);\n  sync_consumers();", f"put_ring(b, ring);\n  if (!{chosen(4)}) sync_consumers();"),
    (
        "narrow.h",
        "#pragma unroll\n    for (int f = 0; f < kFragments; f++) w[f] =",
        f"if (mine && {chosen(5)}) ring.release(b);\n#pragma unroll\n    for (int f = 0; f < kFragments; f++) w[f] =",
    ),
    (
        "narrow.h",
        "    if (mine) ring.release(b);\n  }\n};",
        f"    if (mine && !{chosen(5)}) ring.release(b);\n  }}\n}};",
    ),
)


@pytest.fixture(scope="module")
def racing(tmp_path_factory):
    return walks("splits", plant(tmp_path_factory.mktemp("racing"), *EDITS))


@pytest.mark.parametrize("name", RACES)
def test_a_planted_race_is_reported(name, racing):
    fault = list(RACES).index(name) + 1
    request = racing.words(IDS, 2)
    racing.run(request, IDS, seed=2, limit=LIMIT + fault)
    assert racing.verdict.code != 0 and racing.verdict.places & RACES[name]


# The same of bytes with zero points, which share a scale and its sum.
STAGED = "  sync_staged<{}>();\n"
NARROW_RACES = {
    "bytes of x are multiplied before all warps have staged theirs": {"put_bytes", "put_scale"},
    "bytes of the MLP's words are": {"put_bytes", "put_scale"},
    "bytes of attention's words are": {"put_bytes", "put_scale"},
    "a chunk is taken before it has come": {"take", "take_there"},
    "scales and zero points are read behind their chunk's release": {"load", "take_there"},
}
NARROW_EDITS = (
    *(
        (header, STAGED.format(own), f"  if (!{chosen(1 + i)})" + STAGED.format(own))
        for i, (header, own) in enumerate(
            (
                ("inputs.h", "Stage::kParts == kWarps"),
                ("inputs.h", "Inputs<Stage>::kOwnSlice"),
                ("attention.h", "In::kOwnSlice"),
            )
        )
    ),
    (
        "narrow.h",
        "    ring.wait_for<1>(b);\n    take_there<Stage>",
        f"    if (!{chosen(4)}) ring.wait_for<1>(b);\n    take_there<Stage>",
    ),
    (
        "narrow.h",
        "    if constexpr (Weights::kScaleRows > 0) {\n      const u8* record = ring.weights(b)",
        "    const u8* held = ring.weights(b);\n"
        f"    if (mine && {chosen(5)}) ring.release(b);\n"
        "    if constexpr (Weights::kScaleRows > 0) {\n      const u8* record = held",
    ),
    (
        "narrow.h",
        "    if (mine) ring.release(b);\n  }\n};",
        f"    if (mine && !{chosen(5)}) ring.release(b);\n  }}\n}};",
    ),
)


@pytest.fixture(scope="module")
def racing_narrow(tmp_path_factory):
    folder = tmp_path_factory.mktemp("racing_narrow")
    return walks("int4 g128, zero points", plant(folder, *NARROW_EDITS))


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW_RACES)
def test_a_planted_race_of_bytes_is_reported(name, racing_narrow):
    fault = list(NARROW_RACES).index(name) + 1
    request = racing_narrow.words(IDS, 2)
    racing_narrow.run(request, IDS, seed=2)
    assert (racing_narrow.verdict.code, racing_narrow.verdict.report) == (0, "")
    racing_narrow.run(request, IDS, seed=2, limit=LIMIT + fault)
    assert racing_narrow.verdict.code != 0
    assert racing_narrow.verdict.places & NARROW_RACES[name]


# name -> the model that must see it, and what is planted in narrow.h
BEYOND = {
    "scales of a fragment behind the last one": (
        "fp8 blocks",
        "records[f].load(b, record + f * kFragmentOfAll<Weights>);",
        "records[f + 1].load(b, record + f * kFragmentOfAll<Weights>);",
    ),
    "scales of rows behind the last one": (
        "fp8 channels",
        "sum *= of_lane[item.there ? item.row : 0];",
        "sum *= of_lane[item.row + (b.layer == kLayers - 1 ? kBiasRows : 0)];",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BEYOND)
def test_what_narrow_weights_read_beyond_their_bounds_is_reported(what, tmp_path):
    name, *edit = BEYOND[what]
    ours = walks(name, plant(tmp_path, ("narrow.h", *edit)), BOUNDED)
    ours.run(ours.words(IDS, 2), IDS)
    assert ours.verdict.code == RACE and ours.verdict.places, ours.verdict.report


def test_sums_over_results_are_reported(tmp_path):
    """o_proj's sums are put by warps that do not wait until the others have merged."""
    assert expected_of("long heads").layout.results_over_sums
    ours = walks("long heads", plant(tmp_path, ("attention.h", "  leave_results();\n", "")))
    ours.run(ours.words(IDS, 2), IDS, seed=2)
    assert ours.verdict.code != 0 and {"put_sums", "merge_warps"} & ours.verdict.places


def test_one_buffer_too_few_is_seen(tmp_path):
    """Outputs for all lanes at once take turns in two buffers. With one, a lane overwrites what another, standing
    still, has not read: that one waits in vain, or reads what is not meant for it."""
    single = plant(
        tmp_path,
        (
            "residual.h",
            "to = b.p.words + Now::kOffset + ((counts.now & 1) * kLanes + b.lane) * Now::kStride;\n"
            "      phase = phase_of(counts.now >> 1);",
            "to = b.p.words + Now::kOffset + b.lane * Now::kStride;\n      phase = phase_of(counts.now);",
        ),
        (
            "residual.h",
            "const u32* base = b.p.words + Now::kOffset + (counts.now & 1) * kLanes * Now::kStride;",
            "const u32* base = b.p.words + Now::kOffset;",
        ),
        ("residual.h", "u32 phase = phase_of(counts.now >> 1);", "u32 phase = phase_of(counts.now);"),
    )
    spec, blocks, _ = SPECS["lanes"]
    ours = ThreadWalk(spec, RandomWeights(spec), blocks, judge=(), include=single)
    expected = expected_of("lanes").generate(IDS, 6)
    for seed in range(1, 9):
        ours.run(ours.words(IDS, 6), IDS, seed, limit=LIMIT)
        flag, _, step, _, word, _, _, told, *_ = ours.memory.error.tolist()
        if flag and told and "now" in ours.layout.place_of(STEPS[step], word):
            return
        if not flag and (ours.tokens(), ours.outcome) != expected:
            return
    pytest.fail("nobody noticed")


def test_a_word_that_nobody_waited_for_is_seen(tmp_path):
    """Words land in any order: of a vector of four, the first says nothing about the others."""
    all_four = "for (int j = 0; j < 4; j++) late[i]"
    hasty = plant(tmp_path, ("words.h", all_four, all_four.replace("j < 4", "j < 1")))
    spec, blocks, changes = SPECS["splits"]
    ours = ThreadWalk(spec, RandomWeights(spec), blocks, judge=(), include=hasty, **changes)
    expected = expected_of("splits").generate(IDS, 6)
    for seed in range(1, 9):
        ours.run(ours.words(IDS, 6), IDS, seed, limit=LIMIT)
        if (ours.tokens(), ours.outcome) != expected:
            return
    pytest.fail("nobody noticed")
