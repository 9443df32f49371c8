"""Kernels that serve some requests faster, compiled beside those that run and do without them meanwhile."""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kog_triton.backends import compiler_threads

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)


class CompiledBeside(Generic[K]):
    """Each is compiled by a thread of its own, from when it is first wanted. If that fails, the log says so once.

    compile  puts a kernel where its launch finds it; any error says that it cannot
    name     of a kernel, for the log
    without  what requests do where it is not there, for the log
    inside   whether it is compiled inside this process, whose end has to wait for that then (compiler_threads.py)
    """

    def __init__(
        self,
        compile: Callable[[K], object],
        name: Callable[[K], str],
        without: str = "requests take turns",
        inside: bool = False,
    ) -> None:
        self._compile, self._name, self._without, self._inside = compile, name, without, inside
        self._threads: dict[K, threading.Thread] = {}
        self._failed: set[K] = set()

    def begin(self, key: K) -> None:
        """Unless it has begun."""
        if key in self._threads:
            return
        if self._inside:
            self._threads[key] = compiler_threads.start(self._run, (key,))
        else:
            self._threads[key] = threading.Thread(target=self._run, args=(key,), daemon=True)
            self._threads[key].start()

    def ready(self, key: K) -> bool:
        """Whether a launch finds it; begins it."""
        self.begin(key)
        return not self._threads[key].is_alive() and key not in self._failed

    def settle(self) -> None:
        """Wait for what compiles."""
        for thread in list(self._threads.values()):
            thread.join()

    def give_up(self, key: K, error: Exception) -> None:
        log.warning("no kernel of %s, %s: %s", self._name(key), self._without, error)
        self._failed.add(key)

    def _run(self, key: K) -> None:
        begun, name = time.perf_counter(), self._name(key)
        log.info("compiling the kernel of %s; until it is there, %s", name, self._without)
        try:
            self._compile(key)
        except Exception as error:
            self.give_up(key, error)
            return
        log.info("the kernel of %s took %.1f s", name, time.perf_counter() - begun)
