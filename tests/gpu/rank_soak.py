"""Requests of every kind on several GPUs for a while: text, hangs and memory over the time.

`python -m tests.gpu.rank_soak` takes five minutes on two GPUs and prints one line; --out keeps what it found. Eight
slots get prompts of one token to hundreds (a token at a time, in chunks, in a pass of short ones, by the library),
greedy, drawn and masked, that share steps as they come and go. Meanwhile, at random: cancels, yields with other work
between, a rank's launches held up by up to MOST_DELAY_MS, the backend's thread held up, and copies that keep memory and
NVLink busy.

What is asked: each answer is what its request says alone, or begins so if it was cancelled; nothing is silent for
HANG_S; behind a warm-up, a fifth of the time, GPUs' memory does not grow, and the host's by MOST_MIB_A_MINUTE at most.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.sampling import SamplingParams

SECONDS, HANG_S, WARM_UP = 300.0, 20.0, 0.2
MOST_DELAY_MS, CYCLES_A_MS = 2.0, 1_900_000
MOST_MIB_A_MINUTE, MOST_GPU_MIB = 2.0, 2.0
CANCELS, YIELDS, HOST_DELAYS = 0.2, 0.02, 0.01  # of requests; of rounds; of tokens
LENGTHS, COUNTS = (1, 2, 7, 20, 60, 180, 300, 900), (1, 9, 40, 150)
SLOTS = 8
MIB = 1 << 20


@dataclass
class Found:
    seconds: float = 0.0
    requests: int = 0
    cancelled: int = 0
    tokens: int = 0
    yields: int = 0
    most_at_once: int = 0
    hangs: int = 0
    differences: int = 0
    errors: int = 0
    first_fault: str = ""
    gpu_mib: tuple[float, ...] = ()  # that each GPU's memory grew by behind the warm-up
    host_mib_a_minute: float = 0.0

    @property
    def holds(self) -> bool:
        faults = self.hangs + self.differences + self.errors
        grew = max(self.gpu_mib, default=0.0) > MOST_GPU_MIB
        return not faults and not grew and self.host_mib_a_minute <= MOST_MIB_A_MINUTE

    def line(self, title: str) -> str:
        grown = "/".join(f"{mib:+.1f}" for mib in self.gpu_mib) or "-"
        out = (
            f"soak {'holds' if self.holds else 'FAILED'}: {title}, {self.seconds:.0f} s, {self.requests} requests "
            f"({self.cancelled} cancelled, up to {self.most_at_once} at once), {self.tokens} tokens, {self.yields} "
            f"yields, {self.hangs} hangs, {self.differences} differences, {self.errors} errors, memory {grown} MiB of "
            f"GPUs, {self.host_mib_a_minute:+.2f} MiB a minute of the host"
        )
        return out + (f"; first fault: {self.first_fault}" if self.first_fault else "")


def even(vocab: int) -> np.ndarray:
    """A mask that allows every other id."""
    return np.full(-(-vocab // 32), 0x55555555, np.uint32)


def requests_of(
    vocab: int, room: int, lengths: tuple[int, ...], counts: tuple[int, ...]
) -> list[Request]:
    """Of all lengths and kinds; each may be asked in any slot."""
    draws, out = np.random.default_rng(0), []
    mask = even(vocab)
    for i, length in enumerate(lengths):
        for j, count in enumerate(counts):
            if length + count > room:
                continue
            kind = (i + j) % 4  # greedy twice
            params = SamplingParams(temperature=0)
            if kind == 1:
                params = SamplingParams(temperature=1.0, top_p=0.9, seed=7 * i + j)
            prompt = tuple(draws.integers(0, vocab, length).tolist())
            masked = (lambda output: mask) if kind == 2 else None
            out.append(Request(0, prompt, params, params.seed or 0, count, mask=masked))
    return out


class Soak:
    """A backend under `asked` requests; `expected` are the tokens that each says alone."""

    def __init__(self, backend: Any, asked: list[Request], slots: int, seed: int = 0) -> None:
        self.backend, self.asked, self.slots = backend, asked, slots
        self.found, self._dice = Found(), random.Random(seed)
        self.expected = [self._alone(request) for request in asked]
        for request, tokens in zip(asked, self.expected, strict=True):
            assert len(tokens) == request.max_tokens and self._alone(request) == tokens
        self.mailbox = Mailbox()
        right = self.mailbox.push
        host_dice = random.Random(seed + 1)

        def push(slot: int, step: Any) -> None:
            right(slot, step)
            if host_dice.random() < HOST_DELAYS:
                time.sleep(host_dice.uniform(0, 5e-3))

        self.mailbox.push = push  # type: ignore[method-assign]
        self._running: dict[int, tuple[int, list[int], int, float]] = {}
        self._idle, self._done, self._broke = threading.Event(), False, ""

    def _alone(self, request: Request) -> list[int]:
        mailbox = Mailbox()
        mailbox.post(request)
        self.backend.generate(mailbox)
        steps = mailbox.read(0, 0)
        assert not any(isinstance(step, Failure) for step in steps), steps
        return [step.token for step in steps if not isinstance(step, Failure) and step.token >= 0]

    def run(self, ends: Callable[[], bool], memory: Callable[[], None] = lambda: None) -> Found:
        """Until `ends` says so, then to the end of what runs; `memory` is called between rounds."""
        begun = time.monotonic()
        thread = threading.Thread(target=self._serve, daemon=True)
        thread.start()
        while not self.found.hangs and not self._broke and (not ends() or self._running):
            if not ends():
                self._post()
                if self._dice.random() < YIELDS:
                    self._yield()
            self._read()
            memory()
            time.sleep(2e-4)
        self._done = True
        thread.join(HANG_S)
        self.found.hangs += thread.is_alive() and not self.found.hangs
        if self._broke:
            self._fault("errors", self._broke)
        self.found.seconds = time.monotonic() - begun
        return self.found

    def _serve(self) -> None:
        try:
            while not self._done:
                mailbox = self.mailbox
                if mailbox.stops or not (mailbox.waiting() or mailbox.resumed):
                    self._idle.set()
                    time.sleep(2e-4)
                    continue
                self._idle.clear()
                self.backend.generate(mailbox)
        except BaseException as error:
            self._broke = f"{type(error).__name__}: {error}"

    def _post(self) -> None:
        free = [slot for slot in range(self.slots) if slot not in self._running]
        if not free or self._dice.random() > 0.2:
            return
        # Now and then only as many as one, two or four columns hold.
        for slot in self._dice.sample(free, self._dice.randint(1, len(free))):
            which, dice = self._dice.randrange(len(self.asked)), self._dice
            request = replace(self.asked[which], slot=slot)
            cancel = dice.randint(0, request.max_tokens) if dice.random() < CANCELS else 1 << 30
            self._running[slot] = which, [], cancel, time.monotonic()
            self.mailbox.post(request)
            self.found.requests += 1
        self.found.most_at_once = max(self.found.most_at_once, len(self._running))

    def _read(self) -> None:
        for slot, (which, tokens, cancel, heard) in list(self._running.items()):
            steps, now = self.mailbox.read(slot, 0), time.monotonic()
            if now - heard > HANG_S and not steps:
                where = (
                    f"slot {slot}, prompt of {len(self.asked[which].prompt)}, {len(tokens)} tokens"
                )
                self._fault("hangs", where)
            for step in steps:
                if isinstance(step, Failure):
                    self._fault("errors", f"{type(step.error).__name__}: {step.error}")
                    del self._running[slot]
                    break
                tokens += [step.token] if step.token >= 0 else []
                if step.finish:
                    self._ended(which, tokens, step.finish)
                    del self._running[slot]
            if slot in self._running:
                if len(tokens) >= cancel:
                    self.mailbox.cancel(slot)
                    cancel = 1 << 30
                self._running[slot] = which, tokens, cancel, now if steps else heard

    def _ended(self, which: int, tokens: list[int], finish: str) -> None:
        expected = self.expected[which]
        self.found.tokens += len(tokens)
        self.found.cancelled += finish == "cancel"
        if tokens != (expected[: len(tokens)] if finish == "cancel" else expected):
            at = next(
                (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), -1
            )
            length = len(self.asked[which].prompt)
            self._fault("differences", f"prompt of {length}, {len(expected)} tokens, at {at}")

    def _yield(self) -> None:
        self.mailbox.yield_now()
        begun = time.monotonic()
        while not self._idle.wait(0.01):
            if time.monotonic() - begun > HANG_S or self._broke:
                return self._fault("hangs", "a yield")
        self.found.yields += 1
        if self._dice.random() < 0.2:
            self.backend.forward_logits([1, 2, 3])
        # It stood still meanwhile, as was asked: no hang.
        now = time.monotonic()
        self._running = {s: (*held[:3], now) for s, held in self._running.items()}
        self.mailbox.resume()

    def _fault(self, kind: str, what: str) -> None:
        setattr(self.found, kind, getattr(self.found, kind) + 1)
        self.found.first_fault = self.found.first_fault or f"{kind}: {what}"


# ---- on GPUs ----


@contextmanager
def disturbed(devices: list[torch.device], seed: int = 0) -> Iterator[None]:
    """Inside, launches of each GPU are held up at random, and copies keep memory and the way between GPUs busy."""
    from kog_triton.backends.cuda.driver import Kernel

    right, dice, over = Kernel.launch, random.Random(seed), threading.Event()

    def launch(self: Kernel, blocks: int, threads: int, argument: Any) -> Any:
        if dice.random() < 0.3:
            with torch.cuda.device(self._device):
                torch.cuda._sleep(int(dice.uniform(0, MOST_DELAY_MS) * CYCLES_A_MS))
        return right(self, blocks, threads, argument)

    def noise() -> None:
        own = random.Random(seed + 1)
        with torch.inference_mode():
            held = [torch.zeros(64 * MIB, dtype=torch.uint8, device=d) for d in devices]
            streams = [torch.cuda.Stream(d) for d in devices]
            while not over.is_set():
                to, of = own.randrange(len(devices)), own.randrange(len(devices))
                with torch.cuda.stream(streams[to]):
                    held[to][: 32 * MIB].copy_(held[of][32 * MIB :], non_blocking=True)
                streams[to].synchronize()
                time.sleep(own.uniform(0, 0.02))

    thread = threading.Thread(target=noise, daemon=True)
    Kernel.launch = launch  # type: ignore[method-assign]
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)
        Kernel.launch = right  # type: ignore[method-assign]


class MemoryWatch:
    """What GPUs and the host hold behind the warm-up and at the end."""

    def __init__(self, devices: list[torch.device], seconds: float) -> None:
        self._devices, self._from = devices, time.monotonic() + WARM_UP * seconds
        self._before: tuple[list[int], int, float] | None = None

    def __call__(self) -> None:
        if self._before is None and time.monotonic() > self._from:
            self._before = self._held()

    def tell(self, found: Found) -> None:
        if self._before is None:
            return
        gpus, host, then = self._before
        gpus_now, host_now, now = self._held()
        found.gpu_mib = tuple((b - a) / MIB for a, b in zip(gpus, gpus_now, strict=True))
        found.host_mib_a_minute = (host_now - host) / MIB / (now - then) * 60

    def _held(self) -> tuple[list[int], int, float]:
        gpus = [total - free for free, total in map(torch.cuda.mem_get_info, self._devices)]
        status = Path("/proc/self/status").read_text()
        host = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmRSS" in line)
        return gpus, host, time.monotonic()


def soak(shape: str, seconds: float, gpus: int = 2, seed: int = 0) -> Found:
    """On `gpus` GPUs, behind the compilers and what requests say alone."""
    from kog_triton.backends import BackendOptions
    from kog_triton.backends.cuda.backend import CudaBackend
    from kog_triton.checkpoint.random_weights import RandomWeights
    from tests.lib.machine_code import spec_named

    spec = spec_named(shape)
    options = BackendOptions(SLOTS, 1152, num_gpus=gpus, device="nvidia")
    backend = CudaBackend(RandomWeights(spec, device="cuda"), options)
    backend.settle()
    made = Soak(backend, requests_of(spec.vocab_size, 1152, LENGTHS, COUNTS), SLOTS, seed)
    with disturbed(backend.devices, seed):
        until, memory = time.monotonic() + seconds, MemoryWatch(backend.devices, seconds)
        found = made.run(lambda: time.monotonic() >= until, memory)
        if not found.hangs:
            memory.tell(found)
    if not found.hangs:
        backend.close()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.rank_soak")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for what it found")
    args = parser.parse_args(argv)
    found = soak(args.shape, args.seconds, args.gpus, args.seed)
    name = torch.cuda.get_device_name()
    print(found.line(f"{args.shape} on {args.gpus} x {name}"), flush=True)
    if args.out:
        about = {"shape": args.shape, "gpus": args.gpus, "gpu": name, "seed": args.seed}
        args.out.write_text(json.dumps(about | asdict(found) | {"holds": found.holds}, indent=1))
    if found.hangs:
        os._exit(1)  # what hangs would keep the process
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
