"""The CUDA lowering, proved by the ring walker; partitions, rotation, extents; planted faults turn it red."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ring_walker import RingWalker, pack_model, spec_of

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.errors import ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from kog_triton.schedule import wire
from kog_triton.schedule.check import check_lowering, check_partition, check_schedule
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.lowering import Partition, Tiling, matrix_stages
from kog_triton.schedule.rope import rope_table
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS

H200 = GPUS["h200"]
PROMPT = [3, 77, 12, 5, 98, 41, 41]


class ArrayWeights:
    """Random weights whose logits are spread, exact in the model's 16-bit type."""

    def __init__(self, spec: ModelSpec, seed: int = 0):
        self.spec, rng = spec, np.random.default_rng(seed)
        self.arrays = {}
        for pattern, shape in spec.shapes.items():
            for layer in range(spec.num_layers if "{}" in pattern else 1):
                value = rng.standard_normal(shape, np.float32)
                if "norm" in pattern:
                    value = 1 + 0.3 * value
                elif "bias" in pattern:
                    value = 0.3 * value
                elif len(shape) > 1:
                    value *= 3 / np.sqrt(shape[-1]) if pattern != "embed" else 1
                bits = wire.to_half(value.astype(np.float32), spec.dtype)
                self.arrays[pattern.format(layer)] = wire.from_half(bits, spec.dtype)

    def load(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.arrays[name])


def lanes(delay: int, head: Head = Head.MEAN, early: Reduce = Reduce.OWN, **kw) -> ModelSpec:
    layers = 5
    reduce = (early,) * delay + (Reduce.DELAYED,) * (layers - delay)
    return spec_of(
        num_layers=layers,
        num_heads=8,
        num_kv_heads=4,
        num_lanes=4,
        delay=delay,
        head=head,
        vocab_size=100,
        reduce_attention=reduce,
        reduce_mlp=reduce,
        **kw,
    )


MODELS = {
    "llama": (spec_of(), 1),
    "qwen2": (spec_of(qkv_bias=True, tied_embeddings=True, dtype=DType.F16), 1),
    "qwen3": (spec_of(qk_norm=True, windows=(4, 0, 3)), 1),
    "biases": (spec_of(qkv_bias=True, o_bias=True, mlp_bias=True), 2),
    "plain on 2": (spec_of(hidden_size=72), 2),
    "plain on 4": (spec_of(num_heads=12, num_kv_heads=4), 4),
    "lanes on 1": (lanes(2), 1),
    "lanes on 2": (lanes(1, early=Reduce.NOW), 2),
    "lanes on 4": (lanes(2, Head.SUM_THEN_NORM, dtype=DType.F16, o_bias=True, mlp_bias=True), 4),
    "lanes, vocab parallel": (lanes(2, Head.VOCAB_PARALLEL, lane_norms=True), 2),
    "lanes, concatenated": (lanes(1, Head.CONCAT), 1),
}


def walker_of(spec, ranks, exact, num_blocks=12, source=None):
    lowering = lower(build(spec, ranks), H200, num_blocks)
    check_lowering(lowering)
    source = source or ArrayWeights(spec)
    rope = rope_table(spec.rope, spec.head_dim, 64).astype(np.float64)
    return RingWalker(lowering, *pack_model(lowering, source.arrays), rope, exact), source


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
            np.testing.assert_allclose(
                logits, expected[position], atol=2e-4 * expected.std() + 1e-5
            )


def compare_stages(reference, trace, token, kv, tolerance=1e-4):
    """Each stage starts from what the walker's last one left, so that an error is charged to its stage."""
    spec, shards = reference.spec, reference.schedule.num_shards
    kv = kv or [None] * spec.num_layers
    x = reference.run_stage("embed", 0, {"token_ids": torch.tensor([token])})["x"]
    past = {"o_proj": [], "down_proj": []}

    def same(got, want, what):
        want = want.reshape(shards, -1).numpy()
        np.testing.assert_allclose(
            got, want, atol=tolerance * max(1, np.abs(want).max()), err_msg=what
        )

    def tensor(name):
        return torch.from_numpy(np.asarray(seen[name])).float()[:, None]

    for layer, seen in enumerate(trace):
        qkv = reference.run_stage("qkv_proj", layer, {"x": x})
        same(seen["qkv"], torch.cat([qkv[n] for n in "qkv"], 2), f"qkv of layer {layer}")
        q, k, v = reference.split_heads(tensor("qkv"))
        empty = torch.zeros(shards, spec.num_kv_heads // shards, 0, spec.head_dim)
        keys, values = kv[layer] or (empty, empty)
        out = reference.run_stage(
            "attention", layer, {"q": q, "k": k, "v": v, "keys": keys, "values": values}
        )
        kv[layer] = out["keys"], out["values"]
        same(seen["attention"], out["attention"], f"attention of layer {layer}")
        for stage, source, target in (
            ("o_proj", "attention", "attention_out"),
            ("down_proj", "mlp", "mlp_out"),
        ):
            if stage == "down_proj":
                mlp = reference.run_stage("gate_up_proj", layer, {"x": x})["mlp"]
                same(seen["mlp"], mlp, f"mlp of layer {layer}")
            state = {source: tensor(source), "x": x}
            if reference.schedule.reduce(stage, layer) is Reduce.DELAYED:
                state["past"] = past[stage][layer - spec.delay]
            done = reference.run_stage(stage, layer, state)
            past[stage].append(done[target])
            joined = done["x"].expand(shards, -1, -1)
            same(seen[f"x_after_{stage}"], joined, f"x after {stage} of layer {layer}")
            x = tensor(f"x_after_{stage}")
    return kv


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
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "laneformer-2b"])
def test_walker_on_the_measured_layouts(shape, ranks):
    """One layer at full width on 128 blocks a rank, a short vocabulary: the streams that were measured."""
    own = (Reduce.OWN if shape == "laneformer-2b" else Reduce.NOW,)
    spec = named_shape(shape).replace(
        num_layers=1, windows=(0,), reduce_attention=own, reduce_mlp=own, vocab_size=2048
    )
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


def fault_chunk_order(walker):
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
    walker.buffers["mlp"].publish = lambda it, shard, first, values: publish(
        it, shard, first, values[:-2]
    )


def fault_stale_phase(walker):
    buffer = walker.buffers["qkv"]
    publish = buffer.publish
    buffer.publish = lambda it, *rest: publish(it if it != 4 else it - 1, *rest)


def fault_missing_chunk(walker):
    walker.streams[0, 5].addresses.pop()


@pytest.mark.parametrize(
    "fault",
    [
        fault_chunk_order,
        fault_one_weight,
        fault_k_split,
        fault_missing_word,
        fault_stale_phase,
        fault_missing_chunk,
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


# ---- the probes' layouts, at full size ----


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "laneformer-2b"])
def test_probe_layouts(shape, ranks):
    """The shapes that were measured: 128 blocks, padding of 1 % at most, chunks of 12 to 24 KB, a deep ring."""
    spec = named_shape(shape)
    lowering = lower(build(spec, ranks), H200)
    check_lowering(lowering)
    assert lowering.num_blocks == 128
    assert lowering.chunk_bytes in (12288, 16384, 24576)
    assert lowering.ring_chunks * lowering.chunk_bytes >= 160 * 1024
    real = 2 * (
        spec.num_parameters - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size)
    )
    norms = 2 * spec.hidden_size * (2 * spec.num_layers + 1)
    padded = sum(lowering.stream_bytes(rank) for rank in range(ranks))
    assert real - norms <= padded <= 1.01 * real
    chunks = {lowering.block_chunks(b) for b in range(128)}
    assert max(chunks) <= 1.02 * min(chunks)


@pytest.mark.parametrize(
    "shape, fragments, unrolled",
    [
        ("llama-3.2-1b", 2, 0),
        ("laneformer-2b", 3, 0),
        ("qwen3-8b", 2, 0),
        ("qwen2.5-coder-1.5b", 2, 5),
    ],
)
def test_chunks_end_where_units_do_unless_the_ring_shrinks(shape, fragments, unrolled):
    lowering = lower(build(named_shape(shape)), H200)
    stages = matrix_stages(lowering.schedule)
    assert (lowering.frag_k, lowering.fragments) == (32, fragments)
    assert sum(lowering.steps(s) % fragments > 0 for s in stages) == unrolled


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen2.5-coder-1.5b", "qwen3-8b"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_shapes_lower_with_little_padding(shape, ranks):
    spec = named_shape(shape)
    lowering = lower(build(spec, ranks), H200)
    check_lowering(lowering)
    padded = sum(lowering.stream_bytes(rank) for rank in range(ranks))
    assert padded <= 1.09 * spec.bytes_per_token  # wide fragments, whose loop is twice as fast


@pytest.mark.parametrize(
    "hidden, heads, kv_heads", [(5632, 44, 4), (5632, 44, 11), (7680, 60, 12), (6400, 50, 10)]
)
def test_warps_stage_the_part_of_x_that_they_multiply(hidden, heads, kv_heads):
    spec = spec_of(
        hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=128,
        intermediate_size=2 * hidden, vocab_size=32_000,
    )  # fmt: skip
    lowering = lower(build(spec), H200)
    staged = -(-hidden // (16 * lowering.frag_k)) * 16 * lowering.frag_k
    for stage in matrix_stages(lowering.schedule):
        if stage.source == "x":
            multiplied = lowering.padded_k(stage)
            assert multiplied <= staged
            assert multiplied == staged or lowering.tilings[stage.name].k_parts < 16


@pytest.mark.parametrize("high, hidden", [(8, 512), (4, 1536)])
def test_fragment_layout_is_the_stated_one(high, hidden):
    """Fragment (step) of warp (group, part) holds, row by row, as many K values of each."""
    spec = spec_of(hidden_size=hidden, intermediate_size=8960, num_heads=6)
    lowering = lower(build(spec), H200, 4 if high == 8 else 128)
    stage = lowering.schedule.stage("qkv_proj" if high == 8 else "down_proj")
    assert lowering.fragment(stage) == (high, 8 // high * lowering.frag_k)
    wide = lowering.fragment(stage)[1]
    from kog_triton.schedule.packing import pack_stage

    w = np.arange(stage.rows * stage.cols, dtype=np.uint16).reshape(stage.rows, stage.cols)
    chunks = pack_stage(lowering, stage, 0, 1, 0, w)
    tiling, rows = lowering.tilings[stage.name], lowering.block_rows(stage, 0, 1)
    flat = chunks.reshape(-1, 16, high, wide)
    steps = lowering.steps(stage)
    for n, warp, row in ((0, 0, 0), (1, 3, 5 % high), (steps, 14, high - 1)):
        unit, step = divmod(n, steps)
        group, part = divmod(warp, tiling.k_parts)
        source = rows[unit * tiling.unit_rows + group * high + row]
        k = (part * steps + step) * wide
        np.testing.assert_array_equal(flat[n, warp, row], w[source, k : k + wide])


def test_packing_with_torch_equals_numpy():
    from kog_triton.schedule.packing import pack_stage

    lowering = lower(build(spec_of()), H200, 12)
    for stage in matrix_stages(lowering.schedule):
        w = np.random.default_rng(1).integers(0, 2**15, (stage.rows, stage.cols)).astype(np.int16)
        for block in (0, 7):
            ours = pack_stage(lowering, stage, 2, block, 0, w)
            theirs = pack_stage(lowering, stage, 2, block, 0, torch.from_numpy(w))
            np.testing.assert_array_equal(ours, theirs.numpy())


# ---- owners ----


@pytest.mark.parametrize("blocks", [1, 3, 12, 132])
def test_remainders_rotate_over_layers(blocks):
    """No two blocks differ by more than one unit, summed over any number of layers."""
    schedule = build(spec_of(num_layers=40, hidden_size=280))
    partition = Partition(schedule, blocks, {s.name: Tiling(2) for s in matrix_stages(schedule)})
    check_partition(partition)
    stage = schedule.stage("down_proj")
    for depth in (1, 2, 7, 40):
        total = [
            sum(len(partition.block_units(stage, i, b)) for i in range(depth))
            for b in range(blocks)
        ]
        assert max(total) - min(total) <= 1


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda s: replace(
                s,
                exchanges=tuple(
                    replace(e, readers=()) if e.name.endswith("_out") else e for e in s.exchanges
                ),
            ),
            "nothing reads it",
        ),
        (lambda s: replace(s, exchanges=(replace(s.exchanges[0], producer="nobody"),)), "nobody"),
        (lambda s: replace(s, exchanges=(replace(s.exchanges[0], readers=("nobody",)),)), "nobody"),
        (
            lambda s: replace(
                s,
                exchanges=tuple(
                    replace(e, buffers=4) if e.name == "mlp_out_past" else e for e in s.exchanges
                ),
            ),
            "could overwrite",
        ),
    ],
)
def test_check_refuses(change, message):
    with pytest.raises(ModelError, match=message):
        check_schedule(change(build(lanes(2))))


def test_check_finds_rows_without_owner():
    schedule = build(spec_of())
    tilings = {s.name: Tiling(8, 16, 16, 8) for s in matrix_stages(schedule)}

    class Broken(Partition):
        def block_units(self, stage, layer, block, rank=0):
            units = super().block_units(stage, layer, block, rank)
            return range(units.start, units.stop - 1) if block == 2 and units else units

    check_partition(Partition(schedule, 4, tilings))
    with pytest.raises(ModelError, match="without exactly one owner"):
        check_partition(Broken(schedule, 4, tilings))


def test_lowering_that_does_not_fit_is_refused():
    lowering = lower(build(spec_of()), H200, 12)
    with pytest.raises(ModelError, match="not resident"):
        check_lowering(replace(lowering, num_blocks=133))
    small = replace(H200, shared_bytes=48 * 1024)
    with pytest.raises(ModelError, match="shared memory"):
        check_lowering(replace(lowering, gpu=small))
    with pytest.raises(ModelError, match="float32"):
        lower(build(spec_of(dtype=DType.F32)), H200)
    with pytest.raises(ModelError, match="does not divide"):
        build(spec_of(), 4)
