"""The CUDA kernel's own source with a CPU thread for every block, judged by ThreadSanitizer.

A walk as in cuda_walk.py, but in a process of its own: what the kernel's pointers point at travels in a file
that is both sides' memory.
"""

import ctypes
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

import torch

from kog_triton.backends.cuda.launcher import UNLIMITED
from kog_triton.backends.cuda.layout.columns import lay_out_columns
from kog_triton.backends.cuda.layout.protocol import TENSORS
from kog_triton.backends.request_words import encode
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.cuda_walk import (
    FLAGS,
    HERE,
    INCLUDE,
    Walk,
    build_walk,
    layout_of,
    lower,
    memory,
    write_request,
)

JUDGED = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")
MOST = 1_000_000  # rounds of a block
ALIGNMENT = 1024  # of a tensor in the file
RACE = 66  # the judge's exit code


@dataclass(frozen=True)
class Verdict:
    """How a run ended: exit code, and what ThreadSanitizer had to say."""

    code: int
    report: str

    @property
    def places(self) -> set[str]:
        """Functions of the kernel that the reported accesses stand in, innermost or around it."""
        scopes = r"(?:\w+(?:<[\w:, ]*>)?::)*"
        return set(re.findall(rf"#\d+ [^(]*?\bkog::(?!host\b){scopes}(\w+)[(<]", self.report))


class ThreadWalk(Walk):
    """One model; `limit` of `run` counts microseconds."""

    source, slots = "decode.cu", 1

    def __init__(self, spec, weights, num_blocks, judged=True, include=INCLUDE, **changes):
        self.spec = spec
        self.layout = self._lay_out(num_blocks)
        judge = ("-g", "-pthread", "-DKOG_THREADS", *(JUDGED if judged else ()))
        flags = (*FLAGS[self.source], *judge)
        self.program = build_walk(self.layout, HERE / "threads.cpp", flags, include, **changes)
        self.memory = memory.allocate(self.layout, weights, self.slots, torch.device("cpu"))
        self.verdict = Verdict(0, "")

    def _lay_out(self, num_blocks):
        return layout_of(self.spec, num_blocks)

    def run(self, request, prompt, seed=0, limit=1 << 26, logits=None, absent=-1, control=0):
        """1, or -1 if the blocks did not end; `verdict` says what else there is to say."""
        assert absent < 0
        others = write_request(self.memory, request, prompt, logits, control)
        return self._launch([0], seed, limit, **others)

    def _launch(self, slots, seed, limit, **others):
        m = self.memory
        tensors = {name: getattr(m, name) for name in TENSORS} | others
        pointers = m.pointers(slots, limit, UNLIMITED)
        at = -(-ctypes.sizeof(pointers) // ALIGNMENT) * ALIGNMENT
        places = {}
        for name, tensor in tensors.items():
            places[name] = at
            setattr(pointers, name, at)
            at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(at)
            file.write(bytes(pointers))
            for name, tensor in tensors.items():
                file.seek(places[name])
                file.write(bytes_of(tensor))
            file.flush()
            self.verdict = self._judge(file.name, seed)
            for name, tensor in tensors.items():
                file.seek(places[name])
                bytes_of(tensor)[:] = file.read(tensor.nbytes)
        return -1 if self.verdict.code == 1 else 1

    def _judge(self, image: str, seed: int) -> Verdict:
        command = [str(self.program), image, str(seed), str(MOST)]
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
    options = "halt_on_error=1 report_signal_unsafe=0"  # nothing is suppressed
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TSAN_OPTIONS": options},
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's own memory."""
    assert tensor.is_contiguous()
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
