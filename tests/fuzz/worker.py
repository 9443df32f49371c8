"""Runs cases in child processes, so that a crash, a hang or a flood of memory is seen and survived.

A child is forked with the parent's imports, may grow by MEMORY_LIMIT, and notes in shared memory
which case it is at; the parent kills it when a case takes longer than its target allows, twice, in
case the machine was busy; it notes the fault and goes on behind that case. A case is a seed: nothing
else is needed to run it again.
"""

import gc
import json
import mmap
import os
import resource
import signal
import struct
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import IO

from .record import MEMORY_LIMIT, Record
from .table import TARGETS
from .targets import Target

CASES_A_CHILD = 2000
LOOK_S = 0.02
_SHARED = struct.Struct("<qd")  # the case at work, when it began (monotonic)


def make_case(target: Target, seed: int, number: int) -> bytes:
    """Case `number` of a run: the same bytes every time."""
    return target.case(Random(f"{type(target).__name__}:{seed}:{number}"))


def fuzz(name: str, cases: int, seed: int) -> Record:
    """Run `cases` cases of one target."""
    record, started = Record(name, seed, cases), time.monotonic()
    at, suspect = 0, -1
    with tempfile.TemporaryDirectory() as folder:
        target = TARGETS[name](Path(folder))
        while at < cases:
            at, suspect = _child(target, record, at, min(cases, at + CASES_A_CHILD), suspect)
    record.seconds = round(time.monotonic() - started, 1)
    return record


def _child(target: Target, record: Record, first: int, end: int, suspect: int) -> tuple[int, int]:
    """Run cases first .. end - 1 in one child; the case to go on with, and the one that took long.

    `suspect` is the case that took too long before: once more, and it hangs.
    """
    shared = mmap.mmap(-1, _SHARED.size)
    _SHARED.pack_into(shared, 0, first, time.monotonic())
    gc.freeze()
    # not a pipe: nobody reads while the child works
    results = tempfile.TemporaryFile("w+")  # noqa: SIM115
    pid = os.fork()
    if pid == 0:
        try:
            _work(target, record.seed, first, end, shared, results)
        finally:
            os._exit(0)
    killed = False
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        _, began = _SHARED.unpack_from(shared)
        # Packing begins with zeros: no case that has gone on since 0.
        if began and time.monotonic() - began > target.limit:
            os.kill(pid, signal.SIGKILL)
            killed = True
            break
        time.sleep(LOOK_S)
    _, status = os.waitpid(pid, 0)
    with results:
        results.seek(0)
        lines = [json.loads(line) for line in results if line.endswith("\n")]
    at, _ = _SHARED.unpack_from(shared)
    counts = Counter(line["kind"] for line in lines)
    record.loaded += counts["loaded"]
    record.refused += counts["refused"]
    for line in lines:
        if line["kind"] == "fault":
            record.add_fault(line["signature"], line["case"])
        if line["kind"] == "memory":
            record.peak_memory_mib = max(record.peak_memory_mib, line["peak"])
            record.grown_memory_mib = max(record.grown_memory_mib, line["grown"])
        elif line["seconds"] > record.slowest_s:
            record.slowest_s, record.slowest_case = line["seconds"], line["case"]
    if killed and at != suspect:
        return at, at
    if killed:
        record.add_fault(f"hang: more than {target.limit:g} s", at)
    elif os.waitstatus_to_exitcode(status) != 0 or counts["memory"] != 1:
        record.add_fault(f"crash: exit {os.waitstatus_to_exitcode(status)}", at)
    else:
        return end, -1
    return at + 1, -1


def _work(target: Target, seed: int, first: int, end: int, shared: mmap.mmap, results: IO[str]) -> None:
    """The child: a line of JSON for every case, and one about its memory at the end."""
    limit_memory()
    null = os.open(os.devnull, os.O_WRONLY)  # a panicking library writes to stderr
    os.dup2(null, 1)
    os.dup2(null, 2)
    before = _peak_mib()
    for number in range(first, end):
        began = time.monotonic()
        _SHARED.pack_into(shared, 0, number, began)
        result = one(target, seed, number)
        result |= {"case": number, "seconds": round(time.monotonic() - began, 4)}
        results.write(json.dumps(result) + "\n")
        results.flush()
    peak = _peak_mib()
    results.write(json.dumps({"kind": "memory", "peak": peak, "grown": peak - before}) + "\n")
    results.flush()


def one(target: Target, seed: int, number: int) -> dict[str, str]:
    """The verdict on one case in this process."""
    try:
        return {"kind": "loaded" if target.run(make_case(target, seed, number)) else "refused"}
    except BaseException as error:  # a panic of a Rust library is no Exception
        return {"kind": "fault", "signature": signature(error)}


def signature(error: BaseException) -> str:
    """What tells one fault from another: the error and the innermost line of ours it came by."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "kog_triton" in f.filename or "fuzz" in f.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"
    text = " ".join(str(error).split())[:80]
    return f"{type(error).__name__} in {where}: {text}"


def limit_memory() -> None:
    """From here on this process may map MEMORY_LIMIT more bytes; no core files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _peak_mib() -> int:
    """The most memory this process ever held."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) >> 10
