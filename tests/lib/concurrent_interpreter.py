"""Triton's interpreter, with all programs of a grid running at once: spin waits end, races show.

    with concurrent(seed=3, memory="stale"):
        kernel[(6,)](...)

Triton's own interpreter runs programs one after another, so a program that waits for another waits for
ever. Here each is a greenlet that pauses before every load, store and atomic, and a seeded scheduler says
who goes on: the same seed gives the same run. Now and then it holds one program back until the others
can do nothing without it, which is how a buffer that is reused too early comes to light.

    memory="sc"       every access is memory's own, in one order
    memory="stale"    each program has a cache of its own (stale_memory.py)

TRITON_INTERPRET must be set before triton is first imported (conftest.py). Triton 3.6.0 needs numpy < 2.4.
"""

import contextlib
import functools
import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import triton.language as tl
from greenlet import getcurrent, greenlet
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from kog_triton.backends.triton.kernel.words import CLOCK_EVERY
from tests.lib.stale_memory import Cache, lines_of

EVICTION = 0.02  # chance that an access evicts a line
HOLD = 0.02  # chance, at each step, that a program is held back
STILL = 10  # steps a live program, without a change of memory, after which the held one goes on
# Such steps after which nothing will ever change: a wait of up to 20 loads a try may still give up at its next look at
# the clock.
PATIENCE = 20 * CLOCK_EVERY.value


class Deadlock(RuntimeError):
    """Every program that is left waits for something that no program will write."""


class Machine:
    """The grid of one launch after another, under one seeded scheduler.

    `host` is called at every step, as a host that watches mapped memory; program `stalled` runs only
    when no other is left.
    """

    def __init__(self, seed: int, memory: str, host: Callable[[], None] | None, stalled: int | None) -> None:
        if memory not in ("sc", "stale"):
            raise ValueError(f"memory {memory!r}: sc or stale")
        self.stale, self.host, self.stalled = memory == "stale", host, stalled
        self.rng = random.Random(seed)
        self.steps = 0
        self.still = 0  # steps since memory last changed
        self.running: greenlet | None = None
        self.caches: dict[greenlet, Cache] = {}

    def run(self, fn: Callable[..., None], args: dict[str, Any], grid: tuple[int, ...]) -> None:
        """Run every program of the grid to its end; Deadlock names where each one stands."""
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        self.main, self.still, held = getcurrent(), 0, None
        indices = list(itertools.product(*map(range, grid)))
        programs = {greenlet(lambda: fn(**args)): index for index in indices}
        self.caches = {program: Cache(self.rng, EVICTION) for program in programs}
        live, late = list(programs), []
        if self.stalled is not None:
            late = [live.pop(self.stalled)]
        try:
            while live or late:
                if not live:
                    live, late = late, live
                if held not in live or self.still > STILL * len(live):
                    held = self.rng.choice(live) if self.rng.random() < HOLD else None
                ready = [p for p in live if p is not held] or live
                self.running = self.rng.choice(ready)
                builder.grid_idx = programs[self.running]
                self.running.switch()
                self.steps += 1
                self.still += 1
                if self.running.dead:
                    live.remove(self.running)
                    self.caches[self.running].release()  # so does the end of a kernel
                    self.still = 0
                if self.host is not None:
                    self.host()
                if self.still > PATIENCE * max(1, len(live)):
                    where = [f"{programs[p]} at {_position(p.gr_frame)}" for p in live]
                    raise Deadlock(f"memory stands still: {', '.join(where)}")
        finally:
            self.running = None
            for program in programs:
                if not program.dead:
                    with contextlib.suppress(BaseException):
                        program.throw(SystemExit)

    def pause(self) -> None:
        """Let the scheduler choose; the program's next access follows at once."""
        if self.running is not None:
            self.main.switch()
            self.cache.accesses += 1

    @property
    def cache(self) -> Cache:
        assert self.running is not None
        return self.caches[self.running]

    def ask_memory(self, addresses: np.ndarray) -> bool:
        """Before a load past the cache: whether it has to go there all the same, for what the program stored itself."""
        numbers = lines_of(addresses)
        for program, cache in self.caches.items():
            if program is not self.running and cache.land(numbers):
                self.still = 0
        return self.cache.refresh(numbers)


def _position(frame: FrameType | None) -> str:
    """The innermost line of the kernel's source on a program's stack."""
    while frame is not None:
        path = frame.f_code.co_filename
        if "site-packages" not in path and path != __file__:
            return f"{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return "its start"


# ---- memory operations, in place of those of Triton's InterpreterBuilder ----

_machine: Machine | None = None
_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_load, _store = _Builder.create_masked_load, _Builder.create_masked_store
_rmw, _cas = _Builder.create_atomic_rmw, _Builder.create_atomic_cas


def _spread(x: Any, like: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x.data, like.shape)


def _masked_load(self: Any, ptrs: Any, mask: Any, other: Any, cache_modifier: Any, *rest: Any) -> Any:
    machine = _machine
    assert machine is not None
    machine.pause()
    valid = _spread(mask, ptrs.data).astype(bool)
    addresses = ptrs.data[valid].astype(np.int64)
    fresh = cache_modifier == ir.CACHE_MODIFIER.CV
    if not machine.stale or (fresh and not machine.ask_memory(addresses)):
        return _load(self, ptrs, mask, other, cache_modifier, *rest)
    element = ptrs.get_element_ty()
    dtype = np.dtype(interpreter._get_np_dtype(element))
    out = np.zeros(valid.shape, dtype)
    if other is not None:
        out[...] = _spread(other, ptrs.data)
    if addresses.size:
        out[valid] = machine.cache.load(addresses, dtype.itemsize, not fresh).view(dtype)[:, 0]
    return _Handle(out, element)


def _masked_store(self: Any, ptrs: Any, value: Any, mask: Any, cache_modifier: Any, *rest: Any) -> Any:
    machine = _machine
    assert machine is not None
    machine.pause()
    machine.still = 0
    if not machine.stale:
        return _store(self, ptrs, value, mask, cache_modifier, *rest)
    valid = _spread(mask, ptrs.data).astype(bool)
    addresses = ptrs.data[valid].astype(np.int64)
    dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
    values = np.ascontiguousarray(_spread(value, ptrs.data)[valid].astype(dtype))
    if addresses.size:
        through = cache_modifier == ir.CACHE_MODIFIER.WT
        machine.cache.store(addresses, values.view(np.uint8).reshape(addresses.size, -1), through)
    return None


def _store_all(self: Any, ptrs: Any, value: Any, *modifiers: Any) -> Any:
    """Without a mask; Triton's own forgets the cache modifier."""
    everywhere = _Handle(np.ones_like(ptrs.data, dtype=bool), tl.int1)
    return self.create_masked_store(ptrs, value, everywhere, *modifiers)


def _atomic(self: Any, operation: Callable[..., Any], ptr: Any, *args: Any) -> Any:
    """`args` end in semantics and scope; a block's scope orders nothing between blocks."""
    machine = _machine
    assert machine is not None
    *_, semantic, scope = args
    machine.pause()
    orders = scope != ir.MEM_SYNC_SCOPE.CTA
    if orders and semantic in _RELEASES:
        machine.cache.release()
    machine.cache.bypass(lines_of(ptr.data.astype(np.int64)))
    result = operation(self, ptr, *args)
    machine.still = 0
    if orders and semantic in _ACQUIRES:
        machine.cache.acquire()
    return result


def _atomic_rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    def add(builder: Any, ptr: Any, *args: Any) -> Any:
        return _rmw(builder, op, ptr, *args)

    return _atomic(self, add, ptr, value, mask, sem, scope)


def _atomic_cas(self: Any, ptr: Any, expected: Any, value: Any, sem: Any, scope: Any) -> Any:
    return _atomic(self, _cas, ptr, expected, value, sem, scope)


# ---- launches, in place of those of Triton's GridExecutor ----


class _WholeGrid:
    """Stands for the kernel: the executor calls it once, and it runs every program."""

    def __init__(self, fn: Callable[..., None], grid: Any) -> None:
        self.fn, self.grid = fn, grid
        self.__globals__, self.__name__ = fn.__globals__, fn.__name__
        self.__signature__, self.__annotations__ = inspect.signature(fn), fn.__annotations__

    def __call__(self, **args: Any) -> None:
        assert _machine is not None
        grid = self.grid(args) if callable(self.grid) else self.grid
        _machine.run(self.fn, args, tuple(grid) + (1,) * (3 - len(grid)))


_launch = interpreter.GridExecutor.__call__
_patch_language = interpreter._patch_lang


def _launch_whole(self: Any, *args: Any, **kwargs: Any) -> None:
    fn, grid = self.fn, self.grid
    self.fn, self.grid = _WholeGrid(fn, grid), (1,)
    try:
        with _language_patched_once():
            _launch(self, *args, **kwargs)
    finally:
        self.fn, self.grid = fn, grid


@contextlib.contextmanager
def _language_patched_once() -> Iterator[None]:
    """Triton patches its language again at each call of a device function; once a launch is enough."""
    scopes: list[Any] = []
    done: set[int] = set()
    seen: set[Any] = set()
    nothing = interpreter._LangPatchScope()  # for the caller to restore

    def patch(fn: Any) -> Any:
        if fn not in seen:
            seen.add(fn)
            modules = {id(v) for v in fn.__globals__.values() if v is tl or v is tl.core}
            if not modules <= done:
                done.update(modules)
                scopes.append(_patch_language(fn))
        return nothing

    interpreter._patch_lang = patch
    try:
        yield
    finally:
        interpreter._patch_lang = _patch_language
        for scope in reversed(scopes):
            scope.restore()


# ---- what Triton's interpreter finds out again for every value, remembered ----

_numpy_type_of_scalar = functools.cache(interpreter._get_np_dtype)
_type_of_tuple = tl.core._type_for_tuple_values
_type_of_shape = functools.cache(_type_of_tuple)


_make_block_type = tl.block_type.__init__
_block_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}


def _init_block_type(self: Any, element: Any, shape: Any) -> None:
    sizes = tuple([v.value if type(v) is tl.constexpr else v for v in shape])
    known = _block_types.get((element.name, sizes))
    if known is None or known["element_ty"] is not element:
        _make_block_type(self, element, shape)
        self.sizes = _sizes(*sizes)
        _block_types[element.name, sizes] = vars(self).copy()
    else:
        vars(self).update(known)


def _numpy_type(triton_type: Any) -> np.dtype:
    scalar = triton_type.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_type_of_scalar(scalar)


def _tuple_type(values: Any, fields: Any = None) -> Any:
    sizes = tuple([v.value if type(v) is tl.constexpr else v for v in values])
    if fields is None and all(type(size) is int for size in sizes):
        return _type_of_shape(sizes)
    return _type_of_tuple(values, fields)


@functools.cache
def _sizes(*shape: int) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.sizes if type.is_block() else _sizes()


_check_types = TritonSemantic.binary_op_type_checking_impl
_constants: dict[Any, Any] = {}


def _binary_operands(self: Any, lhs: Any, rhs: Any, *rest: Any, **how: Any) -> Any:
    """A number beside a tensor becomes the same constant each time; two tensors of a type are what they are."""
    if type(lhs) is tl.tensor:
        if type(rhs) is tl.tensor:
            alike = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape
            division = how or len(rest) == 4
            if alike and not division and not lhs.dtype.is_ptr():
                return lhs, rhs
        elif type(rhs) in (int, float):
            key = (lhs.dtype.name, id(lhs.shape), type(rhs), rhs, rest, *how.items())
            if key in _constants:
                return lhs, _constants[key][0]
            mine, constant = _check_types(self, lhs, rhs, *rest, **how)
            if mine is lhs:
                _constants[key] = constant, lhs.shape  # whose id is then nobody else's
            return mine, constant
    return _check_types(self, lhs, rhs, *rest, **how)


def _patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As Triton's own, without the two functions around each."""
    semantic = interpreter.interpreter_semantic
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


@contextlib.contextmanager
def concurrent(
    seed: int = 0, memory: str = "sc", host: Callable[[], None] | None = None, stalled: int | None = None
) -> Iterator[Machine]:
    """Inside, launches run concurrently on the machine that is given."""
    global _machine
    changes: dict[tuple[Any, str], Any] = {
        (_Builder, "create_masked_load"): _masked_load,
        (_Builder, "create_masked_store"): _masked_store,
        (_Builder, "create_store"): _store_all,
        (_Builder, "create_atomic_rmw"): _atomic_rmw,
        (_Builder, "create_atomic_cas"): _atomic_cas,
        (interpreter.GridExecutor, "__call__"): _launch_whole,
        (interpreter, "_get_np_dtype"): _numpy_type,
        (tl.core, "_type_for_tuple_values"): _tuple_type,
        (tl.block_type, "__init__"): _init_block_type,
        (tl.tensor, "__init__"): _init_tensor,
        (TritonSemantic, "binary_op_type_checking_impl"): _binary_operands,
        (interpreter, "_patch_attr"): _patch_builtin,
    }
    # Overflow checks, on by default, triple the work of integer arithmetic.
    builder = interpreter.interpreter_builder
    changes[builder, "options"] = replace(builder.options, sanitize_overflow=False)
    before = {(owner, name): getattr(owner, name) for owner, name in changes}
    _machine = Machine(seed, memory, host, stalled)
    try:
        for (owner, name), value in changes.items():
            setattr(owner, name, value)
        yield _machine
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
        _machine = None
