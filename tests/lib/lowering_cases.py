"""Small models in every kind of lowering, with weights that are exact in 16 bits, and their ring walker."""

import numpy as np
import torch

from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from kog_triton.schedule import wire
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.rope import rope_table
from kog_triton.schedule.schedule import Op, build
from kog_triton.schedule.shards import canonical
from kog_triton.schedule.topology import GPUS
from tests.lib.narrow_stream import row_scales_of
from tests.lib.ring_walker import RingWalker, pack_model, spec_of

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


FOUR_LANES = {
    "num_layers": 5,
    "hidden_size": 96,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 176,
    "vocab_size": 336,
    "num_lanes": 4,
    "delay": 2,
}


def mixed_lanes(head: Head, **changes) -> ModelSpec:
    """Four lanes in float16 whose modules reduce differently: never, at once, then late."""
    now, own, late = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
    reduces = {"reduce_attention": (own, now, late, late, late), "reduce_mlp": (now, own, late, late, late)}
    return spec_of(**(FOUR_LANES | reduces | {"dtype": DType.F16, "head": head} | changes))


MODELS = {
    "llama": (spec_of(), 1),
    "qwen2": (spec_of(qkv_bias=True, tied_embeddings=True, dtype=DType.F16), 1),
    "qwen3": (spec_of(qk_norm=True, windows=(4, 0, 3)), 1),
    "biases": (spec_of(qkv_bias=True, o_bias=True, mlp_bias=True), 2),
    "plain on 2": (spec_of(hidden_size=72), 2),
    "plain on 4": (spec_of(num_heads=12, num_kv_heads=4), 4),
    "KV heads on 4": (spec_of(num_heads=8, num_kv_heads=2, qkv_bias=True, qk_norm=True), 4),
    "one KV head on 8": (spec_of(num_heads=16, num_kv_heads=1, dtype=DType.F16), 8),
    "FFN padded on 4": (spec_of(num_heads=4, num_kv_heads=4, intermediate_size=90, mlp_bias=True), 4),
    "lanes on 8": (lanes(2, intermediate_size=96).replace(num_lanes=8, num_kv_heads=8), 8),
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
    narrow = getattr(source, "narrow", None)
    packed = pack_model(lowering, source.arrays, narrow)
    row_scales = {}
    for segment, stage in lowering.schedule.walk():
        if stage.op is Op.MATVEC and lowering.weights[stage.name].row_scales:
            for layer in range(segment.repeat):
                parts = [narrow(canonical(stage, w, layer)) for w in stage.weights]
                scales = row_scales_of(lowering.schedule, stage, parts)
                row_scales[stage.name, layer] = scales
    return RingWalker(lowering, *packed, rope, exact, row_scales), source


def compare_stages(reference, trace, token, kv, tolerance=1e-4):
    """Each stage starts from what the walker's last one left, so that an error is charged to its stage."""
    spec, shards = reference.spec, reference.schedule.num_shards
    kv = kv or [None] * spec.num_layers
    x = reference.run_stage("embed", 0, {"token_ids": torch.tensor([token])})["x"]
    outputs = {"o_proj": [], "down_proj": []}

    def same(got, want, what):
        want = want.reshape(shards, -1).numpy()
        np.testing.assert_allclose(got, want, atol=tolerance * max(1, np.abs(want).max()), err_msg=what)

    def tensor(name):
        return torch.from_numpy(np.asarray(seen[name])).float()[:, None]

    for layer, seen in enumerate(trace):
        qkv = reference.run_stage("qkv_proj", layer, {"x": x})
        same(seen["qkv"], torch.cat([qkv[n] for n in "qkv"], 2), f"qkv of layer {layer}")
        q, k, v = reference.split_heads(tensor("qkv"))
        empty = torch.zeros(shards, reference.schedule.shard_kv_heads, 0, spec.head_dim)
        keys, values = kv[layer] or (empty, empty)
        out = reference.run_stage("attention", layer, {"q": q, "k": k, "v": v, "keys": keys, "values": values})
        kv[layer] = out["keys"], out["values"]
        same(seen["attention"], out["attention"], f"attention of layer {layer}")
        for stage, source, target in (("o_proj", "attention", "attention_out"), ("down_proj", "mlp", "mlp_out")):
            if stage == "down_proj":
                mlp = reference.run_stage("gate_up_proj", layer, {"x": x})["mlp"]
                same(seen["mlp"], mlp, f"mlp of layer {layer}")
            state = {source: tensor(source), "x": x}
            if reference.schedule.reduce(stage, layer) is Reduce.DELAYED:
                state["delayed"] = outputs[stage][layer - spec.delay]
            done = reference.run_stage(stage, layer, state)
            outputs[stage].append(done[target])
            joined = done["x"].expand(shards, -1, -1)
            same(seen[f"x_after_{stage}"], joined, f"x after {stage} of layer {layer}")
            x = tensor(f"x_after_{stage}")
    return kv
