"""Narrow weights in the Triton kernel on a GPU: every stage, requests that share steps, and prompts in chunks."""

from functools import partial

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox, Request, Step
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.triton import TritonBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.shapes import with_format
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from tests.lib.narrow_stages import STAGES
from tests.lib.narrow_stream import NarrowWeights
from tests.lib.real_shapes import real_shape
from tests.lib.triton_narrow import CASES, assert_near, weights_of

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("case", CASES)
def test_stages_compute_what_the_unpacked_values_say(case):
    weights = weights_of(case)
    ours = TritonBackend(weights, BackendOptions(device="nvidia"))
    reference = ReferenceBackend(weights, BackendOptions())  # on the CPU, where the inputs are
    for stage in STAGES:
        assert_near(ours, reference, stage)


def wide(how):
    """Two layers of Qwen3-8B, whose tiles and loops are those of all, and few words."""
    spec = with_format(real_shape("qwen3-8b", 2).replace(vocab_size=4096), FORMATS[how])
    return NarrowWeights(spec, RandomWeights(spec))


MODELS = {c: partial(weights_of, c, num_layers=2) for c in CASES} | {
    f"two layers of 8B, {how}": partial(wide, how)
    for how in ("fp8-block", "int8-channel", "int4-g128", "int4-g32", "mxfp4")
}
SOME = ("fp8 blocks", "int4 g128", *list(MODELS)[-5:])


def served(backend, *requests):
    """Tokens of each, and the columns of every launch."""
    columns, run, mailbox = [], backend.launcher.run, Mailbox()

    def watched(rules, chunks, count):
        columns.append(0 if chunks else count)
        return run(rules, chunks, count)

    for request in requests:
        mailbox.post(request)
    backend.launcher.run = watched
    backend.generate(mailbox)
    backend.launcher.run = run
    steps = [mailbox.read(request.slot, 0) for request in requests]
    assert all(isinstance(step, Step) for found in steps for step in found)
    return [[step.token for step in found if step.token >= 0] for found in steps], columns


@pytest.mark.parametrize(("case", "count"), [(c, 8) for c in MODELS] + [(c, n) for c in SOME for n in (2, 4)])
def test_requests_that_share_steps_have_the_bits_that_each_has_alone(case, count):
    """Tokens, keys, values and the last logits: all begin and end in one step."""
    weights = MODELS[case]()
    vocab, length = weights.spec.vocab_size, 24
    options = BackendOptions(device="nvidia", num_slots=count, max_context=64)
    backend = TritonBackend(weights, options)
    prompts = [(3 + s, (42 - s) % vocab) for s in range(count)]
    requests = [Request(s, p, GREEDY, seed=s, max_tokens=length) for s, p in enumerate(prompts)]
    backend.shared_steps.ready(count, False)
    backend.shared_steps.settle()
    together, columns = served(backend, *requests)
    assert columns == [count] and all(len(found) == length for found in together)
    pointers, ran = backend.memory.pointers, length + 1
    caches, logits = pointers.kv[..., :ran, :].clone(), pointers.logits.clone()
    for slot, one in enumerate(requests):
        pointers.kv.fill_(torch.nan)
        assert served(backend, one) == ([together[slot]], [1])
        assert torch.equal(pointers.kv[slot, ..., :ran, :], caches[slot]), slot
        assert torch.equal(pointers.logits[0], logits[slot]), slot
    backend.close()


@pytest.mark.parametrize("case", MODELS)
def test_prompts_in_chunks_leave_what_the_library_leaves(case):
    """Both round each value once; four chunks, and a last one that is short."""
    weights, found = MODELS[case](), []
    prompt = np.random.default_rng(0).integers(0, weights.spec.vocab_size, 251).tolist()
    for prefill in ("kernel", "library"):
        options = BackendOptions(device="nvidia", max_context=256, prefill=prefill)
        backend = TritonBackend(weights, options)
        if prefill == "kernel":
            backend.memory.pointers.kv.fill_(torch.nan)
        _, columns = served(backend, Request(0, tuple(prompt), GREEDY, 0, 1))
        assert columns == [0 if prefill == "kernel" else 1]
        found.append(backend.memory.pointers.kv[0, ..., :250, :].float())
        backend.close()
    ours, theirs = found
    error = (ours - theirs).square().mean((1, 2, 4, 5)) / theirs.square().mean((1, 2, 4, 5))
    assert error.sqrt().max() < 0.03, error.sqrt()
