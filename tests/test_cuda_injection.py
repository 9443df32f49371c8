"""What the CUDA kernel does when something goes wrong, and when its data look like its protocol.

A block that falls silent, NaN in every place that holds numbers, values whose bits are those of the words'
tags, delays wherever a stage begins. Here the kernel's own C++ runs on a CPU; tests/gpu/test_cuda_proof.py
asks the same of a GPU.
"""

import re

import numpy as np
import pytest
import torch
from cuda_planting import plant
from cuda_walk import FiberBackend, compile_walk
from ring_walker import spec_of

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure, Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.errors import RunError
from kog_triton.model.spec import DType
from kog_triton.random_weights import RandomWeights
from kog_triton.sampling import SamplingParams
from kog_triton.schedule import wire

SPEC = spec_of(dtype=DType.F16)
PROMPT = (5, 17, 60)
GREEDY = SamplingParams(temperature=0)

# One kernel with faults that the host asks for through the lowest bits of the limit of a wait, which means
# nothing by them: 63 silences block 1's attention output, other numbers are seeds of delays, 0 is healthy.
FAULTY = 64
SILENT = FAULTY - 1
EDITS = (
    (
        "residual.h",
        "if (owner) store_relaxed(to + row,",
        f"if (owner && (b.block != 1 || b.p.limit % {FAULTY} != {SILENT})) store_relaxed(to + row,",
    ),
    (
        "block.h",
        "in_warp = thread % 32;\n",
        f"""in_warp = thread % 32;
    u32 seed = static_cast<u32>(p.limit % {FAULTY});
    u32 dice = (static_cast<u32>(clock_ticks() >> 4) * 64 + static_cast<u32>(block * 32 + warp)) * 64 + seed;
    dice = (dice ^ dice >> 15) * 2246822519u;
    dice = (dice ^ dice >> 13) * 3266489917u;
    if (seed != 0 && seed != {SILENT} && dice >> 29 == 0)
      for (u32 left = dice >> 20 & 31; left != 0; left--) sleep_a_while();
""",
    ),
)


# ---- asked of a backend: here one on fibers, in tests/gpu a real one ----


def steps_of(backend, prompt=PROMPT, count=6):
    mailbox = backend.new_mailbox()
    mailbox.post(Request(0, tuple(prompt), GREEDY, 0, count))
    backend.generate(mailbox)
    return mailbox.read(0)


def tokens_of(backend, prompt=PROMPT, count=6):
    """Greedy tokens of a request that must go well."""
    steps = steps_of(backend, prompt, count)
    assert not isinstance(steps[-1], Failure), steps[-1].error
    return [step.token for step in steps]


def failure_of(backend, prompt=PROMPT, count=6):
    """The error of a request that must fail without a token."""
    (failure,) = steps_of(backend, prompt, count)
    assert isinstance(failure, Failure) and isinstance(failure.error, RunError)
    return str(failure.error)


def assert_silence_is_named(backend):
    """`backend` runs the kernel of EDITS. A block that does not speak ends the launch within the limit."""
    healthy, whole = backend.wait_ticks, tokens_of(backend)
    backend.wait_ticks = healthy + SILENT
    assert re.search(
        r"expired: rank 0, block \d+, layer 0, attention_out, word \d+ of attention_out, seen 0, "
        r"wanted 1, after 0 steps",
        failure_of(backend),
    )
    backend.wait_ticks = healthy
    assert tokens_of(backend) == whole


def assert_delays_change_nothing(backend, seeds):
    """`backend` runs the kernel of EDITS."""
    healthy, ids = backend.wait_ticks, list(range(3, 11))
    whole, tokens = backend.forward_logits(ids), tokens_of(backend)
    for seed in seeds:
        backend.wait_ticks = healthy + seed
        assert np.array_equal(backend.forward_logits(ids), whole)
        assert tokens_of(backend) == tokens
    backend.wait_ticks = healthy


def assert_nan_is_never_lost(backend, chunks):
    """In every vector of gains, and in those `chunks` of the weights: an error, and no trace behind it."""
    whole, memory = tokens_of(backend, count=3), backend.memory
    arena = memory.weights.view(-1, backend.layout.lowering.chunk_bytes).view(torch.int16)
    places = [*memory.gains.unbind(), *(arena[i] for i in chunks)]
    for place in places:
        before = place.clone()
        place.fill_(torch.nan if place.is_floating_point() else 0x7FFF)
        assert re.search("NaN or .inf after 0 tokens", failure_of(backend))
        place.copy_(before)
        assert tokens_of(backend, count=3) == whole


class Weights(RandomWeights):
    """Random weights some of which are others: `changed(name, tensor)` says which."""

    def __init__(self, spec, changed, device="cpu"):
        super().__init__(spec, device=device)
        self._changed = changed

    def load(self, name):
        return self._changed(name.rpartition(".")[2], super().load(name))


def selecting(name, w):
    """o_proj and down_proj hand on their first inputs."""
    return torch.eye(*w.shape[-2:]).expand_as(w).to(w) if name in ("o_proj", "down_proj") else w


def silent_modules(name, w):
    """Words that are never anything but their tag: every module's output is 0 or -0."""
    return w * -0.0 if name in ("o_proj", "down_proj") else w


def tiny(name, w):
    """Sixteen-bit words that are denormal or round to zero."""
    return w * 2**-17 if name.endswith("_proj") else w


def huge(name, w):
    """Words near the largest float16, of both signs."""
    return w * 600 if name in ("v_proj", "up_proj") else w


def level(name, w):
    """All logits are the same zero: keys of candidates whose data are no bits at all."""
    return w * 0 if name == "lm_head" else w


MODELS = {f.__name__: f for f in (silent_modules, tiny, huge, level)}


def assert_patterns_travel(backend, patterns):
    """16-bit `patterns` as inputs of o_proj and down_proj, whose weights are `selecting`: they come out as
    float32 words, exactly but for the tag; those that are no numbers come out as NaN."""
    spec = backend.spec
    hidden = spec.hidden_size
    bits = np.resize(patterns, (-(-len(patterns) // hidden), hidden))
    values = wire.from_half(bits.reshape(-1), spec.dtype).reshape(bits.shape)
    for stage, source in (("o_proj", "attention"), ("down_proj", "mlp")):
        width = spec.intermediate_size if source == "mlp" else spec.num_heads * spec.head_dim
        given = torch.zeros(1, len(values), width)
        given[0, :, :hidden] = torch.from_numpy(values)
        x = torch.zeros(1, len(values), hidden)
        out = backend.run_stage(stage, 1, {source: given, "x": x})
        got = out["attention_out" if stage == "o_proj" else "mlp_out"][0].numpy()
        for row, sent in zip(got, given[0].numpy(), strict=True):
            words = wire.pack_pair(sent, 1, spec.dtype)
            travelled = wire.unpack_pair(words, spec.dtype)[:hidden]
            if np.isfinite(travelled).all():
                assert np.array_equal(row, wire.unpack_f32(wire.pack_f32(travelled, 1)))
            else:  # 0 * NaN and 0 * inf: of that column no number is left but the infinities' own rows
                assert not np.isfinite(row).any()


def patterns_of(every):
    """Every so many of the finite 16-bit patterns, and the ends of each kind of number."""
    finite = np.setdiff1d(np.arange(1 << 16), [*range(0x7C00, 0x8000), *range(0xFC00, 0x10000)])
    ends = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x8000, 0x8001, 0x83FF, 0x8400, 0xFBFF]
    return np.concatenate([finite[::every], ends]).astype(np.uint16)


NO_NUMBERS = (0x7C00, 0x7C01, 0x7DFF, 0x7E00, 0x7FFF, 0xFC00, 0xFC01, 0xFE00, 0xFFFF)


def assert_logits_agree(backend, weights):
    """With the reference, on every position of a prompt, and greedy decoding ends."""
    ids = list(range(1, 13))
    got = backend.forward_logits(ids)
    expected = ReferenceBackend(weights, BackendOptions()).forward_logits(ids)
    assert np.isfinite(expected).all()
    assert np.sqrt(((got - expected) ** 2).mean()) <= 0.005 * max(1, np.abs(expected).max())
    steps = tokens_of(backend, ids[:3])
    if not expected.any():
        assert steps == [0] * len(steps)


# ---- on a CPU ----


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The kernel of EDITS."""
    backend = FiberBackend(RandomWeights(SPEC), BackendOptions(), 3)
    include = plant(tmp_path_factory.mktemp("faulty"), *EDITS)
    backend.kernel.library = compile_walk(backend.layout, include=include)
    backend.wait_ticks = 1 << 13
    return backend


def test_a_silent_block_is_named_and_the_next_request_runs(faulty):
    assert_silence_is_named(faulty)


def test_delays_change_nothing(faulty):
    assert_delays_change_nothing(faulty, (1, 2))


def test_nan_is_never_lost():
    backend = FiberBackend(RandomWeights(SPEC), BackendOptions())
    chunks = backend.memory.weights.numel() // backend.layout.lowering.chunk_bytes
    assert_nan_is_never_lost(backend, range(0, chunks, max(1, chunks // 8)))


@pytest.mark.parametrize("name", MODELS)
def test_values_that_look_like_tags_are_values(name):
    weights = Weights(SPEC, MODELS[name])
    assert_logits_agree(FiberBackend(weights, BackendOptions()), weights)


def test_every_kind_of_pattern_travels():
    backend = FiberBackend(Weights(SPEC, selecting), BackendOptions())
    assert_patterns_travel(backend, patterns_of(29))
    for pattern in NO_NUMBERS:
        assert_patterns_travel(backend, np.array([0x3C00, pattern, 0x8001], np.uint16))
