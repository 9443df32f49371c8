"""Where each second of a start goes, from exec to the first text and to the end: `kog generate`, with its steps told.

    python benchmarks/micro/start_timeline.py --model FOLDER -p Hello -m 4 --quiet 2> timeline.txt

Takes the flags of `kog generate`, whose text is on stdout. On stderr, in the order in which they end, the steps that
took 5 ms or more: when they began and ended, in seconds since the process was begun, how long that is, how often the
step was taken if more than once, and its thread if it is not the first; what runs inside another is indented. Steps
that are taken many times come at the end, with the sum of their times.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

LEAST_S = 0.005
# Module -> what of it is told; "" is its import.
STEPS: dict[str, tuple[str, ...]] = {
    "numpy": ("",),
    "torch": ("",),
    "triton": ("",),
    "cupy_backends.cuda.libs.nvrtc": ("",),
    "huggingface_hub": ("",),
    "kog_triton.cli.request": ("", "check_request"),
    "kog_triton.llm": ("", "LLM.__init__", "LLM.stream", "LLM.close"),
    "kog_triton.precompile": ("precompile",),
    "kog_triton.checkpoint.folder": ("Checkpoint.open", "Checkpoint.load"),
    "kog_triton.backends.choose": ("choose", "look_at"),
    "kog_triton.backends.weight_upload": ("WeightUpload.__call__", "Piece.bring"),
    "kog_triton.backends.prefill.library": (
        *("open_library", "LibraryPrefill.__init__", "LibraryPrefill.make_ready"),
        "LibraryPrefill.begin",
    ),
    "kog_triton.backends.prefill.fused": ("",),
    "kog_triton.backends.prefill.slices": ("PromptRun.advance",),
    "kog_triton.backends.prefill.weights": ("load_layer",),
    "kog_triton.backends.serving": ("LaunchServing.begin", "LaunchServing._launch"),
    "kog_triton.backends.cuda.backend": (
        *("", "CudaBackend.__init__", "CudaBackend._open_devices", "CudaBackend._open_kernel"),
        *("CudaBackend._admit", "CudaBackend._launch_slots"),
    ),
    "kog_triton.backends.cuda.prompts_beside": ("PromptsBeside._open_matrices",),
    "kog_triton.backends.cuda.chunks": ("Chunks.__init__", "Chunks.settle"),
    "kog_triton.backends.cuda.compilers": ("compile_apart",),
    "kog_triton.backends.cuda.driver": ("Kernel.__init__",),
    "kog_triton.backends.cuda.jit": ("begin_cubin", "compile_cubin"),
    "kog_triton.backends.cuda.kernel_cache": ("load",),
    "kog_triton.backends.cuda.memory": ("allocate", "pack_arena", "_biases", "_place"),
    "kog_triton.backends.cuda.products": ("ArenaProducts.__init__", "group_tables"),
    "kog_triton.backends.triton.host.backend": ("TritonBackend.__init__", "TritonBackend._launch"),
    "kog_triton.backends.triton.host.memory": ("allocate",),
    "kog_triton.schedule.check": ("check_lowering",),
    "kog_triton.schedule.cuda": ("lower",),
    "kog_triton.schedule.rope": ("rope_table",),
    "kog_triton.stage_check": ("check_new_gpu",),
    "kog_triton.text.tokenizer": ("Tokenizer.load",),
    "kog_triton.cli.interactive": ("write",),
}
OFTEN = {"Checkpoint.load", "WeightUpload.__call__", "Piece.bring", "_place", "load_layer"}


def exec_time() -> float:
    """When the kernel began this process, by time.clock_gettime(CLOCK_BOOTTIME)."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


BEGUN = exec_time()
inside = threading.local()
sums: dict[str, tuple[int, float]] = {}


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - BEGUN


def tell(line: str) -> None:
    os.write(2, f"{line}\n".encode())


@contextmanager
def step(name: str, often: bool = False) -> Iterator[None]:
    depth = inside.depth = getattr(inside, "depth", 0) + 1
    begun = now()
    try:
        yield
    finally:
        inside.depth, ended = depth - 1, now()
        count, total = sums.get(name, (0, 0.0))
        sums[name] = count + 1, total + ended - begun
        if ended - begun >= LEAST_S and not often:
            thread = threading.current_thread()
            where = "" if thread is threading.main_thread() else f"  [{thread.name}]"
            times = f"{begun:8.3f} {ended:8.3f} {ended - begun:8.3f}"
            tell(f"{times}  {'  ' * (depth - 1)}{name}{where}")


def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with step(name, name in OFTEN):
            return function(*arguments, **named)

    return wrapped


def first_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """`write`: when the first text that is not empty is out."""
    done: list[bool] = []

    @wraps(function)
    def wrapped(text: str) -> None:
        function(text)
        if text and not done:
            done.append(True)
            tell(f"{'':8} {now():8.3f} {'':8}  the first text")

    return wrapped


def wrap(module: ModuleType, names: Sequence[str]) -> None:
    """Where they are defined, before anybody has imported them from there."""
    for name in filter(None, names):
        owner: Any = module
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        found = vars(owner)[last]
        how = first_text if name == "write" else lambda f, n=name: told(n, f)
        if isinstance(found, classmethod):
            setattr(owner, last, classmethod(how(found.__func__)))
        else:
            setattr(owner, last, how(found))


class Finder(importlib.abc.MetaPathFinder):
    """Has the loaders of STEPS' modules time themselves and wrap what they have defined."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in STEPS:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                break
        else:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with step(f"import {name}", "" not in STEPS[name]):
                load(module)
            wrap(module, STEPS[name])

        spec.loader.exec_module = exec_module
        return spec


def summary() -> None:
    often = {name: taken for name, taken in sums.items() if name in OFTEN}
    for name, (count, total) in often.items():
        tell(f"{'':8} {'':8} {total:8.3f}  {name}, {count} times")
    tell(f"{'':8} {now():8.3f} {'':8}  the end of Python")


def main() -> int:
    tell(f"{'began':>8} {'ended':>8} {'seconds':>8}")
    tell(f"{'':8} {now():8.3f} {'':8}  Python has started")
    atexit.register(summary)
    sys.meta_path.insert(0, Finder())
    with step("import kog_triton.generate"):
        from kog_triton.generate import main as generate
    return generate(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
