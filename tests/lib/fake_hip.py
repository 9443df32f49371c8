"""A libamdhip64 whose GPUs are the executor's: a launch runs the code object that was loaded, as gfx942 machine code.

The library is C, with the runtime's own prototypes, and lies where `ROCM_PATH` points: it is found, opened and called
as AMD's would be. Each of its functions calls one of FakeHip's. Launches run in threads, one after another; what a
kernel may touch are the tensors whose addresses its argument holds. Several GPUs are fake_hip_gpus.py's.
"""

import ctypes
import functools
import itertools
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends.cuda.layout.protocol import TENSORS
from kog_triton.backends.cuda.memory import Memory
from kog_triton.backends.cuda.stages import StageRunner
from kog_triton.backends.hip import selftest
from tests.lib.compiled import made_once, version_of
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import PLAIN, SYSTEM, Buffer, Kernel, Launch
from tests.lib.gfx942.hip_kernel import LEAST

# Parameters as hip_runtime_api.h declares them: handles are pointers.
PROTOTYPES = {
    "hipGetDeviceCount": "int* count",
    "hipGetDevice": "int* number",
    "hipSetDevice": "int number",
    "hipDeviceCanAccessPeer": "int* can, int number, int peer",
    "hipDeviceEnablePeerAccess": "int peer, unsigned flags",
    "hipExtMallocWithFlags": "void** p, unsigned long size, unsigned flags",
    "hipFree": "void* p",
    "hipModuleLoadData": "void** module, const void* image",
    "hipModuleGetFunction": "void** function, void* module, const char* name",
    "hipModuleUnload": "void* module",
    "hipFuncGetAttribute": "int* value, int attribute, void* function",
    "hipModuleLaunchCooperativeKernel": "void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, "
    "unsigned bz, unsigned shared, void* stream, void** arguments",
    "hipEventCreate": "void** event",
    "hipEventRecord": "void* event, void* stream",
    "hipEventQuery": "void* event",
    "hipEventSynchronize": "void* event",
    "hipEventDestroy": "void* event",
    "hipStreamQuery": "void* stream",
    "hipStreamSynchronize": "void* stream",
    "hipGetLastError": "",
}
ERRORS = {
    2: ("hipErrorOutOfMemory", "out of memory"),
    1: ("hipErrorInvalidValue", "invalid argument"),
    100: ("hipErrorNoDevice", "no ROCm-capable device is detected"),
    200: ("hipErrorInvalidImage", "device kernel image is invalid"),
    209: ("hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"),
    101: ("hipErrorInvalidDevice", "invalid device ordinal"),
    400: ("hipErrorInvalidHandle", "invalid resource handle"),
    600: ("hipErrorNotReady", "device not ready"),
    704: ("hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled"),
    719: ("hipErrorLaunchFailure", "unspecified launch failure"),
    999: ("hipErrorUnknown", "unknown error"),
    720: ("hipErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"),
}
NUMBERS = itertools.count(1)  # of all doubles: a handle that an earlier test destroys late is none of this test's
INVALID_IMAGE, NO_BINARY, NOT_READY, LAUNCH_FAILURE, UNKNOWN = 200, 209, 600, 719, 999
INVALID_DEVICE, INVALID_HANDLE = 101, 400
ELF = b"\x7fELF"


def _each(parameters: str) -> list[str]:
    return parameters.split(", ") if parameters else []


def _names(parameters: str) -> list[str]:
    return [one.replace("*", " ").split()[-1] for one in _each(parameters)]


def _ctype(parameter: str) -> Any:
    if "*" in parameter:
        return ctypes.c_void_p
    kinds = {"unsigned long": ctypes.c_ulong, "unsigned": ctypes.c_uint}
    return kinds.get(parameter.rpartition(" ")[0], ctypes.c_int)


def _source() -> str:
    text = "".join(
        f"static int (*on_{name})({parameters});\n"
        f"int {name}({parameters}) {{ return on_{name}({', '.join(_names(parameters))}); }}\n"
        f"void set_{name}(void* f) {{ on_{name} = f; }}\n"
        for name, parameters in PROTOTYPES.items()
    )
    for at, what in enumerate(("Name", "String")):
        cases = "".join(f'case {code}: return "{told[at]}";' for code, told in ERRORS.items())
        text += f"const char* hipGetError{what}(int e) {{ switch (e) {{ {cases} }} return 0; }}\n"
    return text


def library() -> Path:
    """The folder for ROCM_PATH."""

    def make(draft: Path) -> None:
        draft.mkdir()
        (draft / "lib").mkdir()
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", draft / "lib/libamdhip64.so"]
        subprocess.run(command, input=_source().encode(), check=True)

    return made_once([version_of("gcc"), _source().encode()], make)


def by_address(tensors: Iterable[tuple[str, torch.Tensor]]) -> "Known":
    return {t.data_ptr(): (name, t) for name, t in tensors if t.numel()}


decoded = functools.lru_cache(16)(Kernel)  # to decode a kernel takes seconds


# What the library calls. What an earlier test has left may be freed late: it finds the functions of a later one.
HELD: dict[str, Any] = {}
# By thread, the status that a call has left there until the thread asks hipGetLastError, as ROCm has it since 7: torch
# raises it behind its next launch. No test may leave one (conftest.py).
LAST_ERRORS: dict[int, int] = {}
Known = dict[int, tuple[str, torch.Tensor]]  # by address, with what it is called


class FakeHip:
    """One GPU. `failing` holds the status that a function answers from now on.

    launches  how many were begun; `meanwhile` is called in the thread of each before it runs
    seed      the executor's seed of launch n, from 1 on, is seed + n
    """

    gpus = 1
    elf_machine = 0x4C  # gfx942
    least: Mapping[str, int] = LEAST  # the scope that accesses must have, by the memory's name

    def __init__(self, seed: int = 0, **conditions: Any) -> None:
        self.failing: dict[str, int] = {}
        self.launches = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.broken, self.why = 0, ""  # the status of a launch that broke off, and why
        self._seed, self._conditions = seed, {"memory": PLAIN} | conditions
        self._modules: dict[int, CodeObject] = {}
        self._kernels: dict[int, Kernel] = {}
        self._queue: list[threading.Thread] = []
        self._events: dict[int, list[threading.Thread]] = {}
        self._known: Known = {}
        self._vectors: Known = {}  # of a stage alone
        self._thread = threading.local()
        self._loaded_on: dict[int, int] = {}  # the GPU of a module, of a function

    # ---- in the place of the library ----

    def install(self, monkeypatch: Any) -> None:
        folder = library()
        monkeypatch.setenv("ROCM_PATH", str(folder))
        loaded = ctypes.CDLL(str(folder / "lib/libamdhip64.so"))
        for name, parameters in PROTOTYPES.items():
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *map(_ctype, _each(parameters)))
            function = kind(self._answering(name))
            getattr(loaded, f"set_{name}")(function)
            HELD[name] = function  # behind it: what collects garbage here may call the earlier one
        pointers = Memory.pointers

        def noted(memory: Memory, *args: Any, **others: torch.Tensor) -> Any:
            self.know((name, others.get(name, getattr(memory, name))) for name in TENSORS)
            return pointers(memory, *args, **others)

        begin = StageRunner.__init__

        def begun(runner: StageRunner, *args: Any) -> None:
            begin(runner, *args)
            self._vectors = by_address({"x": runner.x, "out": runner.out}.items())

        lay = selftest.argument

        def laid(tensors: dict[str, torch.Tensor], *args: Any) -> Any:
            self.know(tensors.items())
            return lay(tensors, *args)

        selftest.check_gpu.cache_clear()
        monkeypatch.setattr(selftest, "argument", laid)
        monkeypatch.setattr(Memory, "pointers", noted)
        monkeypatch.setattr(StageRunner, "__init__", begun)

    def know(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Memory that the next launches may touch, by what it is called."""
        self._known = self._vectors | by_address(tensors)

    def forget(self) -> None:
        """Hold no memory of launches that have ended."""
        self._known, self._vectors = {}, {}

    def _answering(self, name: str) -> Callable[..., int]:
        def status_of(*arguments: Any) -> int:
            if name in self.failing:
                return self.failing[name]
            try:
                return getattr(self, name)(*arguments) or 0
            except Exception as error:  # of this double: none may pass for success
                self.why = f"{type(error).__name__}: {error}"
                return UNKNOWN

        def answer(*arguments: Any) -> int:
            status = status_of(*arguments)
            if status not in (0, NOT_READY) and name != "hipGetLastError":
                LAST_ERRORS[threading.get_ident()] = status
            return status

        return answer

    def _new(self, where: int) -> int:
        ctypes.c_void_p.from_address(where).value = number = next(NUMBERS)
        return number

    @property
    def gpu(self) -> int:
        """The calling thread's."""
        return getattr(self._thread, "gpu", 0)

    # ---- the runtime ----

    def hipGetLastError(self) -> int:
        return LAST_ERRORS.pop(threading.get_ident(), 0)

    def hipGetDevice(self, number: int) -> int:
        ctypes.c_int.from_address(number).value = self.gpu
        return 0

    def hipSetDevice(self, number: int) -> int:
        if number >= self.gpus:
            return INVALID_DEVICE
        self._thread.gpu = number
        return 0

    def hipGetDeviceCount(self, count: int) -> int:
        ctypes.c_int.from_address(count).value = self.gpus
        return 0 if self.gpus else 100

    def hipModuleLoadData(self, module: int, image: int) -> int:
        head = ctypes.string_at(image, 64)
        if head[:4] != ELF:
            return INVALID_IMAGE
        if int.from_bytes(head[48:52], "little") & 0xFF != self.elf_machine:
            return NO_BINARY
        sections = int.from_bytes(head[40:48], "little")
        size = sections + int.from_bytes(head[58:60], "little") * int.from_bytes(head[60:62], "little")
        number = self._new(module)
        self._modules[number] = CodeObject(ctypes.string_at(image, size))
        self._loaded_on[number] = self.gpu
        return 0

    def hipModuleGetFunction(self, function: int, module: int, name: int) -> int:
        kernel = decoded(self._modules[module], ctypes.string_at(name).decode())
        number = self._new(function)
        self._kernels[number], self._loaded_on[number] = kernel, self._loaded_on[module]
        return 0

    def hipModuleUnload(self, module: int) -> int:
        del self._modules[module]
        return 0

    def hipFuncGetAttribute(self, value: int, attribute: int, function: int) -> int:
        kernel = self._kernels[function]
        facts = {1: kernel.descriptor.lds, 3: kernel.descriptor.scratch}
        facts[4] = kernel.code_object.kernels[kernel.name][".vgpr_count"]
        ctypes.c_int.from_address(value).value = facts[attribute]
        return 0

    def hipModuleLaunchCooperativeKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int,
        stream: int | None, arguments: int,
    ) -> int:  # fmt: skip
        if self._loaded_on[function] != self.gpu:
            return INVALID_HANDLE
        kernel = self._kernels[function]
        (one,) = [arg for arg in kernel.args if not arg[".value_kind"].startswith("hidden")]
        where = ctypes.c_void_p.from_address(arguments).value
        argument = ctypes.string_at(where, one[".size"])
        return self._begin(kernel, Launch([argument], (gx, gy, gz), (bx, by, bz), self.gpu), shared)

    def _begin(self, kernel: Kernel, launch: Launch, shared: int) -> int:
        self._start(kernel, [launch], shared)
        return 0

    def _start(self, kernel: Kernel, launches: list[Launch], shared: int) -> None:
        """Launches that run side by side, behind all that was started before."""
        self.launches += 1
        known = dict(self._known)
        running = threading.Thread(
            target=self._run,
            args=(kernel, launches, known, shared, [*self._queue], self._seed + self.launches),
            daemon=True,
        )
        self._queue.append(running)
        running.start()

    def _run(
        self,
        kernel: Kernel,
        launches: list[Launch],
        known: Known,
        shared: int,
        before: list[threading.Thread],
        seed: int,
    ) -> None:
        for earlier in before:
            earlier.join()
        self.meanwhile()
        buffers = [Buffer(t, self.shared_with_others(name, t), self.least_scope(name, t)) for name, t in known.values()]
        try:
            kernel.run(launches, buffers, lds=shared, seed=seed, **self._conditions)
        except RuntimeError as error:  # an access that faults on hardware too
            self.broken, self.why = LAUNCH_FAILURE, str(error)

    def shared_with_others(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the host or another GPU sees the memory while a kernel runs."""
        return LEAST.get(name) == SYSTEM

    def least_scope(self, name: str, tensor: torch.Tensor) -> int:
        return self.least.get(name, 0)

    def hipEventCreate(self, event: int) -> int:
        self._events[self._new(event)] = []
        return 0

    def hipEventRecord(self, event: int, stream: int | None) -> int:
        self._events[event] = [*self._queue]
        return 0

    def hipEventQuery(self, event: int) -> int:
        if any(running.is_alive() for running in self._events[event]):
            return NOT_READY
        return self.broken

    def hipEventSynchronize(self, event: int) -> int:
        for running in self._events[event]:
            running.join()
        return self.broken

    def hipStreamQuery(self, stream: int | None) -> int:
        return NOT_READY if any(one.is_alive() for one in self._queue) else self.broken

    def hipStreamSynchronize(self, stream: int | None) -> int:
        for running in self._queue:
            running.join()
        return self.broken

    def hipEventDestroy(self, event: int) -> int:
        self._events.pop(event, None)  # of an earlier test, perhaps
        return 0
