"""Compilers beside this process: each compiles one kernel in a process of its own (compile_child.py), as many at a time
as the machine has cores for, in the order in which they were asked for. None of them outlives this process."""

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kog_triton.backends.cuda import compile_child
from kog_triton.errors import DeviceError


class Background:
    """Runs what it is given in threads that do not keep the process, at most `most` at a time, first come, first
    served."""

    def __init__(self, most: int) -> None:
        self._most, self._running = most, 0
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, lambda: work(*arguments)))
            if self._running < self._most:
                self._running += 1
                threading.Thread(target=self._work, name="kog-compiler", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, work = self._waiting.popleft()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del (
                future,
                work,
            )  # or the last one's, and all that it holds, would wait here for the next


LEAST_CORES = 6  # of a first start with early kernels (early.py): Python's, those two, the same whole, and a longer one


def compilers_at_once(cpus: Sequence[int]) -> int:
    """How many compile at a time on these, by their numbers: all but one, which is left to Python, that loads
    meanwhile; where two are hyperthreads of a core, five for four cores. Fifteen on sixteen hyperthreads took 1.6
    times as long each as one alone, and the first token waits for the longest (benchmarks/cuda-log.md#early)."""
    if len(cpus) < LEAST_CORES:
        return len(cpus)
    cores = len({_siblings(cpu) for cpu in cpus})
    return min(len(cpus), 5 * cores // 4 + 1) - 1


def _siblings(cpu: int) -> str:
    """The hyperthreads of a CPU's core; itself where the system does not say."""
    try:
        place = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        return Path(place).read_text()
    except OSError:
        return str(cpu)


PROCESSES = Background(compilers_at_once(sorted(os.sched_getaffinity(0))))


def compile_apart(text: str, source: str, flags: Sequence[str], compiler: str) -> bytes:
    """A source's cubin, by a process of its own. DeviceError with the compiler's words if it refuses, or if the process
    ends otherwise.

    The kernel kills that process with the thread that calls this.
    """
    job = {"source": source, "flags": flags, "compiler": compiler, "parent": os.getpid()}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(compile_child.__file__).resolve())],
        input=json.dumps(job).encode() + b"\n" + text.encode(),
        capture_output=True,
        start_new_session=True,  # the terminal's Ctrl-C is for this process alone
    )
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == compile_child.REFUSED:
        raise DeviceError(said)
    raise DeviceError(f"the compiler of {source} ended with {done.returncode}: {said[-500:]}")
