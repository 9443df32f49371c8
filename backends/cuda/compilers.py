"""Compilers beside this process: each compiles one kernel in a process of its own (compile_child.py), as many at a time
as there are cores, in the order in which they were asked for. None of them outlives this process."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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
            del (future, work)  # or the last one's, and all that it holds, would wait here for the next


# With cores enough for a first start's early kernels (early.py) one is left to Python, which loads meanwhile.
CORES = len(os.sched_getaffinity(0))
PROCESSES = Background(CORES if CORES < 6 else CORES - 1)

# The compilers' memory lies in huge pages, and malloc keeps what they give back: in a virtual machine that took a tenth
# off their seconds (benchmarks/cuda-log.md#early). C libraries other than glibc take no notice of the variable.
MALLOC = (
    "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864"
    ":glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=4294967296"
)


class _Server:
    """The process that forks compilers: it is there while anybody compiles."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._jobs: socket.socket
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def job(self, said: IO[bytes]) -> Iterator[socket.socket]:
        """The socket of a new fork, whose stderr is `said`."""
        ours, theirs = socket.socketpair()
        with ours:
            with self._lock, theirs:
                if self._process is None or self._process.poll() is not None:
                    self._begin()
                socket.send_fds(self._jobs, [b"j"], [theirs.fileno(), said.fileno()])
                self._users += 1
            try:
                yield ours
            finally:
                with self._lock:
                    self._users -= 1
                    if not self._users:
                        self._end()

    def _begin(self) -> None:
        self._jobs, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(compile_child.__file__).resolve())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={"GLIBC_TUNABLES": MALLOC} | os.environ,
                start_new_session=True,  # the terminal's Ctrl-C is for this process alone
            )

    def _end(self) -> None:
        assert self._process is not None
        with suppress(OSError):  # the process may be gone
            self._jobs.shutdown(socket.SHUT_RDWR)  # also where a fork of this process has it, too
        self._jobs.close()
        self._process.wait()
        self._process = None


_server = _Server()


def compile_apart(text: str, source: str, flags: Sequence[str], compiler: str) -> bytes:
    """A source's cubin, by a process of its own, which does not outlive this one. DeviceError with the compiler's words
    if it refuses, or if that process ends otherwise."""
    job = {"source": source, "flags": flags, "compiler": compiler}
    with tempfile.TemporaryFile() as said:
        how, what = b"", b""
        with suppress(ConnectionError), _server.job(said) as fork:  # or the server is gone
            fork.sendall(json.dumps(job).encode() + b"\n" + text.encode())
            fork.shutdown(socket.SHUT_WR)
            with fork.makefile("rb") as told:
                how, what = told.read(1), told.read()
        if how == compile_child.COMPILED:
            return what
        if how == compile_child.REFUSED:
            raise DeviceError(what.decode(errors="replace").strip())
        said.seek(0)
        words = said.read().decode(errors="replace").strip()[-500:]
    raise DeviceError(f"the compiler of {source} was killed or broke off: {words}")
