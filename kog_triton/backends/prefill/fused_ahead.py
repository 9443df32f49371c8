"""What Triton compiles for passes, begun at the opening in a thread: a model's first prompt, or its graphs, would wait
for it otherwise, behind the kernels of CUDA (benchmarks/cuda-log.md#early)."""

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch

from kog_triton.backends import compiler_threads

Tensor = torch.Tensor
FUSED = "kog_triton.backends.prefill.fused"


def import_fused() -> Any:
    """Ahead of the first pass, in a thread: to import Triton takes a second, and half of one that it hashes its own
    files, by which it finds the kernels that it kept."""
    fused = import_module(FUSED)
    with suppress(ImportError, AttributeError):  # of another release: its first kernel does it
        import_module("triton.runtime.cache").triton_key()
    return fused


class Arguments(NamedTuple):
    """Of the fused kernels of a layer's pass over one token; shapes as in fused.py.

    added  module outputs that join the streams; None: they join elsewhere
    told   words and the first slot's cache of suffixes; None: there are none
    """

    x: Tensor
    gain: Tensor
    eps: float
    dtype: torch.dtype
    added: Tensor | None
    gate_up: Tensor
    qkv: Tensor
    norms: Tensor | None
    rope: Tensor
    caches: Sequence[Tensor]
    told: tuple[Tensor, Tensor] | None


class FusedAhead:
    """Compiles, from when it is made, what passes of such arguments launch; keeps no memory of their GPU."""

    def __init__(self, arguments: Arguments, device: torch.device) -> None:
        bare = Arguments(*map(_without_memory, arguments))
        self._thread = compiler_threads.start(_compile, (bare, device))

    def wait(self) -> None:
        self._thread.join()


def _compile(arguments: Arguments, device: torch.device) -> None:
    with suppress(Exception), torch.cuda.device(device):  # the first launch says what is wrong
        compile_all(arguments)


def compile_all(arguments: Arguments) -> None:
    """Whatever Triton raises that cannot compile a kernel."""
    fused, a = import_fused(), arguments
    call = fused.only_compile
    for added in (None, a.added)[: 1 if a.added is None else 2]:
        fused.normed(a.x, a.gain, a.eps, a.dtype, added, call)
    fused.gated(a.gate_up, call)
    for cache in a.caches:
        fused.rotated(a.qkv, a.norms, a.rope, a.eps, 0, cache, None, call)
    if a.told is not None:
        words, cache = a.told
        fused.rotated(a.qkv, a.norms, a.rope, a.eps, 0, cache, words, call)


def _without_memory(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta")
    return tuple(map(_without_memory, part)) if isinstance(part, list | tuple) else part
