"""The CUDA lowering, proved by the ring walker; planted faults turn it red."""

from dataclasses import replace

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.memory import HALF, pack_arena
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType, Reduce
from tests.lib.lowering_cases import MODELS, PROMPT, compare_stages, lanes, walker_of

# Of a third of laneformer-2b's width: as many lanes, heads and blocks.
NARROWER = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 32}


@pytest.mark.parametrize("exact", [True, False], ids=["values", "words"])
@pytest.mark.parametrize("name", MODELS)
def test_walker_reproduces_every_stage(name, exact):
    """From the packed streams alone: x, qkv, attention, mlp of every layer, and the logits.

    "values" keeps activations unrounded and judges layout to 1e-4; "words" passes every value through its
    wire word and rounds activations to the weights' type, so that each stage is off by a few of its steps.
    """
    spec, ranks = MODELS[name]
    walker, source = walker_of(spec, ranks, exact)
    step = 2.0**-11 if spec.dtype is DType.F16 else 2.0**-8
    reference = ReferenceBackend(source, BackendOptions(num_gpus=ranks))
    expected = reference.forward_logits(PROMPT)
    assert expected.std() >= 1
    kv = None
    for position, token in enumerate(PROMPT):
        logits, trace = walker.step(token, position)
        kv = compare_stages(reference, trace, token, kv, 1e-4 if exact else 4 * step)
        if exact:  # rounding adds up over layers: test_wire_words_cost_little bounds that
            np.testing.assert_allclose(logits, expected[position], atol=2e-4 * expected.std() + 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_packs_what_the_walker_reads(name):
    """Each rank's arena, byte by byte."""
    spec, ranks = MODELS[name]
    walker, source = walker_of(spec, ranks, exact=True)
    embed = source.load("embed").to(HALF[spec.dtype])
    for rank in range(ranks):
        packed = pack_arena(walker.lo, source.load, embed, rank).numpy()
        assert np.array_equal(packed, walker.streams[rank, 0].arena), f"rank {rank}"


@pytest.mark.parametrize("exact", [True, False], ids=["values", "words"])
def test_one_lane_model_is_the_same_on_1_2_and_4_ranks(exact):
    """Lanes, not GPUs, define the maths: the same logits in float64, however lanes are spread."""
    spec = lanes(2, intermediate_size=96)
    logits = []
    for ranks in (1, 2, 4):
        walker, _ = walker_of(spec, ranks, exact, num_blocks=12 // ranks)
        logits.append(np.stack([walker.step(t, p)[0] for p, t in enumerate(PROMPT)]))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-11)
    np.testing.assert_allclose(logits[0], logits[2], atol=1e-11)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "narrower"),
    [
        ("llama-3.2-1b", {}),
        pytest.param("laneformer-2b", {}, marks=pytest.mark.slow),  # half a minute to one each
        ("laneformer-2b", NARROWER),
    ],
    ids=["llama-3.2-1b", "laneformer-2b", "laneformer-2b, narrower"],
)
def test_walker_on_the_measured_layouts(shape, narrower, ranks):
    """One layer on 128 blocks a rank, a short vocabulary: the streams that were measured, or narrower ones."""
    own = (Reduce.OWN if shape == "laneformer-2b" else Reduce.NOW,)
    spec = named_shape(shape).replace(num_layers=1, windows=(0,), reduce_attention=own, reduce_mlp=own, vocab_size=2048)
    spec = spec.replace(**narrower)
    walker, source = walker_of(spec, ranks, exact=True, num_blocks=128)
    assert walker.lo.num_blocks == 128
    reference = ReferenceBackend(source, BackendOptions(num_gpus=ranks))
    expected = reference.forward_logits([7])
    logits, trace = walker.step(7, 0)
    compare_stages(reference, trace, 7, None)
    np.testing.assert_allclose(logits, expected[0], atol=2e-4 * expected.std())


@pytest.mark.parametrize("name", ["llama", "qwen2", "lanes on 2"])
def test_wire_words_cost_little(name):
    """With rounded words and activations the logits stay close: what 16-bit exchanges do to a model."""
    spec, ranks = MODELS[name]
    walker, source = walker_of(spec, ranks, exact=False)
    expected = ReferenceBackend(source, BackendOptions(num_gpus=ranks)).forward_logits(PROMPT)
    got = np.stack([walker.step(t, p)[0] for p, t in enumerate(PROMPT)])
    error = np.sqrt(np.mean((got - expected) ** 2)) / expected.std()
    assert 1e-6 < error < (0.01 if spec.dtype is DType.F16 else 0.06)


def fault_ring_slot_order(walker):
    stream = walker.streams[0, 3]
    stream.addresses[-1], stream.addresses[-2] = stream.addresses[-2], stream.addresses[-1]


def fault_one_weight(walker):
    walker.streams[0, 0].arena[40] ^= 0x40
    walker.streams[0, 0].arena[41] ^= 0x40


def fault_k_split(walker):
    tilings = walker.lo.tilings
    old = tilings["down_proj"]
    tilings["down_proj"] = replace(old, k_parts=old.k_parts // 2, k_step=2 * old.k_step)


def fault_missing_word(walker):
    publish = walker.buffers["mlp"].publish
    walker.buffers["mlp"].publish = lambda it, shard, first, values: publish(it, shard, first, values[:-2])


def fault_stale_phase(walker):
    buffer = walker.buffers["qkv"]
    publish = buffer.publish
    buffer.publish = lambda it, *rest: publish(it if it != 4 else it - 1, *rest)


def fault_missing_ring_slot(walker):
    walker.streams[0, 5].addresses.pop()


@pytest.mark.parametrize(
    "fault",
    [
        fault_ring_slot_order,
        fault_one_weight,
        fault_k_split,
        fault_missing_word,
        fault_stale_phase,
        fault_missing_ring_slot,
    ],
)
def test_planted_faults_are_seen(fault):
    walker, source = walker_of(*MODELS["llama"], exact=True)
    expected = ReferenceBackend(source, BackendOptions()).forward_logits(PROMPT)
    fault(walker)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        for position, token in enumerate(PROMPT):
            logits = walker.step(token, position)[0]
            np.testing.assert_allclose(logits, expected[position], atol=2e-4 * expected.std())
