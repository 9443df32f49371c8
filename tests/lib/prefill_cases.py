"""Models for library prefill, and a cache that is compared with the reference backend's.

Caches start as NaN, so what is read before it was written shows, and so does what padding would write.
"""

from functools import cache

import numpy as np
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.embedding import Embedding
from kog_triton.backends.prefill.library import LibraryPrefill
from kog_triton.backends.prefill.weights import Unpacked
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType, Reduce, Rope, RopeScaling
from kog_triton.schedule.rope import rope_table
from tests.lib.ring_walker import spec_of

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
STORED = {BF16: DType.BF16, F16: DType.F16, F32: DType.F32}
# Root mean square of the error of a layer's keys or values, over their own. Each layer rounds its
# activations once more, to 8 bits (bf16) or 11 (fp16).
TOLERANCE = {F32: 2e-6, F16: 0.004, BF16: 0.03}
STORED_TOLERANCE = {STORED[dtype]: most for dtype, most in TOLERANCE.items()}
CPU = torch.device("cpu")


def lanes(*reduces, delay=2, **changes):
    """Four lanes; one (attention, MLP) pair of reductions a layer."""
    attention, mlp = zip(*reduces, strict=True)
    base = {
        "num_layers": len(reduces),
        "num_heads": 8,
        "num_kv_heads": 4,
        "num_lanes": 4,
        "delay": delay,
        "reduce_attention": attention,
        "reduce_mlp": mlp,
    }
    return spec_of(**(base | changes))


YARN = Rope(scaling=RopeScaling.YARN, factor=4.0, original_context=16, attention_factor=1.25)
SPECS = {
    "llama": spec_of(),
    "one key head, yarn": spec_of(num_kv_heads=1, head_dim=6, rope=YARN),
    "qwen2": spec_of(qkv_bias=True, tied_embeddings=True),
    "qwen3": spec_of(qk_norm=True),
    "biases": spec_of(qkv_bias=True, o_bias=True, mlp_bias=True),
    "two to a KV head, FFN padded": spec_of(
        num_heads=8, num_kv_heads=2, intermediate_size=90, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
    ),
    "mistral": spec_of(windows=(5, 0, 17), num_heads=4),
    "lanes at once": lanes((NOW, NOW), (NOW, NOW), (NOW, NOW), delay=0),
    "lanes of all kinds": lanes(
        (OWN, NOW), (OWN, OWN), (DELAYED, DELAYED), (DELAYED, OWN), (NOW, DELAYED), (NOW, NOW),
        lane_norms=True, qk_norm=True, windows=(3, 3, 9, 0, 9, 0),
    ),
    "lanes, far apart": lanes(
        (OWN, NOW), (NOW, OWN), (OWN, OWN), *[(DELAYED, DELAYED)] * 4, delay=3,
        qkv_bias=True, o_bias=True, mlp_bias=True, num_kv_heads=8,
    ),
}  # fmt: skip


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 101, count).tolist()


@cache
def weights_of(name, dtype=F32):
    return RandomWeights(SPECS[name].replace(dtype=STORED[dtype]))


@cache
def expected(name, dtype, count):
    """The reference's keys and values, float32 [layers, S, K, 2, count, d]."""
    backend = ReferenceBackend(weights_of(name, dtype), BackendOptions())
    backend.forward(0, tokens_of(count), 0, last_only=True)
    layers = [home[..., :count, :].permute(1, 2, 0, 3, 4) for home in backend.kv._data[0]]
    return torch.stack(layers)


@cache
def expected_streams(name, dtype, count):
    """The reference's residual streams behind all layers, of the last token: float32 [lanes, hidden]."""
    backend, seen = ReferenceBackend(weights_of(name, dtype), BackendOptions()), {}
    run = backend.run

    def noting(stage, layer, values, *others):
        run(stage, layer, values, *others)
        seen.update(values)

    backend.run = noting
    backend.forward(0, tokens_of(count), 0, last_only=True)
    return seen["x"][:, 0]


class PlainMatrices(Unpacked):
    """A layer's matrices by their definition (prefill/weights.py), from the canonical weights."""

    def __init__(self, weights, dtype, device=CPU):
        self._weights, self._dtype, self._device = weights, dtype, device

    def unpack(self, layer, stage):
        parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}.get(stage, (stage[:-5],))
        loaded = [self._weights.load(f"layers.{layer}.{part}_proj") for part in parts]
        loaded = [w.to(self._device, self._dtype) for w in loaded]
        if stage == "gate_up_proj":
            return torch.stack(loaded, 2).flatten(1, 2)
        return torch.cat(loaded, 1)


def prefill_of(name, dtype=F32, device=CPU, weights=None, **changes):
    weights = weights or weights_of(name, dtype)
    spec = SPECS[name]
    positions = max(changes.get("max_context", 64), *changes.get("buckets", (4, 16)))
    options = {
        "max_context": 64,
        "embed": Embedding.of(weights.load("embed").to(device, dtype)),
        "rope": torch.from_numpy(rope_table(spec.rope, spec.head_dim, positions)).to(device),
        "matrices": PlainMatrices(weights, dtype, device),
        "buckets": (4, 16),
        "chunk": 7,
    }
    return LibraryPrefill(weights, spec, **(options | changes))


def empty_cache(name, dtype=F32, positions=64):
    spec = SPECS[name]
    shape = (spec.num_layers, spec.num_lanes, spec.lane_kv_heads, 2, positions, spec.head_dim)
    return torch.full(shape, torch.nan, dtype=dtype)


def errors(got, want):
    """Root mean square of the error over the values', of each layer's keys, values: [layers, 2]."""
    dims = (1, 2, 4, 5)
    return ((got.float() - want).square().mean(dims) / want.square().mean(dims)).sqrt()


def assert_filled(held, name, dtype, count):
    """The first `count` positions hold the reference's keys and values, all others are NaN."""
    want = expected(name, dtype, count)
    assert want.std() > 0.5
    assert errors(held[..., :count, :], want).max() < TOLERANCE[dtype]
    assert held[..., count:, :].isnan().all()
