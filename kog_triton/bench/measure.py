"""One measurement: open every subject, check its text, warm up, time round by round, write it down.

Subjects stay open together and take turns within a round, each round beginning with another, so that
whatever drifts (clocks, heat, neighbors) meets all of them alike. A subject that is wrong is not timed;
one that fails is told with its reason, and the others go on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.choose import Choice
from kog_triton.bench import machine
from kog_triton.bench.check import Judge, open_oracle
from kog_triton.bench.peers import Peer, Setting
from kog_triton.bench.record import make_row, note_of
from kog_triton.bench.spans import written
from kog_triton.bench.subjects import GREEDY, BackendSubject, Run, Sampling, Subject
from kog_triton.bench.task import Common, Say
from kog_triton.bench.timing import decode_bytes, floor, summarize
from kog_triton.bench.trace import trace_kernels

MOST_NAMES = 160  # characters of kernels' names in an error


@dataclass(frozen=True, kw_only=True)
class Task(Common):
    """What to measure. `absent` are (backend, reason) that could have run elsewhere."""

    test: str  # "tg128 @ d32", "pp512"
    prompt_tokens: int
    tokens: int
    peers: Sequence[Peer]
    absent: Sequence[tuple[str, str]] = ()
    gguf: Path | None = None
    one_kernel: bool = False  # a request must be one kernel a GPU, which is counted
    profile_tokens: int = 0  # of each backend that takes stamps, behind the timed rounds
    sampling: Sampling = GREEDY  # of what is timed, of our backends

    @property
    def max_context(self) -> int:
        return self.prompt_tokens + self.tokens

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
    subject: Subject | None = None
    runs: list[Run] = field(default_factory=list)


def measure(task: Task, say: Say) -> dict[str, Any]:
    """The parts of a record that a measurement makes: bandwidth, conditions, rows, failures; and `rounds`, and
    whether it was `interrupted`: what Ctrl-C leaves behind the first round is kept.
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
    return _opened(
        entry, lambda: BackendSubject(choice.backend, task.model.weights, task.options())
    )


def _open_peer(task: Task, peer: Peer, say: Say) -> _Entry:
    setting = Setting(task.model.weights, task.device, task.max_context, task.gguf)
    why = peer.absent(setting)
    if task.num_gpus > 1:
        why = "this adapter runs on one GPU"
    if why:
        return _Entry(make_row(peer.name, "peer", "absent", f"{why}; {peer.ran}"))
    say(f"open {peer.name}")
    return _opened(
        _Entry(make_row(peer.name, "peer", "timed", "")), lambda: peer.open_peer(setting)
    )


def _opened(entry: _Entry, make: Callable[[], Subject]) -> _Entry:
    started = time.perf_counter()
    with _Guard(entry):
        entry.subject = make()
        entry.row["load_s"] = time.perf_counter() - started
        if isinstance(entry.subject, BackendSubject):
            entry.subject.settle()  # nothing is timed while kernels are compiled beside
        entry.row["version"] = entry.subject.version
        entry.row["dtype"] = entry.subject.spec.dtype.name.lower()
        entry.row["memory_bytes"] = entry.subject.memory_bytes()
    return entry


def _check(task: Task, entries: list[_Entry], prompt: list[int], say: Say) -> None:
    """Compare every subject with the fp32 reference; whoever is wrong is closed."""
    if not any(entry.subject for entry in entries):
        return
    say("the reference's logits")
    reference = open_oracle(task.model.weights, task.options())
    judge = Judge(reference, prompt, task.tokens)
    try:
        for entry in entries:
            if entry.subject is None:
                continue
            if not entry.subject.checks_text:
                entry.row["note"] = "it shows no tokens: text not checked"
                continue
            say(f"check {entry.row['name']}")
            with _Guard(entry):
                entry.row["check"] = asdict(judge.examine(entry.subject, entry.row["kind"]))
            if entry.subject and not entry.row["check"]["passed"]:
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
            if entry.subject:
                say(f"warm up {entry.row['name']}")
                with _Guard(entry):
                    _request(task, entry.subject, prompt)


def _time(
    task: Task, entries: list[_Entry], prompt: list[int], say: Say
) -> tuple[list[dict[str, Any] | None], int]:
    """The rounds: samples of the clocks right behind the warm-up and behind the last one, and how many there
    were. KeyboardInterrupt ends them; it is raised if it comes before one is whole."""
    samples, done = [machine.sample()], 0
    try:
        while done < task.rounds:
            say(f"round {done + 1} of {task.rounds}")
            first = done % max(len(entries), 1)
            for entry in entries[first:] + entries[:first]:
                if entry.subject:
                    with _Guard(entry):
                        entry.runs.append(_request(task, entry.subject, prompt))
            done += 1
    except KeyboardInterrupt:
        if not done:
            raise
        say(f"interrupted: {done} of {task.rounds} rounds are kept")
        for entry in entries:
            del entry.runs[done:]
    samples.append(machine.sample())
    return samples, done


def _request(task: Task, subject: Subject, prompt: list[int]) -> Run:
    if isinstance(subject, BackendSubject):
        return subject.generate(prompt, task.tokens, task.sampling)
    return subject.generate(prompt, task.tokens)


def _fill(task: Task, entry: _Entry, bandwidth: dict[str, Any]) -> None:
    if entry.subject is None:
        return
    row = entry.row
    row |= summarize(entry.runs, task.prompt_tokens)
    row["version"] = entry.subject.version
    if task.sampling != GREEDY and not isinstance(entry.subject, BackendSubject):
        row["version"] += ", greedy"
    if task.tokens > 1:
        size = decode_bytes(entry.subject.spec, task.prompt_tokens, task.tokens)
        rate = row["host"]["tokens_per_s"]
    else:  # a prompt takes one pass over the weights at least, however long it is
        size, rate = entry.subject.spec.bytes_per_token, 1e6 / row["ttft_us"]
    row["floor"] = floor(size, rate, bandwidth["datasheet"], bandwidth["measured"])


def _trace(task: Task, entry: _Entry, prompt: list[int]) -> None:
    """The kernels of one more request like those timed."""
    subject = entry.subject
    if subject is not None:
        with _Guard(entry):
            entry.row["kernels"] = trace_kernels(lambda: _request(task, subject, prompt))


def _look(task: Task, entries: list[_Entry], prompt: list[int], say: Say) -> bool:
    """What more can be said of each than its times; False if Ctrl-C ended that."""
    try:
        for entry in entries:
            if isinstance(entry.subject, BackendSubject):
                _look_inside(task, entry.row, entry.subject, prompt, say)
            if task.one_kernel and entry.row["kind"] == "backend":
                _trace(task, entry, prompt)
    except KeyboardInterrupt:
        say("interrupted: the rounds are kept")
        return False
    return True


def _look_inside(
    task: Task, row: dict[str, Any], subject: BackendSubject, prompt: list[int], say: Say
) -> None:
    """What a backend can say of its kernel: what it takes and, if asked for, where a token goes."""
    try:
        held = subject.resources()
        if held is not None:
            row["resources"] = asdict(held)
        if task.profile_tokens:
            say(f"profile {subject.name}")
            spans = subject.profile(prompt, min(task.profile_tokens, task.tokens))
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


class _Guard:
    """Around what a subject does: an error becomes its row's note, and the subject leaves."""

    def __init__(self, entry: _Entry) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._entry.row |= {"status": "failed", "note": note_of(error)}
        _close(self._entry)
        return True


def _close(entry: _Entry) -> None:
    if entry.subject is not None:
        entry.subject.close()
        entry.subject = None
