"""The engine process: `python -m kog_triton.server.child FD` serves one LLM over the inherited socket FD.

It ends with the server: by the kernel's signal where there is one, and when the socket ends.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from kog_triton.backends.compile_log import compiling
from kog_triton.backends.mailbox import Failure, Step
from kog_triton.claim import WAITS, Claim
from kog_triton.errors import is_failure, run_error
from kog_triton.server import wire
from kog_triton.server.outbox import Outbox

if TYPE_CHECKING:
    from kog_triton.llm import LLM

# Calls of the backend in a row that raised: no request of a GPU whose context is lost ends well in this process.
MOST_FAILURES = 2
BEAT_S = 0.25  # between heartbeats, the server's watchdog counts several of them
PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 16
SCORES = 256  # tokens of a message: one of 8,000 takes the server 0.2 s, in which streams wait


class Served:
    """One request: whichever thread brings its news sends them on."""

    def __init__(self, number: int, claim: Claim, outbox: Outbox) -> None:
        self.claim = claim
        self._number, self._outbox = number, outbox
        self._began = self._news = False
        self._sending = threading.Lock()
        claim.listen(self._tell)

    def _tell(self) -> None:
        """Send what there is, in order. Who finds another thread at it leaves the rest to that one and never waits."""
        self._news = True
        while self._news and self._sending.acquire(blocking=False):
            try:
                self._news = False
                self._send()
            finally:
                self._sending.release()

    def _send(self) -> None:
        read = self.claim.read(0)  # before its slot is asked for: who has made steps has one
        request, number = self.claim.request, self._number
        words: list[wire.FromEngine] = []
        if not self._began and request.slot != WAITS:
            self._began = True
            assert self.claim.queue_s is not None, "a claim with a slot was admitted"
            words.append(wire.Began(number, request.slot, request.cached, self.claim.queue_s))
        if read and request.prompt_logprobs is not None and (told := self.claim.read_prompt()):
            for at in range(0, len(told), SCORES):
                words.append(wire.Scores(number, told[at : at + SCORES]))
        if steps := [step for step in read if isinstance(step, Step)]:
            words.append(wire.Steps(number, steps))
        words += [wire.ended(number, step.error) for step in read if isinstance(step, Failure)]
        if words:
            self._outbox.send(b"".join(map(wire.frame, words)))


class EngineServer:
    """Does what the server's messages say."""

    def __init__(self, llm: "LLM", outbox: Outbox) -> None:
        self._llm, self._outbox = llm, outbox
        self._served: dict[int, Served] = {}
        threading.Thread(target=self._beat, name="kog-beat", daemon=True).start()

    def start(self, asked: wire.Start) -> None:
        engine = self._llm.engine
        try:
            job = engine.prepare(asked.prompt, asked.params, cache_salt=asked.cache_salt)
            claim = engine.start(job, asked.sample_idx)
        except BaseException as error:  # the request's alone, whatever it is
            if not is_failure(error):
                raise
            self._outbox.send(wire.frame(wire.ended(asked.id, error)))
            return
        self._outbox.send(wire.frame(wire.Accepted(asked.id)))
        self._served[asked.id] = Served(asked.id, claim, self._outbox)
        self._served = {i: s for i, s in self._served.items() if not s.claim.ended}

    def cancel(self, number: int) -> None:
        if number in self._served:
            self._served[number].claim.cancel()

    def weigh(self) -> None:
        held: dict[str, int] = {}
        with contextlib.suppress(RuntimeError):  # the backend's own thread may add to a dict meanwhile
            held = self._llm.engine.backend.memory_bytes()
        self._outbox.send(wire.frame(wire.Held(held)))

    def _beat(self) -> None:
        engine = self._llm.engine
        while not engine.closed:
            if engine.failures >= MOST_FAILURES:
                told = f"kog: the backend failed {engine.failures} times in a row: this engine ends"
                print(told, file=sys.stderr, flush=True)
                time.sleep(BEAT_S)  # what was told of it is on its way
                os._exit(1)
            running = engine.num_slots - engine.num_free_slots
            beat = wire.Beat(engine.beats, running, compiling())
            self._outbox.send(wire.frame(beat))
            time.sleep(BEAT_S)


def open_llm(asked: wire.Open) -> "LLM":
    from kog_triton.backends.choose import choose
    from kog_triton.checkpoint.hub import gguf_file, model_folder
    from kog_triton.precompile import precompile

    options = dict(asked.options)
    device, _, count = str(options.get("devices") or "").partition(":")
    choose(options["backend"], device)  # what cannot be is found before seconds of imports
    if options["model"] is not None and gguf_file(options["model"]) is None:
        model_folder(options["model"], options["revision"])
    precompile(
        options["backend"],
        options["model"],
        revision=options["revision"],
        device=device,
        num_gpus=int(count or 1),
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        num_slots=options["num_slots"],
        prefill=options["prefill"],
    )
    from kog_triton.llm import LLM  # and torch, which takes seconds

    return LLM(**options)


def opened(llm: "LLM") -> wire.Opened:
    engine = llm.engine
    return wire.Opened(
        folder=str(llm.checkpoint.folder),
        spec=engine.backend.spec,
        generation=dict(llm.checkpoint.generation),
        eos_token_ids=sorted(engine.eos_token_ids),
        backend=llm.choice.name,
        reason=llm.choice.reason,
        num_slots=engine.num_slots,
        max_context=engine.max_context,
        gpu=engine.backend.gpu.name if engine.backend.gpu else None,
        peak=engine.peak,
        load_s=llm.load_s,
        kv_bound_bytes=llm.kv_cache_bound_bytes(),
    )


def serve(channel: socket.socket) -> None:
    """Until the server is gone; then the process ends, whatever its threads do."""
    outbox, frames = Outbox(channel), wire.Frames()
    server: EngineServer | None = None
    while data := channel.recv(READ_BYTES):
        for body in frames.feed(data):
            message = wire.from_server.decode(body)
            if isinstance(message, wire.Open):
                try:
                    llm = open_llm(message)
                except Exception as error:
                    told = wire.ended(0, run_error(error))
                    channel.sendall(wire.frame(wire.NotOpened(told.kind, told.message)))
                    return
                outbox.send(wire.frame(opened(llm)))
                server = EngineServer(llm, outbox)
            elif server is None:
                return
            elif isinstance(message, wire.Start):
                server.start(message)
            elif isinstance(message, wire.Weigh):
                server.weigh()
            else:
                server.cancel(message.id)


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # of the whole group: the server says when to end
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        status = 0
        try:
            serve(channel)
        except ConnectionError:
            pass
        except BaseException:
            status = 1
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # a thread inside a backend must not hold the device


if __name__ == "__main__":
    main()
