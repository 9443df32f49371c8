"""One measurement: open every engine, check its text, warm up, time round by round, write it down.

Engines stay open together and are timed one after another within a round, each round beginning with another, so that
whatever drifts (clocks, heat, neighbors) meets all of them alike. An engine that is wrong is not timed;
one that fails is reported with its reason, and the others go on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.choose import Choice
from kog_triton.bench import machine
from kog_triton.bench.check import Judge, open_oracle
from kog_triton.bench.engines import GREEDY, BackendUnderTest, EngineUnderTest, Run, Sampling
from kog_triton.bench.kl_limit import PEER
from kog_triton.bench.peers import Peer, Setting
from kog_triton.bench.record import make_row, note_of
from kog_triton.bench.spans import written
from kog_triton.bench.task import Common, Say
from kog_triton.bench.timing import roofline, summarize
from kog_triton.bench.trace import trace_kernels

MOST_NAMES = 160  # characters of kernels' names in an error


@dataclass(frozen=True, kw_only=True)
class Task(Common):
    """What to measure. `absent` are (backend, reason) that could have run elsewhere."""

    test: str  # "tg128 @ d32", "pp512"
    prompt_tokens: int
    tokens: int
    peers: Sequence[type[Peer]]
    absent: Sequence[tuple[str, str]] = ()
    gguf: Path | None = None
    checked: bool = True  # engines are compared with the fp32 reference before they are timed
    one_kernel: bool = False  # a request must be one kernel a GPU, which is counted
    profile_tokens: int = 0  # of each backend that takes stamps, after the timed rounds
    sampling: Sampling = GREEDY  # of what is timed, of our backends

    @property
    def max_context(self) -> int:
        return self.room(self.prompt_tokens + self.tokens)

    def options(self) -> BackendOptions:
        return BackendOptions(
            max_context=self.max_context,
            num_gpus=self.num_gpus,
            device=self.device_word,
            prefill="decode" if self.one_kernel else "auto",
        )


@dataclass
class _Entry:
    """A row in the making."""

    row: dict[str, Any]
    engine: EngineUnderTest | None = None
    runs: list[Run] = field(default_factory=list)


def measure(task: Task, say: Say) -> dict[str, Any]:
    """The parts of a record that a measurement makes: bandwidth, conditions, rows, failures; and `rounds`, and
    whether it was `interrupted`: what Ctrl-C leaves after the first round is kept.
    """
    bandwidth = task.read_bandwidth(say)
    entries = [_open_backend(task, choice, say) for choice in task.backends]
    entries += [_Entry(make_row(n, "backend", "absent", why)) for n, why in task.absent]
    entries += [_open_peer(task, peer, say) for peer in task.peers]
    try:
        prompt = task.model.prompt(task.prompt_tokens)
        _check(task, entries, prompt, say)
        _warm_up(task, entries, prompt, say)
        samples, rounds = _time(task, entries, prompt, say)
        for entry in entries:
            _fill(task, entry, bandwidth)
        interrupted = rounds < task.rounds or not _look(task, entries, prompt, say)
    finally:
        for entry in entries:
            _close(entry)
    return {
        "bandwidth": bandwidth,
        "conditions": machine.conditions(samples),
        "rows": [entry.row for entry in entries],
        "failures": _failures(task, entries),
        "rounds": rounds,
        "interrupted": interrupted,
    }


# ---- steps ----


def _open_backend(task: Task, choice: Choice, say: Say) -> _Entry:
    say(f"open {choice.name}")
    entry = _Entry(make_row(choice.name, "backend", "timed", choice.reason))
    return _opened(entry, lambda: BackendUnderTest(choice.backend, task.model.weights, task.options()))


def _open_peer(task: Task, peer: type[Peer], say: Say) -> _Entry:
    setting = Setting(task.model.weights, task.device, task.max_context, task.gguf, task.num_gpus)
    why = peer.absent(setting)
    if task.num_gpus > 1 and not getattr(peer, "several_gpus", False):
        why = "this adapter runs on one GPU"
    if why:
        return _Entry(make_row(peer.name, "peer", "absent", f"{why}; {peer.ran}"))
    say(f"open {peer.name}")
    return _opened(_Entry(make_row(peer.name, "peer", "timed", "")), lambda: peer(setting))


def _opened(entry: _Entry, make: Callable[[], EngineUnderTest]) -> _Entry:
    started = time.perf_counter()
    with _guard(entry):
        entry.engine = make()
        entry.row["load_s"] = time.perf_counter() - started
        if isinstance(entry.engine, BackendUnderTest):
            entry.engine.settle()  # nothing is timed while kernels are compiled beside
        entry.row["version"] = entry.engine.version
        entry.row["dtype"] = entry.engine.spec.dtype.name.lower()
        entry.row["memory_bytes"] = entry.engine.memory_bytes()
    return entry


def _check(task: Task, entries: list[_Entry], prompt: list[int], say: Say) -> None:
    """Compare every engine with the fp32 reference; one that is wrong is closed."""
    if not task.checked:
        for entry in entries:
            if entry.engine:
                entry.row["note"] = "not compared with the reference: --no-check"
        return
    if not any(entry.engine for entry in entries):
        return
    say("the reference's logits")
    reference = open_oracle(task.model.weights, task.options())
    judge = Judge(reference, task.judged_ids(), prompt, task.tokens)
    try:
        limit = task.kl_limit(judge, say)
        for entry in entries:
            if entry.engine is None:
                continue
            if not entry.engine.checks_text:
                entry.row["note"] = "it shows no tokens: text not checked"
                continue
            say(f"check {entry.row['name']}")
            with _guard(entry):
                most = limit if entry.row["kind"] == "backend" else PEER
                entry.row["check"] = asdict(judge.examine(entry.engine, most))
            if entry.engine and not entry.row["check"]["passed"]:
                entry.row |= {"status": "wrong", "note": "its text is wrong: not timed"}
                _close(entry)
    finally:
        judge.close()
        del judge, reference
        if task.device.type == "cuda":
            torch.cuda.empty_cache()


def _warm_up(task: Task, entries: list[_Entry], prompt: list[int], say: Say) -> None:
    for entry in entries:
        for _ in range(task.warmup):
            if entry.engine:
                say(f"warm up {entry.row['name']}")
                with _guard(entry):
                    _request(task, entry.engine, prompt)


def _time(task: Task, entries: list[_Entry], prompt: list[int], say: Say) -> tuple[list[dict[str, Any] | None], int]:
    """The rounds: samples of the clocks right after the warm-up and after the last one, and how many there
    were. KeyboardInterrupt ends them; it is raised if it comes before one is whole."""
    samples, done = [machine.sample()], 0
    try:
        while done < task.rounds:
            say(f"round {done + 1} of {task.rounds}")
            first = done % max(len(entries), 1)
            for entry in entries[first:] + entries[:first]:
                if entry.engine:
                    with _guard(entry):
                        entry.runs.append(_request(task, entry.engine, prompt))
            done += 1
    except KeyboardInterrupt:
        if not done:
            raise
        say(f"interrupted: {done} of {task.rounds} rounds are kept")
        for entry in entries:
            del entry.runs[done:]
    samples.append(machine.sample())
    return samples, done


def _request(task: Task, engine: EngineUnderTest, prompt: list[int]) -> Run:
    if isinstance(engine, BackendUnderTest):
        return engine.generate(prompt, task.tokens, task.sampling)
    return engine.generate(prompt, task.tokens)


def _fill(task: Task, entry: _Entry, bandwidth: dict[str, Any]) -> None:
    if entry.engine is None:
        return
    row = entry.row
    row |= summarize(entry.runs, task.prompt_tokens)
    row["version"] = entry.engine.version
    if task.sampling != GREEDY and not isinstance(entry.engine, BackendUnderTest):
        row["version"] += ", greedy"
    if task.tokens > 1:
        size = entry.engine.spec.decode_bytes(task.prompt_tokens, task.tokens)
        rate = row["host"]["tokens_per_s"]
    else:  # a prompt takes one pass over the weights at least, however long it is
        size, rate = entry.engine.spec.bytes_per_token, 1e6 / row["ttft_us"]
    row["floor"] = roofline(size, rate, bandwidth["datasheet"], bandwidth["measured"])


def _trace(task: Task, entry: _Entry, prompt: list[int]) -> None:
    """The kernels of one more request like those timed."""
    engine = entry.engine
    if engine is not None:
        with _guard(entry):
            entry.row["kernels"] = trace_kernels(lambda: _request(task, engine, prompt))


def _look(task: Task, entries: list[_Entry], prompt: list[int], say: Say) -> bool:
    """What more can be said of each than its times; False if Ctrl-C ended that."""
    try:
        for entry in entries:
            if isinstance(entry.engine, BackendUnderTest):
                _look_inside(task, entry.row, entry.engine, prompt, say)
            if task.one_kernel and entry.row["kind"] == "backend":
                _trace(task, entry, prompt)
    except KeyboardInterrupt:
        say("interrupted: the rounds are kept")
        return False
    return True


def _look_inside(task: Task, row: dict[str, Any], engine: BackendUnderTest, prompt: list[int], say: Say) -> None:
    """What a backend can say of its kernel: what it takes and, if asked for, where a token goes."""
    try:
        held = engine.resources()
        if held is not None:
            row["resources"] = asdict(held)
        if task.profile_tokens:
            say(f"profile {engine.name}")
            spans = engine.profile(prompt, min(task.profile_tokens, task.tokens))
            if spans is not None:
                row["profile"] = written(spans)
    except Exception as error:  # what was timed stays
        row["note"] = f"not profiled: {note_of(error)}"


def _failures(task: Task, entries: list[_Entry]) -> list[str]:
    """What makes the command fail: our own backends that are wrong, broken or switch kernels."""
    out = []
    for row in (entry.row for entry in entries if entry.row["kind"] == "backend"):
        if row["status"] in ("wrong", "failed"):
            out.append(f"{row['name']}: {row['note']}")
        kernels = row["kernels"]
        if kernels and kernels["launches"] != task.num_gpus:
            names = ", ".join(f"{n} x {name[:40]}" for name, n in kernels["kernels"].items())
            out.append(
                f"{row['name']}: {kernels['launches']} kernels for one request, not "
                f"{task.num_gpus}: {names[:MOST_NAMES]}"
            )
    return out


@contextmanager
def _guard(entry: _Entry) -> Iterator[None]:
    """Around what an engine does: an error becomes its row's note, and the engine leaves."""
    try:
        yield
    except Exception as error:
        entry.row |= {"status": "failed", "note": note_of(error)}
        _close(entry)


def _close(entry: _Entry) -> None:
    if entry.engine is not None:
        entry.engine.close()
        entry.engine = None
