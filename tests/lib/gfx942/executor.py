"""Launches of a kernel on simulated gfx942 GPUs, in memory of this process."""

import copy
import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.lib.compiled import made_once, version_of
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import RECORD, decode

CPP = Path(__file__).parent / "cpp"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Werror",
)
XCDS = 8  # of an MI300X
PRELOAD_ENTRY = 256  # bytes of a prologue that a launch with preloaded arguments leaves out
MOST_STEPS = 200_000_000
HOST_EVERY = 100_000  # instructions, of all waves
FINISHED, UNFINISHED = 0, 1
AGENT, SYSTEM = 2, 3  # scopes: sc0 | sc1 << 1


class Fault(RuntimeError):
    """The machine did what no kernel may: an access to memory that is nobody's, an unknown modifier, no end."""


class NoEnd(Fault):
    """Waves that still run when the budget of instructions is spent: each with where it stands."""


@dataclass(frozen=True)
class Memory:
    """How memory behaves. Plain, or adversarial with chances: see struct Options in cpp/machine.h."""

    adversarial: bool = False
    early: float = 0.3
    evict: float = 0.02
    hold: float = 0.0005
    quantum: int = 200
    trace: bool = False


PLAIN = Memory()
WEAK = Memory(adversarial=True)


@dataclass
class Buffer:
    """Bytes that a kernel may touch; `shared` with the host or another GPU while it runs.

    An access whose scope is narrower than `least` is a fault; of `pairs`, words of 8 bytes of which a reader looks at
    the first, so is a store to it that lands ahead of the second's.
    """

    array: Any  # of numpy or torch, contiguous
    shared: bool = False
    least: int = 0
    pairs: bool = False

    @property
    def address(self) -> int:
        return self.array.data_ptr() if hasattr(self.array, "data_ptr") else self.array.ctypes.data


@dataclass
class Launch:
    """One grid on one GPU. Arguments in the kernel's order: integers, floats, addresses, structures as bytes."""

    args: Sequence[int | float | bytes]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    gpu: int = 0


@dataclass
class Execution:
    steps: int  # instructions, of all waves
    executed: np.ndarray = field(repr=False)  # how often each instruction ran
    awaited: np.ndarray = field(repr=False)  # how often each wait found something in flight
    # by each vector load, store and atomic: a bit for each of the buffers
    touched: np.ndarray = field(repr=False)
    # [n, 2] at each wait, at most, in adversarial memory: of vmcnt, of lgkmcnt
    in_flight: np.ndarray = field(repr=False)
    # [n, 5] with Memory.trace, in order: of a wait for vmcnt workgroup, wave, instruction, loads of 16 bytes a lane in
    # flight ahead and behind; of a barrier one more behind
    passed: np.ndarray = field(repr=False)


@functools.cache
def library() -> ctypes.CDLL:
    def make(draft: Path) -> None:
        import subprocess

        subprocess.run(["g++", *FLAGS, str(CPP / "executor.cpp"), "-o", str(draft)], check=True)

    sources = [path.read_bytes() for path in sorted(CPP.iterdir())]
    built = ctypes.CDLL(str(made_once([version_of("g++"), " ".join(FLAGS).encode(), *sources], make)))
    for name, result in (("operation", ctypes.c_char_p), ("machine", ctypes.c_void_p), ("error", ctypes.c_char_p)):
        getattr(built, f"gfx_{name}").restype = result
    built.gfx_steps.restype = built.gfx_passed_bytes.restype = ctypes.c_uint64
    for name in ("executed", "awaited", "touched", "in_flight", "passed"):
        getattr(built, f"gfx_{name}").restype = ctypes.c_void_p
    assert built.gfx_inst_bytes() == RECORD.itemsize
    return built


@functools.cache
def operations() -> dict[str, int]:
    """Every mnemonic that the executor knows, and its number."""
    names: dict[str, int] = {}
    while (name := library().gfx_operation(len(names))) is not None:
        assert name.decode() not in names, f"{name.decode()} is there twice"
        names[name.decode()] = len(names)
    return names


class _Options(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_uint64)] + [
        (name, ctypes.c_int32) for name in ("adversarial", "early", "evict", "hold", "quantum", "trace")
    ]


def round_robin(group: int) -> int:
    return group % XCDS


@dataclass
class Kernel:
    """A kernel of a code object, decoded; `records` may be changed before it runs (mutants.py)."""

    code_object: CodeObject
    name: str

    def __post_init__(self) -> None:
        self.descriptor = self.code_object.descriptor(self.name)
        if self.descriptor.scratch:
            raise ValueError(
                f"kernel {self.name} needs {self.descriptor.scratch} bytes of scratch a lane: not modelled"
            )
        self.address, code = self.code_object.code(self.name)
        self.records = decode(code, operations())
        self.args = self.code_object.kernels[self.name][".args"]

    def mnemonics(self) -> list[str]:
        """Of every instruction, in order."""
        names = list(operations())
        return [names[op] for op in self.records["op"]]

    def copy(self) -> "Kernel":
        """One whose instructions may be replaced."""
        other = copy.copy(self)
        other.records = self.records.copy()
        return other

    def replace(self, index: Any, name: str, **fields: Any) -> None:
        """Another operation in place of instruction `index`, or of several, and other values of their fields."""
        self.records["op"][index] = operations()[name]
        for field_name, value in fields.items():
            self.records[field_name][index] = value

    def run(
        self,
        launches: Launch | Sequence[Launch],
        buffers: Sequence[Buffer],
        memory: Memory = PLAIN,
        seed: int = 0,
        lds: int = 0,
        xcc: Callable[[int], int] = round_robin,
        steps: int = MOST_STEPS,
        host: Callable[[], None] | None = None,
    ) -> Execution:
        """Run all launches at once to their end, and call `host` all the time.

        lds    bytes of LDS that a launch gives a workgroup beyond the kernel's own
        xcc    the XCD of a workgroup by its index in the grid
        steps  instructions, of all waves, after which NoEnd is raised
        """
        if isinstance(launches, Launch):
            launches = [launches]
        kernargs = [self._kernarg(launch) for launch in launches]
        image = np.frombuffer(self.code_object.image, np.uint8)
        held = [*buffers, *map(Buffer, kernargs), Buffer(image)]
        ranges = np.array(
            [(b.address, b.address + b.array.nbytes, b.shared, b.least, b.pairs) for b in held],
            np.dtype("u8, u8, i4, i4, i4", align=True),
        )
        chances = (int(65536 * p) for p in (memory.early, memory.evict, memory.hold))
        options = _Options(seed, memory.adversarial, *chances, memory.quantum, memory.trace)
        lib = library()
        machine = ctypes.c_void_p(
            lib.gfx_machine(
                ctypes.c_void_p(self.records.ctypes.data),
                len(self.records),
                ctypes.byref(options),
                ctypes.c_void_p(ranges.ctypes.data),
                len(ranges),
            )
        )
        try:
            lib.gfx_reserve(machine, sum(int(np.prod(launch.grid)) for launch in launches))
            lib.gfx_code_at(machine, ctypes.c_uint64(image.ctypes.data + self.address))
            for launch, kernarg in zip(launches, kernargs, strict=True):
                self._start(machine, launch, kernarg, lds, xcc)
            ended = UNFINISHED
            while ended == UNFINISHED and lib.gfx_steps(machine) < steps:
                ended = lib.gfx_run(machine, ctypes.c_uint64(steps if host is None else HOST_EVERY))
                if host is not None:
                    host()
            if ended != FINISHED:
                raise (NoEnd if ended == UNFINISHED else Fault)(lib.gfx_error(machine).decode())
            passed = ctypes.string_at(lib.gfx_passed(machine), lib.gfx_passed_bytes(machine))
            return Execution(
                lib.gfx_steps(machine),
                *(self._counts(f(machine)) for f in (lib.gfx_executed, lib.gfx_awaited, lib.gfx_touched)),
                self._counts(lib.gfx_in_flight(machine), ctypes.c_uint32, 2).reshape(-1, 2),
                np.frombuffer(passed, np.uint32).reshape(-1, 5),
            )
        finally:
            lib.gfx_free(machine)

    def _counts(self, address: int, kind: type = ctypes.c_uint64, each: int = 1) -> np.ndarray:
        counts = ctypes.cast(address, ctypes.POINTER(kind))
        return np.ctypeslib.as_array(counts, (each * len(self.records),)).copy()

    def _start(self, machine: Any, launch: Launch, kernarg: np.ndarray, lds: int, xcc: Callable[[int], int]) -> None:
        d = self.descriptor
        count, first = d.preloaded
        entry = d.entry + (PRELOAD_ENTRY if count else 0)
        (index,) = np.flatnonzero(self.records["at"] == entry - self.address)
        user: list[int] = []
        if d.has_dispatch:
            raise ValueError(f"kernel {self.name} reads the dispatch packet: not modelled")
        if d.has_kernarg:
            user += struct.unpack("<II", struct.pack("<Q", kernarg.ctypes.data))
        user += kernarg.view(np.uint32)[first : first + count].tolist()
        user += [0] * (d.user_sgprs - len(user))
        if np.prod(launch.block) > 1024:
            raise ValueError(f"kernel {self.name} has up to 1,024 threads: {launch.block}")
        block = (ctypes.c_int32 * 3)(*launch.block)
        gx, gy, gz = launch.grid
        for group in range(gx * gy * gz):
            ids = (group % gx, group // gx % gy, group // gx // gy)
            sgprs = user + [i for i, wanted in zip(ids, d.group_ids, strict=True) if wanted]
            values = (ctypes.c_uint32 * len(sgprs))(*sgprs)
            xcd = launch.gpu * XCDS + xcc(group)
            lib_args = (launch.gpu, xcd, block, d.lds + lds, int(index), values, len(sgprs))
            library().gfx_workgroup(machine, *lib_args)

    def _kernarg(self, launch: Launch) -> np.ndarray:
        size = self.code_object.kernels[self.name][".kernarg_segment_size"]
        raw = bytearray(-(-max(size, 64) // 64) * 64)
        given = iter(launch.args)
        for arg in self.args:
            at, bytes_of, kind = arg[".offset"], arg[".size"], arg[".value_kind"]
            if kind in ("global_buffer", "by_value"):
                value = next(given)
                if isinstance(value, bytes):
                    packed = value
                elif isinstance(value, float):
                    packed = struct.pack("<f", value)
                else:
                    packed = value.to_bytes(8, "little", signed=value < 0)
            elif kind.startswith("hidden_block_count_"):
                packed = launch.grid["xyz".index(kind[-1])].to_bytes(4, "little")
            elif kind.startswith("hidden_group_size_"):
                packed = launch.block["xyz".index(kind[-1])].to_bytes(4, "little")
            else:
                packed = bytes(bytes_of)  # what no kernel here reads
            raw[at : at + bytes_of] = packed[:bytes_of]
        assert next(given, None) is None, f"kernel {self.name} has fewer arguments than were given"
        return np.frombuffer(bytes(raw), np.uint8).copy()
