"""The protocol of a backend, and where backends are found.

A backend runs one model on one machine. It has two entry points, which share every function that computes:
`generate` serves the mailbox, `run_stage` runs one stage alone, for tests, timing and bisection.
Backends are found by entry point, group `kog_triton.backends`; a third party adds its own the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kog_triton.backends.mailbox import Mailbox
from kog_triton.errors import DeviceError, RequestError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.topology import Gpu

GROUP = "kog_triton.backends"
# What a caller may call the type of the weights, and BackendOptions calls it.
DTYPE_NAMES = {
    "auto": "auto",
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
PREFILLS = ("auto", "kernel", "library")  # who runs a prompt, as a caller may choose: BackendOptions.prefill
# Logical tensors that `run_stage` takes and gives, by stage, of T tokens at positions n ... and S shards:
#     token_ids [T]    x, delayed, attention_out, mlp_out [S, T, hidden]    q, k, v [S, T, H or K, d]
#     keys, values [S, K, n, d], given back with T positions more        attention [S, T, H * d]
#     mlp [S, T, F]    y [1, T, cols]    logits [T, vocab]
# `delayed` is read where a module's outputs are delayed; the head reads y if there is a mix, else x.
STAGE_READS: dict[str, tuple[str, ...]] = {
    "embed": ("token_ids",),
    "qkv_proj": ("x",),
    "attention": ("q", "k", "v", "keys", "values"),
    "o_proj": ("attention", "x", "delayed"),
    "gate_up_proj": ("x",),
    "down_proj": ("mlp", "x", "delayed"),
    "mix": ("x",),
    "lm_head": ("x", "y"),
}
STAGE_WRITES: dict[str, tuple[str, ...]] = {
    "embed": ("x",),
    "qkv_proj": ("q", "k", "v"),
    "attention": ("attention", "keys", "values"),
    "o_proj": ("attention_out", "x"),
    "gate_up_proj": ("mlp",),
    "down_proj": ("mlp_out", "x"),
    "mix": ("y",),
    "lm_head": ("logits",),
}


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here; if not, `reason` says why and `advice` what to do about it.

    by_name_only    why "auto" does not take it on this machine, though it can run; "" if it may
    lacks_software  what is missing can be installed: the device is one that it runs on
    """

    ok: bool
    reason: str = ""
    advice: str = ""
    by_name_only: str = ""
    lacks_software: bool = False

    def why(self, name: str) -> str:
        """In a line, of the backend of this name."""
        return f"the {name} backend cannot run: {self.reason}; {self.advice}"


@dataclass(frozen=True)
class BackendOptions:
    """What the caller asks of a backend; every backend refuses what it cannot give."""

    num_slots: int = 1
    max_context: int = 0  # positions a slot holds; 0 = as many as the model allows
    num_gpus: int = 1
    device: str = ""  # "", "cpu", a vendor ("nvidia", "amd") or a row of schedule.topology
    # Weights in memory: "fp32", "bf16", "fp16", or "auto": as in the checkpoint, but float32 on the
    # reference backend, whose arithmetic is.
    dtype: str = "auto"
    # One of PREFILLS ("auto": whichever is faster), or "decode": the kernel that decodes, in the same launch, so
    # that a request is one kernel however long that takes; `kog bench decode --no-kernel-switches` asks for it.
    prefill: str = "auto"
    walk: str = "stage"  # the reference backend's: "stage" or "block"
    num_blocks: int = 0  # on each GPU; 0: the backend's choice. Of a backend with `check_blocks`
    memory_share: float = 1.0  # of a GPU's memory, what the model may take (backends/memory_plan.py)


class WeightSource(Protocol):
    """Where a backend reads weights: `load` gives one canonical tensor of `spec.shapes` as a torch tensor.

    One with weights in `spec.narrow` also has `narrow(name, bring)`: a narrow one's codes and scales, a `Narrow`
    (narrow.py), unpacked where `bring` gives a stored tensor.
    """

    @property
    def spec(self) -> ModelSpec: ...

    def load(self, name: str) -> Any: ...


class Backend(Protocol):
    """`spec` is the model as it runs: its dtypes are what a step reads, whatever the checkpoint stores.

    vendors  whose GPUs it serves, of schedule.topology.VENDORS, and "cpu"
    rank     its place in what "auto" tries, the fastest first; a class without the attribute is taken by name only

    A class with a method `why_not_narrow(spec)`, which says why it does not run a model's narrow weights
    (`ModelSpec.narrow`), "" if it does, is asked; where there is none, they are refused. One whose `plans_memory` is
    true refuses what is more than `memory_share` before it loads it. One with a method `check_blocks(spec, options)`,
    RequestError for a number that it cannot give the model here, takes `num_blocks`. `gpu` is the row of the GPU in
    use; None on a CPU and on a GPU without a row.
    """

    name: str
    vendors: tuple[str, ...]
    spec: ModelSpec
    options: BackendOptions
    num_devices: int  # GPUs in use, 1 for a CPU
    gpu: Gpu | None

    @classmethod
    def availability(cls) -> Availability: ...

    def __init__(self, weights: WeightSource, options: BackendOptions) -> None: ...

    def generate(self, mailbox: Mailbox) -> None:
        """Serve the mailbox until it is idle, closed or asks to yield; state survives the return."""
        ...

    def run_stage(self, stage: str, layer: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Run one stage alone: STAGE_READS in, STAGE_WRITES out. RequestError if the model has no such stage."""
        ...

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of one sequence, float32 [tokens, vocab]; leaves all slots alone."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held: "weights", "kv_cache", "other"."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class StageTimer(Protocol):
    """A backend that can time a stage's kernel apart from the laying out of its tensors."""

    def time_stage(self, stage: str, layer: int, state: Mapping[str, Any], before: Callable[[], None]) -> list[float]:
        """As run_stage; seconds on the device of every launch, behind what `before` queues for it."""
        ...


@runtime_checkable
class BackgroundCompiler(Protocol):
    """A backend that serves before all is there that makes it fast."""

    def settle(self) -> None:
        """Wait for kernels that compile beside it, and make ready the rest; while no request runs."""
        ...


@runtime_checkable
class SeveralTokens(Protocol):
    """A backend with kernels of several tokens a step, beside that of one."""

    def kernels_of_several(self) -> list[tuple[int, bool]]:
        """Tokens of a step of each kernel, and whether one prompt has them all. They are ready to run from now on;
        DeviceError names one that cannot be. While no request runs."""
        ...


@runtime_checkable
class DeepPositions(Protocol):
    """A backend that may have a kernel of its own for requests deep in their context."""

    def serve_deep(self) -> bool:
        """From now on that kernel serves requests alone, whatever their position; False if there is none. DeviceError
        if it cannot be had. While no request runs."""
        ...


@runtime_checkable
class Unready(Protocol):
    """A backend that leaves for quiet moments what a first request need not wait for."""

    def make_ready(self) -> bool:
        """The next part of it; whether there may be more. While no request runs."""
        ...


def why_not_narrow(backend: type, spec: ModelSpec) -> str:
    """Why a backend does not run a model's narrow weights, "" if it does."""
    if not spec.narrow:
        return ""
    judge = getattr(backend, "why_not_narrow", None)
    return judge(spec) if judge else f"it does not read {spec.narrow_formats} weights yet"


def refuse_narrow(backend: type, spec: ModelSpec) -> None:
    """DeviceError for a backend that does not run the model's narrow weights: none unpacks them in silence."""
    if reason := why_not_narrow(backend, spec):
        name = getattr(backend, "name", backend.__name__)
        raise DeviceError(f"backend {name} cannot run this checkpoint: {reason}; choose --backend reference")


def check_blocks(backend: type, spec: ModelSpec, options: BackendOptions) -> None:
    """RequestError for a number of blocks that the backend takes from nobody, or cannot give the model here."""
    if (check := getattr(backend, "check_blocks", None)) is None:
        name = getattr(backend, "name", backend.__name__)
        raise RequestError(f"{options.num_blocks} blocks: backend {name} chooses its own, hip takes a number")
    check(spec, options)


def backend_names() -> list[str]:
    return sorted({e.name for e in entry_points(group=GROUP)})


def find_backend(name: str) -> type[Backend]:
    """The class behind a name; DeviceError if no installed package offers it."""
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return entry.load()
    raise DeviceError(f"backend {name!r} is not installed: have {', '.join(backend_names())}")
