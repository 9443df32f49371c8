"""Token columns: several requests in one step of the CUDA kernel, its own C++ on a CPU (cuda_walk.py).

Whoever shares a step, a request's tokens, log-probabilities, keys and values are those of the same request
alone on the kernel of one token, bit for bit, and it may go from one kernel to the other.
"""

import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from cuda_walk import INCLUDE, ROOT, ColumnBackend, FiberBackend, compile_walk, header, lower
from ring_walker import spec_of
from test_cuda import PLAIN, innermost, is_local, machine_code
from test_cuda_life import Server, ended, held, tokens_of

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.columns import COUNTS, lay_out_columns
from kog_triton.backends.mailbox import Failure, Request
from kog_triton.errors import ModelError, RunError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from kog_triton.random_weights import RandomWeights
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS

GREEDY = SamplingParams(temperature=0)
PROMPTS = ((5, 17, 60), (5, 90), (31, 2, 8, 77), (9, 9, 9), (4, 77, 4, 1, 3), (8, 1), (3, 3, 60), (1,))
COUNT = 5


def layout_of(spec, columns, num_blocks=0, max_context=1024):
    return lay_out_columns(lower(build(spec), GPUS["h200"], num_blocks), max_context, columns)


def make(kind, spec=None, num_slots=3, num_blocks=2, seed=0):
    spec = spec or spec_of(dtype=DType.F16)
    return kind(RandomWeights(spec), BackendOptions(num_slots=num_slots), num_blocks, seed)


def request(slot, prompt, count=COUNT, params=GREEDY, **options):
    return Request(slot, tuple(prompt), params, params.seed or 0, count, **options)


def run(backend, *requests):
    """All steps of requests that were posted at once, slot by slot, without their times."""
    mailbox = backend.new_mailbox()
    for r in requests:
        mailbox.post(r)
    backend.generate(mailbox)
    return {r.slot: [said(step) for step in mailbox.read(r.slot)] for r in requests}


def said(step):
    assert not isinstance(step, Failure), step.error
    return step.token, step.finish, step.logprob, step.top


def alone(spec, requests, num_blocks=2):
    """What each request says alone in a slot of its own, and what it leaves there."""
    backend = make(FiberBackend, spec, len(requests), num_blocks)
    steps = {r.slot: run(backend, r)[r.slot] for r in requests}
    return steps, backend.memory.cache.clone()


# ---- layout ----


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "qwen2.5-coder-1.5b", "qwen3-8b"])
@pytest.mark.parametrize("columns", COUNTS)
def test_regions_do_not_overlap_and_shared_memory_fits(name, columns):
    layout = layout_of(named_shape(name), columns)
    regions = sorted(layout.regions.values(), key=lambda r: r.offset)
    for left, right in pairwise(regions):
        assert left.end <= right.offset
    assert all(r.offset % 32 == 0 and r.stride % 4 == 0 for r in regions)
    assert layout.shared_bytes <= GPUS["h200"].shared_bytes
    assert layout.ring_chunks > layout.lowering.window_chunks
    # The weights are packed once: both kernels read the same stream.
    one = header.lay_out(layout.lowering, 1024)
    numbers = [dict(re.findall(r"int (k\w+) = (\d+);", header.render(x))) for x in (one, layout)]
    for key in ("kFragK", "kFragments", "kChunkBytes", "kBlocks"):
        assert numbers[0][key] == numbers[1][key]


def test_models_with_lanes_and_too_much_at_once_are_refused():
    with pytest.raises(ModelError, match="with lanes share the cuda kernel by turns"):
        layout_of(named_shape("laneformer-2b"), 2)
    wide = spec_of(hidden_size=64, intermediate_size=40_000)
    with pytest.raises(ModelError, match="activations of 8 requests leave"):
        layout_of(wide, 8)


def test_a_model_without_columns_takes_turns():
    backend = make(ColumnBackend, spec_of(num_lanes=2, intermediate_size=96), num_blocks=4)
    assert backend.columns.counts == () and not backend.columns.ready(2)
    got = run(backend, request(0, PROMPTS[0], 2), request(1, PROMPTS[1], 2))
    assert [len(steps) for steps in got.values()] == [2, 2]


# ---- equal to alone ----

SHAPES = {
    **{name: (spec, options) for name, (spec, options, _) in PLAIN.items()},
    # Operands of down_proj in registers and in shared memory; chunks of two fragments of 32 values.
    "a long K": (spec_of(hidden_size=64, num_layers=1, intermediate_size=4608), {}),
}
CUTS = (("kSplitLeast", "SPLIT_LEAST", "split_least"), ("kMergedLength", "MERGED_LENGTH", "merged_length"))


@pytest.mark.parametrize(
    ("name", "columns", "blocks"),
    [(name, (4, 2, 8)[i % 3], (0, 3)[i % 2]) for i, name in enumerate(SHAPES)],
)
def test_columns_compute_what_a_kernel_of_one_token_does(monkeypatch, name, columns, blocks):
    spec, options = SHAPES[name]
    for _, constant, option in CUTS:
        if option in options:
            monkeypatch.setattr(header, constant, options[option])
    count = 8 if options else 4
    params = SamplingParams(temperature=1.0, logprobs=2, seed=3)
    requests = [
        request(i, PROMPTS[i], count, params if i == 1 else GREEDY) for i in range(columns)
    ]
    steps, cache = alone(spec, requests, blocks)
    for seed in (0, -7):
        backend = make(ColumnBackend, spec, columns, blocks, seed)
        assert run(backend, *requests) == steps
        assert torch.equal(backend.memory.cache, cache)
        assert sum(k.kernel.launches for k in backend.columns.kernels) > 0
