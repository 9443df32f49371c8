"""What a stranger wrote runs in a process of its own, under the operating system's limits: templates, grammars.

jinja2's immutable sandbox keeps a template from Python's internals and from changing its data, and llguidance bounds
most of what a grammar costs. What they cannot keep is time, memory and the stack. The kernel can, whatever is asked
for: see limited_process.py.
"""

import atexit
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from signal import SIGALRM
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH")  # the clock's zone; where a Python may have its library


class LimitedProcess:
    """Has requests answered by `answer` of a file in one process, one after the other; safe to share between threads.

    seconds    that one request may take
    memory     bytes of address space of the process; `stack`: of its stack
    max_chars  of a reply

    A request beyond a limit ends the process, and the next request starts another.
    """

    def __init__(self, file: str, seconds: float, memory: int, max_chars: int, stack: int = 8 << 20) -> None:
        self._file = HERE / file
        self._limits = seconds, memory, stack, max_chars
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def start(self) -> None:
        """Start the process unless it runs; it takes 80 ms, in which the caller goes on."""
        with self._lock, contextlib.suppress(OSError):  # which the first request tells
            self._channel()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply, or {"error": ..., "invalid": False} where there is none, with why.

        The request is of JSON types; ValueError for an integer of thousands of digits, OSError where
        no process can be started.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                reply = _exchange(self._channel(), line, self._limits[-1])
            except BaseException:  # the reply to come would be taken for the next request's
                self.close()
                raise
            return json.loads(reply) if reply.endswith(b"\n") else self._ended()

    def close(self) -> None:
        """End the process; a request that waits for it fails, the next one starts another."""
        running, self._running = self._running, None
        if running:
            running[0].kill()
            running[0].wait()
            running[1].close()

    def forget(self) -> None:
        """In a forked process: the parent's process is not this one's to use."""
        running, self._running, self._lock = self._running, None, threading.Lock()
        if running:
            running[0].returncode = 0  # nor to wait for
            os.close(running[1].detach())  # a thread that the fork left behind may still read it

    def _channel(self) -> socket.socket:
        running = self._running
        if running and running[0].poll() is None:
            return running[1]
        self.close()
        channel, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-IS", str(HERE / "limited_process.py")),
                    *map(str, (*self._limits, self._file, *sys.path)),
                ],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C is the caller's
            )
        self._running = process, channel
        return channel

    def _ended(self) -> dict[str, Any]:
        """The reply where the process ended, with what it ended of."""
        running, (seconds, memory, *_) = self._running, self._limits
        self.close()
        status = running[0].returncode if running else None
        reasons: dict[int | None, str] = {
            -SIGALRM: f" took more than {seconds:g} s",
            errno.ENOMEM: f" needs more than {memory >> 20} MiB of memory",
        }
        error = reasons.get(status, f" ended its process with status {status}")
        return {"error": error, "invalid": False}


class Renderer(LimitedProcess):
    """Renders chat templates. Of its address space 25 MiB are Python's and jinja2's."""

    def __init__(self, seconds: float = 5.0, memory: int = 512 << 20, max_chars: int = 16 << 20) -> None:
        super().__init__("render_template.py", seconds, memory, max_chars)

    def render(self, source: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """{"text": ...}, or {"error": ..., "invalid": whether the template is no template}."""
        return self.ask({"source": source, "values": values})


class GrammarChecker(LimitedProcess):
    """Tries grammars before an engine compiles them. Its stack is half of what an engine's thread has."""

    def __init__(self, seconds: float = 3.0, memory: int = 1 << 30) -> None:
        super().__init__("check_grammar.py", seconds, memory, 1000, 4 << 20)

    def check(self, grammar: str) -> str:
        """What is wrong with a grammar in llguidance's own form; empty if nothing is."""
        return str(self.ask({"grammar": grammar}).get("error", ""))


def _exchange(channel: socket.socket, line: bytes, max_chars: int) -> bytes:
    """The reply to a line, whole if it ends with a line break: not if the process ended."""
    try:
        # the caller may let broken pipes end its process
        channel.sendall(line, getattr(socket, "MSG_NOSIGNAL", 0))
        with channel.makefile("rb") as file:
            # a character is at most twelve bytes of JSON; 2000 hold an error
            return file.readline(12 * max_chars + 2000)
    except ConnectionError:
        return b""


RENDERER, CHECKER = Renderer(), GrammarChecker()  # of all models in this process; they end with it
for _process in (RENDERER, CHECKER):
    atexit.register(_process.close)
    os.register_at_fork(after_in_child=_process.forget)
