"""What Triton compiles ahead of passes is what they launch."""

import os
from contextlib import nullcontext

import pytest
import torch

from kog_triton.backends.prefill import fused_ahead
from kog_triton.backends.prefill.suffixes import IDS
from tests.lib.prefill_cases import BF16, F16, F32, assert_filled, empty_cache, prefill_of, tokens_of

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU here")


def key_of(kernel, arguments, constants):
    """What Triton compiles a kernel for: types, and of sizes whether they are 1 or multiples of 16, and their bits."""
    fixed, names = kernel.kwargs.get("do_not_specialize") or (), kernel.arg_names

    def word(name, value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.data_ptr() % 16 == 0
        if isinstance(value, float) or name in fixed:
            return type(value).__name__
        return value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31

    told = [(name, word(name, value)) for name, value in zip(names, arguments, strict=False)]
    return kernel.__name__, *told, *sorted(constants.items())


@pytest.fixture
def fused(monkeypatch):
    """The module, with lists of what was launched and of what was compiled only."""
    fused = fused_ahead.import_fused()
    fused.launched, fused.compiled = set(), set()

    def noted(keys, act):
        def call(kernel, grid):
            def run(*arguments, **constants):
                keys.add(key_of(kernel, arguments, constants))
                act(kernel, grid, arguments, constants)

            return run

        return call

    def run(kernel, grid, arguments, constants):
        kernel[grid](*arguments, **constants)

    launch = noted(fused.launched, run)
    for name in ("normed", "gated", "rotated"):
        function = getattr(fused, name)
        *others, _ = function.__defaults__
        monkeypatch.setattr(function, "__defaults__", (*others, launch))
    monkeypatch.setattr(fused, "only_compile", noted(fused.compiled, lambda *_: None))
    return fused


@pytest.fixture
def compiled_here(monkeypatch):
    """On no GPU, and told of what fails."""
    monkeypatch.setattr(fused_ahead, "_compile", lambda arguments, _: fused_ahead.compile_all(arguments))


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", BF16), ("llama", F32), ("mistral", F16), ("lanes of all kinds", F32)]
)
def test_all_that_passes_launch_was_compiled(fused, compiled_here, name, dtype):
    ours, held = prefill_of(name, dtype, fused=True), empty_cache(name, dtype)
    ours.compile_ahead(held)
    ours._pass._ahead.wait()
    assert fused.compiled and not fused.launched
    for first, end in ((0, 3), (3, 6)):
        ours.run(tokens_of(6)[first:end], first, held)
    assert fused.launched == fused.compiled


@interpreted
def test_what_words_tell_is_compiled_too(fused, compiled_here):
    """Suffixes run on a GPU alone; their rotation runs anywhere."""
    ours, cache = prefill_of("qwen3", BF16, fused=True), empty_cache("qwen3", BF16)
    words = torch.zeros(IDS + 16, dtype=torch.int64)
    ours._pass.compile_ahead([], (words, cache))
    layer, spec = ours.layers[0], ours.spec
    qkv = torch.zeros(1, 16, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, dtype=BF16)
    rope = ours._pass.rope
    fused.rotated(qkv, layer.qk_norm, rope, spec.norm_eps, 0, cache[0], words)
    assert fused.launched <= fused.compiled and len(fused.launched) == 1


@interpreted
def test_what_cannot_compile_ahead_keeps_no_pass_from_running(monkeypatch):
    tried = []

    def fail(arguments):
        tried.append(arguments)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(fused_ahead, "compile_all", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    ours, held = prefill_of("llama", fused=True), empty_cache("llama")
    ours.compile_ahead(held)
    ours.run(tokens_of(3), 0, held)
    assert tried
    assert_filled(held, "llama", F32, 3)


def test_what_compiles_keeps_no_memory(monkeypatch):
    seen = []
    monkeypatch.setattr(fused_ahead, "_compile", lambda arguments, device: seen.append(arguments))
    ours, held = prefill_of("qwen3", fused=True), empty_cache("qwen3")
    ours._pass.compile_ahead([held], (torch.zeros(9, dtype=torch.int64), held))
    ours._pass._ahead.wait()
    (arguments,) = seen
    tensors = [t for t in (*arguments[:-2], *arguments.caches, *arguments.told) if isinstance(t, torch.Tensor)]
    assert len(tensors) == 10 and all(t.device.type == "meta" for t in tensors)
    assert arguments.caches[0].stride() == held[0].stride()
