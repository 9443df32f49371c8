"""Library prefill beside Triton: its fused kernels compute the same, and the megakernel goes on from its cache."""

import os
import subprocess
import sys

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from kog_triton.sampling import SamplingParams
from tests.lib.prefill_cases import (
    BF16,
    CPU,
    F16,
    F32,
    TOLERANCE,
    assert_filled,
    empty_cache,
    errors,
    prefill_of,
    tokens_of,
)
from tests.lib.ring_walker import spec_of

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here")


def run_fused(name, dtype):
    """A padded bucket, then a chunk behind it, through Triton's interpreter."""
    ours, held = prefill_of(name, dtype, fused=True), empty_cache(name, dtype)
    for first, end in ((0, 3), (3, 6)):
        ours.run(tokens_of(6)[first:end], first, held)
    return held


def test_triton_is_imported_by_the_first_pass_or_ahead_of_it():
    """A start whose prompt runs in the kernel needs none of it."""
    code = (
        "import sys\n"
        "from tests.lib.prefill_cases import CPU, F32, empty_cache, prefill_of\n"
        "from kog_triton.backends.prefill.fused_ahead import import_fused\n"
        "prefill_of('llama', fused=True)\n"
        "assert 'triton' not in sys.modules\n"
        "assert import_fused().gated and 'triton' in sys.modules\n"
        "assert sys.modules['triton.runtime.cache'].triton_key.cache_info().currsize == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype"), [("one key head, yarn", F32), ("qwen3", BF16), ("mistral", F16), ("lanes at once", F32)]
)
def test_fused_kernels_compute_the_same(name, dtype):
    assert_filled(run_fused(name, dtype), name, dtype, 6)


@interpreted
@pytest.mark.parametrize("kernel", ["normed", "rotated", "gated"])
def test_a_fault_in_a_fused_kernel_is_seen(kernel, monkeypatch):
    from kog_triton.backends.prefill import fused as kernels

    right = getattr(kernels, kernel)
    wrong = {
        "normed": lambda x, gain, eps, dtype, o: right(x, gain, eps, dtype, None),
        "rotated": lambda qkv, norms, rope, spec, first, cache, words: right(qkv, None, rope, spec, first, cache),
        "gated": lambda h: right(h.flip(-1)),
    }[kernel]
    monkeypatch.setattr(kernels, kernel, wrong)
    with pytest.raises(AssertionError):
        assert_filled(run_fused("qwen3", BF16), "qwen3", BF16, 6)


@interpreted
def test_the_triton_kernel_goes_on_from_it():
    """The kernel's own cache is the library's up to rounding, and so is the text that follows."""
    from kog_triton.backends.triton import TritonBackend
    from tests.lib.concurrent_interpreter import concurrent

    spec = spec_of(
        num_layers=2, hidden_size=32, intermediate_size=44, num_heads=4, vocab_size=50,
        dtype=DType.F16, windows=(3, 0),
    )  # fmt: skip
    weights = RandomWeights(spec)
    prompt = (3, 42, 12, 7, 8)

    def serve(prefill):
        backend = TritonBackend(weights, BackendOptions(max_context=16, prefill=prefill), 4, CPU)
        kv = backend.memory.pointers.kv[0]
        mailbox = Mailbox()
        params = SamplingParams(temperature=0)
        mailbox.post(Request(0, prompt, params, 0, 3, frozenset()))
        with concurrent(0, "sc"):
            backend.generate(mailbox)
        return [step.token for step in mailbox.read(0, 1)], kv, backend.memory_bytes()["weights"]

    text, from_kernel, weights_alone = serve("kernel")
    same, from_library, weights_beside = serve("library")
    assert same == text
    assert 0 < errors(from_library[..., :7, :], from_kernel[..., :7, :].float()).max() < TOLERANCE[F16]
    assert weights_beside == weights_alone
