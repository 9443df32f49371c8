"""Requests of every kind on several GPUs for a while: text, hangs and memory over the time.

`python -m tests.gpu.rank_soak` takes five minutes on two GPUs and prints one line; --out keeps what it found. Eight
slots get prompts of one token to hundreds (a token at a time, in chunks, in a pass of short ones, by the library),
greedy, drawn and masked, that share steps as they come and go. Meanwhile, at random: cancels, yields with other work
between, a rank's launches held up by up to MOST_DELAY_MS, the backend's thread held up, and copies that keep memory and
NVLink busy. Half of the cancels come at a token, the others at a moment up to CANCEL_S behind the post: inside prompts.

What is asked: each answer is what its request says alone, or begins so if it was cancelled; nothing is silent for
HANG_S; of the long one some prompt is cancelled between two of its slices; of MEMORY_S and more, behind a warm-up, a
fifth of the time, GPUs' memory does not grow, and the host's by MOST_MIB_A_MINUTE at most.

Of an answer that differs it keeps how its prompt ran and what ran meanwhile (tests/lib/soak_record.py). When that is
told it asks again: alone, beside others, and how near the two tokens' logits are. `--phases SECONDS` soaks each of
PHASES for so long: by passes that kernels bring together or by copies, with graphs and without, with cached prefixes
and without; what requests say alone by one way and by another is compared, too.
"""

import argparse
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kog_triton.backends.mailbox import Failure, Mailbox, Request
from tests.lib.soak_record import Difference, Tally, Ways, named
from tests.lib.soak_requests import Asked, Hung, begun, further_requests, requests_of

SECONDS, HANG_S, WARM_UP = 300.0, 20.0, 0.2
MOST_DELAY_MS, CYCLES_A_MS = 2.0, 1_900_000
MOST_MIB_A_MINUTE, MOST_GPU_MIB = 2.0, 2.0
MEMORY_S = 120.0  # of a soak that is asked for it
CANCEL_S = 0.03
CANCELS, YIELDS, HOST_DELAYS = 0.2, 0.02, 0.01  # of requests; of rounds; of tokens
LENGTHS, COUNTS = (1, 2, 7, 20, 60, 180, 300, 900), (1, 9, 40, 150)
FOLLOWS = 0.4  # of slots that hold an answer with a further turn
MOST_ASKED, TRIES = 6, 4  # differing answers that are asked again; beside others, how often
SLOTS, ROOM = 8, 1152
MIB = 1 << 20


@dataclass
class Found:
    seconds: float = 0.0
    requests: int = 0
    cancelled: int = 0
    inside: int = 0  # of these: some slices of the prompt had run, and others were to follow
    tokens: int = 0
    yields: int = 0
    most_at_once: int = 0
    hangs: int = 0
    differences: int = 0
    errors: int = 0
    first_fault: str = ""
    gpu_mib: tuple[float, ...] = ()  # that each GPU's memory grew by behind the warm-up
    host_mib_a_minute: float = 0.0
    wants_inside: bool = False

    @property
    def holds(self) -> bool:
        faults = self.hangs + self.differences + self.errors
        grew = max(self.gpu_mib, default=0.0) > MOST_GPU_MIB
        missed = self.wants_inside and not self.inside
        return not faults and not grew and not missed and self.host_mib_a_minute <= MOST_MIB_A_MINUTE

    def line(self, title: str) -> str:
        grown = "/".join(f"{mib:+.1f}" for mib in self.gpu_mib) or "-"
        out = (
            f"soak {'holds' if self.holds else 'FAILED'}: {title}, {self.seconds:.0f} s, {self.requests} requests "
            f"({self.cancelled} cancelled, {self.inside} of them inside a prompt, up to {self.most_at_once} at once), "
            f"{self.tokens} tokens, {self.yields} yields, {self.hangs} hangs, {self.differences} differences, "
            f"{self.errors} errors, memory {grown} MiB of GPUs, {self.host_mib_a_minute:+.2f} MiB a minute of the host"
        )
        return out + (f"; first fault: {self.first_fault}" if self.first_fault else "")


@dataclass
class Going:
    """A request that was posted. `cancel`: behind so many tokens, or at the moment `cancel_at`; `heard`: when its last
    token came; `beside`: those that ran meanwhile."""

    which: int
    tokens: list[int]
    cancel: float
    cancel_at: float
    heard: float
    beside: set[str]
    yields: int


class Soak:
    """A backend under `asked` requests; `expected` are the tokens that each says alone. `room` of a slot: with it some
    requests are further turns behind an answer."""

    def __init__(self, backend: Any, asked: list[Asked], slots: int, seed: int = 0, room: int = 0) -> None:
        self.backend, self.asked, self.slots = backend, [*asked], slots
        self.found, self._dice = Found(), random.Random(seed)
        self.ways, self.tally = Ways(), Tally()
        self.expected: list[list[int]] = []
        try:
            self._expect(room)
        except Hung as error:
            self._fault("hangs", f"a request alone: {error}")
        self._further = {one.after: which for which, one in enumerate(self.asked) if one.after >= 0}
        self._base = [which for which, one in enumerate(self.asked) if one.after < 0]
        self._holds: dict[int, int] = {}  # by slot: whose prompt and answer
        self.mailbox = Mailbox()
        right = self.mailbox.push
        host_dice = random.Random(seed + 1)

        def push(slot: int, step: Any) -> None:
            right(slot, step)
            if host_dice.random() < HOST_DELAYS:
                time.sleep(host_dice.uniform(0, 5e-3))

        self.mailbox.push = push  # type: ignore[method-assign]
        self._running: dict[int, Going] = {}
        self._idle, self._done, self._broke = threading.Event(), False, ""

    def _expect(self, room: int) -> None:
        for one in self.asked:
            self._expect_of(one)
        if room:
            vocab = self.backend.spec.vocab_size
            for one in further_requests([*self.asked], self.expected, vocab, room):
                self.asked.append(one)
                self._expect_of(one)

    def _expect_of(self, one: Asked) -> None:
        tokens = self._alone(one)
        assert len(tokens) == one.request.max_tokens and self._alone(one) == tokens, one.name
        self.expected.append(tokens)

    def _alone(self, one: Asked, slot: int = 0) -> list[int]:
        if one.after >= 0:
            self._alone(self.asked[one.after], slot)
        return self._said(replace(one.request, slot=slot))

    def _said(self, *requests: Request) -> list[int]:
        """By the last of requests that are posted at once."""
        mailbox = Mailbox()
        for request in requests:
            mailbox.post(request)
        begun(partial(self.backend.generate, mailbox))(HANG_S)
        return read_tokens(mailbox, requests[-1].slot)

    def run(self, ends: Callable[[], bool], memory: Callable[[], None] = lambda: None) -> Found:
        """Until `ends` says so, then to the end of what runs; `memory` is called between rounds. Behind a hang nothing
        runs."""
        if self.found.hangs:
            return self.found
        since = time.monotonic()
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
        self.found.seconds = time.monotonic() - since
        return self.found

    def _serve(self) -> None:
        try:
            with self.ways.watched(self.backend):
                self._serve_until_done()
        except BaseException as error:
            self._broke = f"{type(error).__name__}: {error}"

    def _serve_until_done(self) -> None:
        while not self._done:
            mailbox = self.mailbox
            if mailbox.stops or not (mailbox.waiting() or mailbox.resumed):
                self._idle.set()
                time.sleep(2e-4)
                continue
            self._idle.clear()
            self.backend.generate(mailbox)

    def _post(self) -> None:
        free = [slot for slot in range(self.slots) if slot not in self._running]
        if not free or self._dice.random() > 0.2:
            return
        # Now and then only as many as one, two or four columns hold.
        for slot in self._dice.sample(free, self._dice.randint(1, len(free))):
            dice, which = self._dice, self._dice.choice(self._base)
            further = self._further.get(self._holds.pop(slot, -1))
            if further is not None and dice.random() < FOLLOWS:
                which = further
            one = self.asked[which]
            request = replace(one.request, slot=slot)
            cancel, cancel_at, now = math.inf, math.inf, time.monotonic()
            if dice.random() < CANCELS:
                if dice.random() < 0.5:
                    cancel = dice.randint(0, request.max_tokens)
                else:
                    cancel_at = now + dice.uniform(0, CANCEL_S)
            beside = {self.asked[going.which].name for going in self._running.values()}
            for going in self._running.values():
                going.beside.add(one.name)
            self._running[slot] = Going(which, [], cancel, cancel_at, now, beside, self.found.yields)
            self.ways.of_slot.pop(slot, None)  # of the one before, if this is cancelled early
            self.mailbox.post(request)
            self.found.requests += 1
        self.found.most_at_once = max(self.found.most_at_once, len(self._running))

    def _read(self) -> None:
        for slot, going in list(self._running.items()):
            steps, now = self.mailbox.read(slot, 0), time.monotonic()
            if now - going.heard > HANG_S and not steps:
                name = self.asked[going.which].name
                self._fault("hangs", f"slot {slot}, {name}, {len(going.tokens)} tokens")
            for step in steps:
                if isinstance(step, Failure):
                    self._fault("errors", f"{type(step.error).__name__}: {step.error}")
                    del self._running[slot]
                    break
                going.tokens += [step.token] if step.token >= 0 else []
                if step.finish:
                    del self._running[slot]
                    self._ended(slot, going, step.finish)
            if slot in self._running:
                if len(going.tokens) >= going.cancel or now >= going.cancel_at:
                    self.mailbox.cancel(slot)
                    going.cancel = going.cancel_at = math.inf
                going.heard = now if steps else going.heard

    def _ended(self, slot: int, going: Going, finish: str) -> None:
        tokens, expected = going.tokens, self.expected[going.which]
        one, way = self.asked[going.which], self.ways.of_slot.get(slot)
        self.found.tokens += len(tokens)
        self.found.cancelled += finish == "cancel"
        self.found.inside += finish == "cancel" and way is not None and way.inside and not tokens
        said = expected[: len(tokens)] if finish == "cancel" else expected
        if finish != "cancel" and tokens == said:
            self._holds[slot] = going.which
        line = way.line if way else "unseen"
        if tokens == said:
            return self.tally.add(one.name, line, None)
        at = next((i for i, (a, b) in enumerate(zip(tokens, said, strict=False)) if a != b), -1)

        def difference() -> Difference:
            return Difference(
                going.which,
                one.kind,
                len(one.request.prompt),
                one.request.cached,
                line,
                [*way.slices] if way else [],
                dict(way.rows) if way else {},
                dict(way.between) if way else {},
                sorted(going.beside),
                self.found.yields - going.yields,
                at,
                tokens[at] if at >= 0 else -1,
                said[at] if at >= 0 else -1,
            )

        self.tally.add(one.name, line, difference)
        where = f"prompt of {len(one.request.prompt)} ({one.name}), {len(expected)} tokens, at {at}; {line}"
        self._fault("differences", where)

    def ask_again(self) -> None:
        """Of the first answers that differed, a kind of request each: what it says alone and beside others now, and the
        gap between the expected token's logit and the other's by the kernel's own pass; or the error that came. Nothing
        behind a hang."""
        asked: set[str] = set()
        for different in self.tally.kept:
            name = self.asked[different.which].name
            if name in asked or len(asked) >= MOST_ASKED or self.found.hangs:
                continue
            asked.add(name)
            try:
                self._ask_again(different)
            except Exception as error:
                different.again["error"] = f"{type(error).__name__}: {error}"
                if isinstance(error, Hung):
                    self._fault("hangs", f"{name}, asked again: {error}")

    def _ask_again(self, different: Difference) -> None:
        one, expected = self.asked[different.which], self.expected[different.which]
        others = [self.asked[i].request for i in self._base]
        streams = max(others, key=lambda r: (r.max_tokens, -len(r.prompt)))
        different.again["beside"] = beside = []
        for _ in range(TRIES):
            beside.append(self._beside(one, streams, self._dice.choice(others)) == expected)
        different.again["alone"] = self._alone(one) == expected
        if one.kind in ("greedy", "further") and different.at >= 0:
            ids = [*one.request.prompt, *expected[: different.at]]
            row = begun(lambda: self.backend.forward_logits(ids)[-1])(HANG_S)
            best = np.sort(row)[-2:]
            different.again |= {
                "gap": float(row[different.expected] - row[different.got]),
                "best two": float(best[1] - best[0]),
            }

    def _beside(self, one: Asked, streams: Request, short: Request) -> list[int]:
        """What a request says while one streams, when another prompt comes a little later than its own."""
        if one.after >= 0:
            self._alone(self.asked[one.after], 1)
        mailbox = Mailbox()
        mailbox.post(replace(streams, slot=0))
        ended = begun(partial(self.backend.generate, mailbox))
        mailbox.read(0, HANG_S)
        mailbox.post(replace(one.request, slot=1))
        time.sleep(self._dice.uniform(0, 4e-3))
        mailbox.post(replace(short, slot=2))
        ended(HANG_S)
        while mailbox.waiting():  # it came when the others had ended
            begun(partial(self.backend.generate, mailbox))(HANG_S)
        return read_tokens(mailbox, 1)

    def _yield(self) -> None:
        self.mailbox.yield_now()
        since = time.monotonic()
        while not self._idle.wait(0.01):
            if time.monotonic() - since > HANG_S or self._broke:
                return self._fault("hangs", "a yield")
        self.found.yields += 1
        if self._dice.random() < 0.2:
            try:
                begun(lambda: self.backend.forward_logits([1, 2, 3]))(HANG_S)
            except Exception as error:
                self._fault("hangs" if isinstance(error, Hung) else "errors", f"logits: {error}")
        # It stood still meanwhile, as was asked: no hang.
        for going in self._running.values():
            going.heard = time.monotonic()
        self.mailbox.resume()

    def _fault(self, kind: str, what: str) -> None:
        setattr(self.found, kind, getattr(self.found, kind) + 1)
        self.found.first_fault = self.found.first_fault or f"{kind}: {what}"


def read_tokens(mailbox: Mailbox, slot: int) -> list[int]:
    steps = mailbox.read(slot, 0)
    assert not any(isinstance(step, Failure) for step in steps), steps
    return [step.token for step in steps if not isinstance(step, Failure) and step.token >= 0]


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


@dataclass(frozen=True)
class Phase:
    """`outputs`: kernels bring module outputs of prompts' passes to all GPUs, and short prompts have passes of their
    own; else torch's copies do. `graphs` of passes. `prefix`: some requests are further turns behind what a slot holds.
    """

    outputs: bool = True
    graphs: bool = True
    prefix: bool = True

    @property
    def name(self) -> str:
        graphs = "graphs" if self.graphs else "no graphs"
        return f"{'kernels' if self.outputs else 'copies'}, {graphs}, {'turns' if self.prefix else 'no turns'}"


PHASES = (Phase(), Phase(prefix=False), Phase(graphs=False), Phase(outputs=False, graphs=False))


def opened(shape: str, gpus: int, outputs: bool) -> Any:
    """A backend behind its compilers, with all graphs."""
    from kog_triton.backends import BackendOptions
    from kog_triton.backends.cuda.backend import CudaBackend
    from kog_triton.backends.cuda.prompt_texts import PromptKernels
    from kog_triton.checkpoint.random_weights import RandomWeights
    from tests.lib.machine_code import spec_named

    class Soaked(CudaBackend):
        prompt_kernels = PromptKernels(rank_outputs=outputs)

    options = BackendOptions(SLOTS, ROOM, num_gpus=gpus, device="nvidia")
    backend = Soaked(RandomWeights(spec_named(shape), device="cuda"), options)
    backend.settle()
    return backend


@contextmanager
def graphs(backend: Any, wanted: bool) -> Iterator[None]:
    """Inside, passes of prompts are launched kernel by kernel unless graphs are wanted."""
    held = [one for one in (backend.library, backend.short) if one is not None and not wanted]
    before = [one._graphs for one in held]
    for one in held:
        one._graphs = {}
    try:
        yield
    finally:
        for one, its in zip(held, before, strict=True):
            one._graphs = its


def soak(backend: Any, phase: Phase, seconds: float, seed: int = 0, proves: bool = False) -> Soak:
    """What requests say alone, then `seconds` of them. `proves`: some are to be cancelled inside their prompts."""
    asked = requests_of(backend.spec.vocab_size, ROOM, LENGTHS, COUNTS)
    with graphs(backend, phase.graphs):
        made = Soak(backend, asked, SLOTS, seed, ROOM if phase.prefix else 0)
        made.found.wants_inside = proves
        with disturbed(backend.devices, seed):
            until, memory = time.monotonic() + seconds, MemoryWatch(backend.devices, seconds)
            found = made.run(lambda: time.monotonic() >= until, memory)
            if not found.hangs and seconds >= MEMORY_S:
                memory.tell(found)
    return made


def otherwise(one: Soak, first: Soak) -> list[str]:
    """Requests that say alone what they do not say alone in the first phase."""
    pairs = zip(one.asked, one.expected, first.expected, strict=False)
    return [asked.name for asked, said, before in pairs if said != before]


def tell(made: Soak, title: str, first: Soak) -> None:
    print(made.found.line(title), flush=True)
    for line in made.tally.lines() if made.found.differences else ():
        print(line, flush=True)
    for one in made.tally.kept[:12]:
        print(f"  {one.line}"[:600], flush=True)
    if made is not first:
        differ = otherwise(made, first)
        print(f"  alone otherwise than in the first phase: {len(differ)}: {differ[:8]}", flush=True)


def told(made: Soak, title: str, first: Soak) -> dict[str, Any]:
    holds = {"holds": made.found.holds, "title": title, "alone otherwise": otherwise(made, first)}
    return asdict(made.found) | made.tally.told() | holds


def tell_and_ask(made: Soak, title: str, first: Soak, keep: Callable[[dict[str, Any]], None]) -> None:
    """Print and keep what was found; then ask again what differed, and do so once more: whatever becomes of that, what
    was found is there."""
    tell(made, title, first)
    keep(told(made, title, first))
    if not made.tally.kept or made.found.hangs or made.found.errors:
        return
    made.ask_again()
    for one in made.tally.kept:
        if one.again:
            print(f"  {named(one.kind, one.prompt, one.cached)}, again {one.again}", flush=True)
    keep(told(made, title, first))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.rank_soak")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", type=float, help="seconds of each phase, for one long one")
    parser.add_argument("--copies", action="store_true", help="of the long one: torch's copies")
    parser.add_argument("--no-graphs", action="store_true", help="of the long one")
    parser.add_argument("--no-prefix", action="store_true", help="of the long one")
    parser.add_argument("--out", type=Path, help="a JSON file for what it found")
    args = parser.parse_args(argv)
    one = Phase(not args.copies, not args.no_graphs and not args.copies, not args.no_prefix)
    phases, seconds = (PHASES, args.phases) if args.phases else ((one,), args.seconds)
    name, kept = torch.cuda.get_device_name(), dict[str, dict[str, Any]]()
    about = {"shape": args.shape, "gpus": args.gpus, "gpu": name, "seed": args.seed}

    def keep(its: dict[str, Any]) -> None:
        kept[its["title"]] = its
        if args.out:
            args.out.write_text(json.dumps(about | {"phases": [*kept.values()]}, indent=1))

    backend, first = None, None
    for i, phase in enumerate(phases):
        if backend is None or phases[i - 1].outputs != phase.outputs:
            if backend is not None:
                backend.close()
            backend = opened(args.shape, args.gpus, phase.outputs)
        made = soak(backend, phase, seconds, args.seed, proves=not args.phases)
        first = first or made
        with graphs(backend, phase.graphs):
            title = f"{args.shape} on {args.gpus} x {name}, {phase.name}"
            tell_and_ask(made, title, first, keep)
        if made.found.hangs:
            os._exit(1)  # what hangs would keep the process
    if backend is not None:
        backend.close()
    return 0 if all(one["holds"] for one in kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
