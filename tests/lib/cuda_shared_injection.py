"""What the CUDA kernels of columns and of chunks do when something goes wrong, and when their data look like
their protocol: cuda_injection.py's faults, of several requests at once.

The oracle is the kernel of one token, alone and healthy: on a CPU (tests/cuda/test_shared_injected_faults.py) or on a
GPU (tests/gpu/test_cuda_shared_proof.py).
"""

import re

import numpy as np
import torch

from kog_triton.backends.mailbox import Failure, Request
from kog_triton.errors import RunError
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_injection import DTYPES, EDITS, FAULTY, MODELS, SILENT, numbers_of
from tests.lib.cuda_requests import run, serve, tokens_of
from tests.lib.ring_walker import spec_of

SPECS = {name: spec_of(dtype=dtype, num_layers=2) for name, dtype in DTYPES.items()}
SLOTS = {"columns": 8, "chunks": 2}
BAD = 99  # a token that no prompt holds unless it is put there
TOLD = SamplingParams(temperature=0, logprobs=2)
PROMPTS = [tuple((5 + 11 * i + 7 * n) % 97 for n in range(3 + i % 3)) for i in range(8)]
SHARED_EDITS = (
    *EDITS,
    (
        "columns/layer.h",
        "  if (b.warp == 0)\n    raise_flag(b, b.p.words + mlp_flag(b, rotated_group_index",
        f"  if (b.warp == 0 && (b.block != 1 || b.p.limit % {FAULTY} != {SILENT}))\n"
        "    raise_flag(b, b.p.words + mlp_flag(b, rotated_group_index",
    ),
    (
        "outputs.h",
        "put_two<GateUpProj, 2>(",
        f"if (b.block != 1 || b.p.limit % {FAULTY} != {SILENT}) put_two<GateUpProj, 2>(",
    ),
)


def patterned(name, w, format):
    """16-bit patterns of every kind begin a residual stream, and modules add 0 or -0 to it."""
    if name == "embed":
        bits = numbers_of(format, 29)
        bits = np.resize(bits[bits % 0x8000 < format.stream], w.shape)
        return torch.from_numpy(bits.view(np.int16)).view(w.dtype).to(w)
    return MODELS["silent_modules"](name, w, format)


SHARED_MODELS = {**MODELS, "patterned": patterned}


# ---- asked of a backend: one on fibers or a real one ----


def requests(backend, prompts=PROMPTS):
    """One a slot."""
    prompts = prompts[: backend.options.num_slots]
    return [Request(slot, prompt, TOLD, 0, 2) for slot, prompt in enumerate(prompts)]


def answers(backend, one_by_one=False):
    """What the requests say, with log-probabilities, and the keys and values that they leave."""
    backend.memory.cache.zero_()
    if one_by_one:
        said = {r.slot: run(backend, r)[r.slot] for r in requests(backend)}
    else:
        said = run(backend, *requests(backend))
        assert backend.columns.kernels or backend.chunks.kernel  # somebody shared a step
    return said, backend.memory.cache.cpu()


def assert_alike(got, expected):
    """`got` may be of fewer requests."""
    said, cache = got
    assert said == {slot: expected[0][slot] for slot in said}
    assert torch.equal(cache, expected[1][: len(cache)])


def failures(backend, prompts=PROMPTS):
    """Slot by slot, the error of a request or None; and the tokens of those that went well."""
    errors, tokens = {}, {}
    for slot, steps in serve(backend, *requests(backend, prompts)).items():
        errors[slot] = steps[-1].error if isinstance(steps[-1], Failure) else None
        tokens[slot] = [step.token for step in steps if not isinstance(step, Failure)]
    return errors, tokens


def assert_nan_ends_one_request(backend, expected, slots=(0, 7)):
    """NaN that comes to one request ends it alone, and its slot serves the next one right."""
    row = backend.memory.embed[BAD].clone()
    for bad in {min(slot, backend.options.num_slots - 1) for slot in slots}:
        backend.memory.embed[BAD] = torch.nan
        prompts = [(*p, BAD) if slot == bad else p for slot, p in enumerate(PROMPTS)]
        errors, tokens = failures(backend, prompts)
        assert re.search("hold NaN or .inf: the run is void", str(errors[bad])) and tokens[bad] == []
        for slot in set(errors) - {bad}:
            assert errors[slot] is None
            assert tokens[slot] == tokens_of(expected[0][slot])
        backend.memory.embed[BAD] = row
        assert_alike(answers(backend), expected)


def assert_nan_is_nobodys_answer(backend, expected, ring_slots):
    """NaN in any vector of gains, or in those `ring_slots` of the weights, is an error of each request."""
    memory = backend.memory
    arena = memory.weights.view(-1, backend.layout.lowering.ring_slot_bytes).view(torch.int16)
    for place in [*memory.gains.unbind(), *(arena[i] for i in ring_slots)]:
        before = place.clone()
        place.fill_(torch.nan if place.is_floating_point() else 0x7FFF)
        errors, tokens = failures(backend)
        assert all(re.search("hold NaN or .inf: the run is void", str(e)) for e in errors.values())
        assert not any(tokens.values())
        place.copy_(before)
    assert_alike(answers(backend), expected)


def assert_delays_change_nothing(backend, expected, seeds):
    """`backend` runs the kernels of SHARED_EDITS."""
    healthy = backend.wait_ns
    for seed in seeds:
        backend.wait_ns = healthy + seed
        assert_alike(answers(backend), expected)
    backend.wait_ns = healthy


def assert_silence_is_named(backend, expected):
    """`backend` runs the kernels of SHARED_EDITS."""
    healthy = backend.wait_ns
    backend.wait_ns = healthy + SILENT
    errors, tokens = failures(backend)
    assert not any(tokens.values())
    for error in errors.values():
        assert isinstance(error, RunError)
        assert re.search(
            r"expired: rank 0, block \d+, layer 0, down_proj_input, (word \d+ of mlp(_flags)?, )?"
            r"seen 0, wanted 1, after 0 steps",
            str(error),
        )
    backend.wait_ns = healthy
    assert_alike(answers(backend), expected)
