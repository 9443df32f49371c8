"""What the CUDA kernel does when something goes wrong, and when its data look like its protocol.

A block that falls silent, NaN in every place that holds numbers, values whose bits are those of the words'
tags, delays wherever a stage begins: asked of a backend on a CPU (tests/cuda/test_injected_faults.py) or on a
GPU (tests/gpu/test_cuda_proof.py).
"""

import re
from dataclasses import dataclass

import numpy as np
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import RunError
from kog_triton.model.spec import DType
from kog_triton.sampling import SamplingParams
from kog_triton.schedule import wire
from tests.lib.ring_walker import spec_of

DTYPES = {"fp16": DType.F16, "bf16": DType.BF16}
SPECS = {name: spec_of(dtype=dtype) for name, dtype in DTYPES.items()}
PROMPT = (5, 17, 60)
GREEDY = SamplingParams(temperature=0)

# One kernel with faults that the host asks for through the lowest bits of the limit of a wait, which means
# nothing by them: 63 silences block 1's attention output, other numbers are seeds of delays, 0 is healthy.
FAULTY = 64
SILENT = FAULTY - 1
EDITS = (
    (
        "residual.h",
        "    if (!item.there) return;\n    if (kRanks > 1 && to_all)",
        f"    if (!item.there || (b.block == 1 && b.p.limit % {FAULTY} == {SILENT})) return;\n"
        "    if (kRanks > 1 && to_all)",
    ),
    (
        "block.h",
        "in_warp = thread % kWarpThreads;\n",
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


# ---- asked of a backend: one on fibers or a real one ----


def steps_of(backend, prompt=PROMPT, count=6):
    mailbox = Mailbox()
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


# What is waited for where block 1 sends no output of its first attention: that, by its own lane, which sends no output
# of its first MLP then. The lanes beside it, where a model has some, add that to their own two layers later: their
# rows' owners wait for it, and all others of them for the owners. Whose watchdog looks first is chance.
AWAITED = (
    r"(layer 0, attention_out, word \d+ of attention_out|"
    r"layer 2, delayed_outputs, word \d+ of mlp_out_delayed|"
    r"layer 2, mlp_out, word \d+ of mlp_out)"
)


def assert_silence_is_named(backend):
    """`backend` runs the kernel of EDITS. A block that does not speak ends the launch within the limit."""
    healthy, whole = backend.wait_ns, tokens_of(backend)
    backend.wait_ns = healthy + SILENT
    assert re.search(rf"expired: rank 0, block \d+, {AWAITED}, seen 0, wanted 1, after 0 steps", failure_of(backend))
    backend.wait_ns = healthy
    assert tokens_of(backend) == whole


def assert_delays_change_nothing(backend, seeds):
    """`backend` runs the kernel of EDITS."""
    healthy, ids = backend.wait_ns, list(range(3, 11))
    whole, tokens = backend.forward_logits(ids), tokens_of(backend)
    for seed in seeds:
        backend.wait_ns = healthy + seed
        assert np.array_equal(backend.forward_logits(ids), whole)
        assert tokens_of(backend) == tokens
    backend.wait_ns = healthy


def assert_nan_is_never_lost(backend, ring_slots):
    """In every vector of gains, and in those `ring_slots` of the weights: an error, and no trace behind it."""
    whole, memory = tokens_of(backend, count=3), backend.memory
    arena = memory.weights.view(-1, backend.layout.lowering.ring_slot_bytes).view(torch.int16)
    places = [*memory.gains.unbind(), *(arena[i] for i in ring_slots)]
    for place in places:
        before = place.clone()
        place.fill_(torch.nan if place.is_floating_point() else 0x7FFF)
        assert re.search("hold NaN or .inf: the run is void", failure_of(backend))
        place.copy_(before)
        assert tokens_of(backend, count=3) == whole


# ---- what is special among 16 bits, by the type that they are of (schedule/wire.py) ----


@dataclass(frozen=True)
class Format:
    """Patterns without their signs, and factors of weights.

    one     1.0
    least   the smallest number of full precision
    most    the largest that arrives as a number, wherever in a pair it travels
    stream  the least of a residual stream that overflows where a norm squares it or gives it its gain
    ends    where kinds of numbers end and others begin, besides
    beyond  those that arrive as no numbers, some of them as the first of a pair alone
    tiny    brings words from order one to where they lose their precision
    huge    brings them to the largest, and what comes of those back
    """

    one: int
    least: int
    most: int
    stream: int
    ends: tuple[int, ...]
    beyond: tuple[int, ...]
    tiny: float
    huge: tuple[float, float]


FORMATS = {
    # A first has fifteen bits: the largest number, rounded, is an infinity.
    DType.F16: Format(
        one=0x3C00,
        least=0x0400,
        most=0x7BFE,
        stream=0x7400,
        ends=(0x0000, 0x0001, 0x0002, 0x03FF, 0x3BFF, 0x3C00, 0x3C01),
        beyond=(0x7BFF, 0x7C00, 0x7C01, 0x7DFF, 0x7E00, 0x7FFF),
        tiny=2.0**-17,
        huge=(600.0, 1.0),
    ),
    # Below 2^-63 (0x2000) the bit that gives way to the phase is zero: a first has no number of its own there.
    # From 2^64 (0x5F80) on no word holds one.
    DType.BF16: Format(
        one=0x3F80,
        least=0x0080,
        most=0x5F7F,
        stream=0x5D80,
        ends=(0x0000, 0x0001, 0x007F, 0x1FFF, 0x2000, 0x2001, 0x3F7F, 0x3F80, 0x3F81),
        beyond=(0x5F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF),
        tiny=2.0**-63,
        huge=(2.0**59, 2.0**-40),
    ),
}


class Weights(RandomWeights):
    """Random weights some of which are others: `changed(name, tensor, format)` says which."""

    def __init__(self, spec, changed, device="cpu"):
        super().__init__(spec, device=device)
        self._changed = changed

    def load(self, name):
        kind = name.rpartition(".")[2]
        return self._changed(kind, super().load(name), FORMATS[self.spec.dtype])


def selecting(name, w, _):
    """o_proj and down_proj hand on their first inputs."""
    return torch.eye(*w.shape[-2:]).expand_as(w).to(w) if name in ("o_proj", "down_proj") else w


def silent_modules(name, w, _):
    """Words that are never anything but their tag: every module's output is 0 or -0."""
    return w * -0.0 if name in ("o_proj", "down_proj") else w


def tiny(name, w, format):
    """Sixteen-bit words without full precision, or that round to zero."""
    return w * format.tiny if name.endswith("_proj") else w


def huge(name, w, format):
    """Words near the largest of 16 bits, of both signs."""
    there, back = format.huge
    if name in ("o_proj", "down_proj"):
        return w * back
    return w * there if name in ("v_proj", "up_proj") else w


def level(name, w, _):
    """All logits are the same zero: keys of candidates whose data are no bits at all."""
    return w * 0 if name == "lm_head" else w


MODELS = {f.__name__: f for f in (silent_modules, tiny, huge, level)}


def both_signs(patterns):
    return np.concatenate([patterns, np.asarray(patterns) | 0x8000]).astype(np.uint16)


def numbers_of(format, every):
    """Every so many of the patterns that arrive as numbers, and the ends of each kind of them."""
    few = np.arange(0, format.most, every)
    return both_signs(np.concatenate([few, format.ends, [format.least, format.most]]))


def values_of(pairs, width, dtype):
    """Pairs of patterns as rows of so many values; the last row ends with the first pairs."""
    bits = np.resize(pairs, (-(-pairs.size // width), width))
    return wire.from_half(bits.ravel(), dtype).reshape(bits.shape)


def travelled(values, dtype):
    """What words leave of rows of pairs."""
    return wire.unpack_pair(wire.pack_pair(values.ravel(), 1, dtype), dtype).reshape(values.shape)


def assert_inputs_arrive(backend, values):
    """Rows of values as first inputs of o_proj and down_proj, whose weights are `selecting`: they come out as
    float32 words, exactly but for the tag. A row that holds what is no number comes out without numbers: 0 * NaN
    and 0 * inf are none."""
    spec = backend.spec
    expected = travelled(values, spec.dtype)
    numbers = np.isfinite(expected).all(1)
    for stage, source in (("o_proj", "attention"), ("down_proj", "mlp")):
        width = spec.intermediate_size if source == "mlp" else spec.num_heads * spec.head_dim
        given = torch.zeros(1, len(values), width)
        given[0, :, : spec.hidden_size] = torch.from_numpy(values)
        x = torch.zeros(1, len(values), spec.hidden_size)
        out = backend.run_stage(stage, 1, {source: given, "x": x})
        got = out["attention_out" if stage == "o_proj" else "mlp_out"][0].numpy()
        tagged = wire.unpack_f32(wire.pack_f32(expected[numbers], 1))
        assert np.array_equal(got[numbers], tagged)
        assert not np.isfinite(got[~numbers]).any()


def assert_outputs_arrive(backend, values):
    """Rows of values as those of a cached position that has all of the attention, as the kernel's own words send
    them: elementwise, for no value meets another."""
    spec = backend.spec
    heads, d = spec.num_kv_heads, spec.head_dim
    key = torch.zeros(1, heads, 1, d)
    key[..., -1] = 100  # what the rotation leaves in place; the new key is its opposite
    state = {
        "q": key[:, :1].repeat(1, 1, spec.num_heads, 1),
        "k": -key.transpose(1, 2),
        "v": torch.zeros(1, 1, heads, d),
    }
    for row in values:
        cached = torch.from_numpy(row).view(1, heads, 1, d)
        out = backend.run_stage("attention", 1, state | {"keys": key, "values": cached})
        got = out["attention"].view(heads, -1, d).numpy()
        # A sum that begins with 0 is never -0.
        expected = travelled(np.where(row == 0, 0, row), spec.dtype)
        expected = expected.reshape(heads, 1, d).repeat(got.shape[1], 1)
        numbers = np.isfinite(expected)
        assert np.array_equal(got[numbers], expected[numbers])
        assert not np.isfinite(got[~numbers]).any()


def assert_patterns_travel(backend, every):
    """Every so many of the patterns of 16 bits, as the first of a pair and as the second of one."""
    spec, dtype, format = backend.spec, backend.spec.dtype, FORMATS[backend.spec.dtype]
    inputs, outputs = spec.hidden_size, spec.num_kv_heads * spec.head_dim
    numbers = numbers_of(format, every)
    pairs = np.stack([numbers, np.roll(numbers, 1)], 1)
    assert_inputs_arrive(backend, values_of(pairs, inputs, dtype))
    # Those of a context are operands without a factor: what a tensor core makes of subnormal ones is not said.
    small = (pairs & 0x7FFF != 0) & (pairs & 0x7FFF < format.least)
    assert_outputs_arrive(backend, values_of(pairs[~small.any(1)], outputs, dtype))
    beyond = both_signs(format.beyond)
    first = np.stack([beyond, np.full_like(beyond, format.one)], 1)
    pairs = np.concatenate([first, first[:, ::-1]])
    assert_inputs_arrive(backend, values_of(np.tile(pairs, inputs // 2), inputs, dtype))
    assert_outputs_arrive(backend, values_of(pairs, outputs, dtype))


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
