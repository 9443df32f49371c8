"""A pass of short prompts, its own C++ on a CPU: keys, values and last streams are the reference's, and a prompt's bits
are the same whoever shares its pass."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.layout.prompt import render_product
from kog_triton.backends.cuda.layout.short_pass import CALLS, SHORT_KERNELS, render_short_pass
from kog_triton.backends.cuda.memory import pack_arena
from kog_triton.backends.cuda.products import group_tables
from kog_triton.backends.cuda.prompt_texts import can_pass
from kog_triton.backends.cuda.short_pass import ShortPass, ShortPrompt
from kog_triton.backends.prefill.weights import load_layer
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import DTYPES, RandomWeights
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.rope import rope_table
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from tests.lib import short_pass as host
from tests.lib.cuda_walk import ROOT
from tests.lib.machine_code import innermost, instructions, is_local, sass_of_text
from tests.lib.product_cases import SPECS as PLAIN
from tests.lib.slow import some_always

SPECS = {
    "plain": PLAIN["two"],
    "biases, norms, windows, fp16": PLAIN["three"].replace(
        dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, windows=(5, 0)
    ),
}
SLOTS, POSITIONS, MOST = 4, 64, 7
CPU = torch.device("cpu")
PRODUCT, BETWEEN = ((ROOT / "backends/cuda" / name).read_text() for name in ("prompt.cu", "short_pass.cu"))


def opened(spec):
    """A pass on a GPU of few multiprocessors."""
    dtype, weights = DTYPES[spec.dtype], RandomWeights(spec)
    lowering = lower(build(spec), find_gpu("h200"), 5)
    assert can_pass(lowering)
    embed = weights.load("embed").to(dtype)
    arena = pack_arena(lowering, weights.load, embed)
    stages = {s.name: s for s in layer_matrices(lowering.schedule)}
    table, at = group_tables(lowering, stages)
    groups = torch.from_numpy(table)

    def address(name, layer):
        return groups[at[name, layer][0]].data_ptr()

    cache = torch.zeros(SLOTS, spec.num_layers, 1, spec.num_kv_heads, 2, POSITIONS, spec.head_dim, dtype=dtype)
    streams = torch.full((SLOTS, 1, spec.hidden_size), torch.nan)
    layers = [load_layer(weights, lowering.schedule, i, CPU, dtype) for i in range(spec.num_layers)]
    rope = torch.from_numpy(rope_table(spec.rope, spec.head_dim, POSITIONS))
    made = ShortPass(lowering, arena, address, embed, rope, layers, cache, streams, host.ready_of(spec.dtype), MOST)
    made.kept = groups
    return made, cache, streams


def reference_of(spec, tokens):
    """Keys and values of all positions, and the last token's streams."""
    weights = RandomWeights(spec)
    backend, seen = ReferenceBackend(weights, BackendOptions()), {}
    run = backend.run

    def noting(stage, layer, values, *others):
        run(stage, layer, values, *others)
        seen.update(values)

    backend.run = noting
    backend.forward(0, tokens, 0, last_only=True)
    return backend, seen["x"][0, 0]


@pytest.mark.parametrize("name", some_always(SPECS, "biases, norms, windows, fp16"))
def test_streams_are_the_references_and_equal_whoever_shares_the_pass(name):
    spec = SPECS[name]
    made, cache, streams = opened(spec)
    prompts = [ShortPrompt([(7 * i + 3 * s) % 64 for i in range(n)], s) for s, n in ((2, 21), (0, 6), (3, 9))]
    alone = {}
    for prompt in prompts:
        made.queue(made.write([prompt]), 0)
        alone[prompt.slot] = streams[prompt.slot].clone(), cache[prompt.slot].clone()
        _, want = reference_of(spec, prompt.tokens)
        ours = streams[prompt.slot, 0]
        error = (ours - want).norm() / want.norm()
        assert error < {DType.BF16: 1.2e-2, DType.F16: 2e-3}[spec.dtype]
    cache.zero_(), streams.fill_(torch.nan)
    together = made.write(prompts[::-1], 0)
    assert together.tokens == 64
    made.queue(together, 1)
    for slot, (x, kv) in alone.items():
        assert torch.equal(streams[slot], x) and torch.equal(cache[slot], kv)
    assert streams[1].isnan().all() and not cache[1].any()


# ---- machine code ----


MOST_SPILLS = 20  # loads and stores, once a tile's part: NVRTC 13.0, 0, 10, 15 and 20
LAST_ALWAYS = [*(pytest.param(k, marks=pytest.mark.slow) for k in SHORT_KERNELS[:-1]), SHORT_KERNELS[-1]]


@pytest.mark.parametrize("kernel", LAST_ALWAYS, ids=lambda k: f"{k.tokens} tokens")
def test_products_that_leave_parts_follow_each_other_and_spill_in_no_loop(kernel):
    code = instructions(sass_of_text(render_product(kernel, DType.BF16, parts=True) + PRODUCT))
    (loop,) = [body for body in innermost(code, r"\bHGMMA") if any("HGMMA" in w for w in body)]
    assert sum("HGMMA" in what for what in loop) == 2 * 2 * kernel.blocks
    waits = [what for what in loop if "DEPBAR" in what and "gsb0" in what]
    assert len(waits) == 2 and all("0x1" in what for what in waits)
    assert not any(is_local(what) for what in loop)
    assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS
    assert not [what for _, what in code if "ATOM" in what]  # nobody waits for another block


@pytest.mark.parametrize("kernel", LAST_ALWAYS, ids=lambda k: f"{k.tokens} tokens")
def test_what_lies_between_products_spills_nothing(kernel):
    text = render_short_pass(kernel.tokens, DType.BF16) + BETWEEN
    code = instructions(sass_of_text(text))
    assert not [what for _, what in code if is_local(what)]
    # each begins before the one before has ended, and waits for it
    assert len([what for _, what in code if "ACQBULK" in what]) == len(CALLS)
    assert len([what for _, what in code if "PREEXIT" in what]) == len(CALLS)
    assert [what for _, what in code if "HMMA" in what]
