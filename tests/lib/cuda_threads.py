"""The CUDA kernel's own source with a CPU thread for every block, judged by ThreadSanitizer.

A walk as in cuda_walk.py, but in a process of its own: what the kernel's pointers point at travels in a file
that is both sides' memory.
"""

import ctypes
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace

import torch

from kog_triton.backends.cuda.launcher import UNLIMITED
from kog_triton.backends.cuda.layout.columns import lay_out_columns
from kog_triton.backends.cuda.layout.protocol import TENSORS
from kog_triton.backends.request_words import encode
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.cuda_walk import FLAGS, HERE, INCLUDE, Walk, build_walk, layout_of, lower, memory, write_request

JUDGED = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")
# Another judge: of accesses outside of a tensor, of shared memory or of an array, and of what C++ does not define.
# (Optimized, what it is to judge compiles for three times as long.)
BOUNDED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
MOST = 1_000_000  # rounds of a block
ALIGNMENT = 1024  # of a tensor in the file
RACE = 66  # a judge's exit code


@dataclass(frozen=True)
class Verdict:
    """How a run ended: exit code, and what the judge had to say."""

    code: int
    report: str

    @property
    def places(self) -> set[str]:
        """Functions of the kernel that the reported accesses stand in, innermost or around it."""
        scopes = r"(?:\w+(?:<[\w:, ]*>)?::)*"
        return set(re.findall(rf"#\d+ [^(]*?\bkog::(?!host\b){scopes}(\w+)[(<]", self.report))


def thread_flags(flags: tuple[str, ...], judge: tuple[str, ...]) -> tuple[str, ...]:
    """What a kernel whose blocks are threads is compiled with."""
    return (*flags, "-g1", "-pthread", "-DKOG_THREADS", *judge)


class ThreadWalk(Walk):
    """One model; `limit` of `run` counts microseconds."""

    source, slots = "decode.cu", 1

    def __init__(self, spec, weights, num_blocks, judge=JUDGED, include=INCLUDE, deep=False, **changes):
        self.spec = spec
        self.layout = replace(self._lay_out(num_blocks), deep=deep)
        flags = thread_flags(self._flags(), judge)
        self.program = build_walk(self.layout, HERE / "threads.cpp", flags, include, **changes)
        self.memory = memory.allocate(self.layout, weights, self.slots, torch.device("cpu"))
        self.verdict = Verdict(0, "")

    def _lay_out(self, num_blocks):
        return layout_of(self.spec, num_blocks)

    def _flags(self):
        return FLAGS[self.source]

    def run(self, request, prompt, seed=0, limit=1 << 26, logits=None, absent=-1, control=0):
        """1, or -1 if the blocks did not end; `verdict` says what else there is to say."""
        assert absent < 0
        others = write_request(self.memory, request, prompt, logits, control)
        return self._launch([0], seed, limit, **others)

    def _launch(self, slots, seed, limit, **others):
        pointers = self.memory.pointers(slots, limit, UNLIMITED, **others)
        tensors = {name: getattr(self.memory, name) for name in TENSORS} | others
        return self._judge_launch([pointers], [tensors], seed)

    def _judge_launch(self, arguments, memories, seed):
        """One argument and the tensors that it points at, by name, of each rank; ranks may share some."""
        size = sum(ctypes.sizeof(argument) for argument in arguments)
        at = -(-size // ALIGNMENT) * ALIGNMENT
        places = {}  # by address: offset in the file, and the tensor
        gaps = []  # behind each tensor, begin and end: nobody's
        for argument, tensors in zip(arguments, memories, strict=True):
            for name, tensor in tensors.items():
                if tensor.data_ptr() not in places:
                    places[tensor.data_ptr()] = (at, tensor)
                    gaps.append(at + tensor.nbytes)
                    at += (-(-tensor.nbytes // ALIGNMENT) + 1) * ALIGNMENT
                    gaps.append(at)
                setattr(argument, name, places[tensor.data_ptr()][0])
        for argument in arguments:
            for name in ("peers", "errors") if len(arguments) > 1 else ():
                peers = getattr(argument, name)
                for rank in range(len(arguments)):
                    peers[rank] = places[peers[rank]][0]
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(at)
            for argument in arguments:
                file.write(bytes(argument))
            for place, tensor in places.values():
                file.seek(place)
                file.write(bytes_of(tensor))
            file.flush()
            self.verdict = self._judge(file.name, seed, gaps)
            for place, tensor in places.values():
                file.seek(place)
                bytes_of(tensor)[:] = file.read(tensor.nbytes)
        return -1 if self.verdict.code == 1 else 1

    def _judge(self, image: str, seed: int, gaps: list[int]) -> Verdict:
        command = [str(self.program), image, str(seed), str(MOST), *map(str, gaps)]
        done = judged_run(command)
        if "unexpected memory mapping" in done.stderr:  # addresses too random for the judge
            done = judged_run(["setarch", "-R", *command])
        assert done.returncode in (0, 1, RACE), done.stderr
        return Verdict(done.returncode, done.stderr)


class ColumnThreadWalk(ThreadWalk):
    """ThreadWalk of a kernel of several columns: requests, or positions of one prompt if it is a `chunk`."""

    source = "columns.cu"

    def __init__(self, spec, weights, num_blocks, columns, chunk=False, **options):
        self.columns, self.chunk, self.slots = columns, chunk, 1 if chunk else columns
        super().__init__(spec, weights, num_blocks, **options)

    def _lay_out(self, num_blocks):
        lowering = lower(build(self.spec), GPUS["h200"], num_blocks)
        return lay_out_columns(lowering, 64, self.columns, self.chunk)

    def serve(self, requests, seed=0, limit=1 << 26):
        """One launch of requests in slots 0, 1, ..."""
        m = self.memory
        for tensor in (m.words, m.error, m.mailbox):
            tensor.zero_()
        for r in requests:
            m.write_request(r.slot, encode(r, self.spec.vocab_size), r.prompt, r.cached)
        slots = [r.slot for r in requests]
        return self._launch(slots * self.columns if self.chunk else slots, seed, limit)


def judged_run(command: list[str]) -> subprocess.CompletedProcess[str]:
    options = {
        "TSAN_OPTIONS": "halt_on_error=1 report_signal_unsafe=0",  # nothing is suppressed
        "ASAN_OPTIONS": f"exitcode={RACE} detect_leaks=0",  # blocks stay until the process ends
        "UBSAN_OPTIONS": f"exitcode={RACE} print_stacktrace=1",
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | options)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's own memory."""
    assert tensor.is_contiguous()
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
