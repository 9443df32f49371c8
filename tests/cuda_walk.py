"""The CUDA kernel's own source on a CPU: compiled by g++ over tests/cuda_host, run as fibers, one GPU thread each."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

import kog_triton.backends
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "backends") not in kog_triton.backends.__path__:
    kog_triton.backends.__path__.append(str(ROOT / "backends"))

from kog_triton.backends.cuda import header, memory  # noqa: E402

HERE = Path(__file__).parent / "cuda_host"
CACHE = Path(tempfile.gettempdir()) / "kog-cuda-walk"
MOST = 4_000_000  # rounds


def layout_of(spec, num_blocks=0, max_context=64):
    lowering = lower(build(spec), GPUS["h200"], num_blocks)
    return header.lay_out(lowering, max_context)


def compile_walk(layout, flags=("-O1",), split_least=None):
    """The shared library of one model, kept by content."""
    text = header.render(layout)
    if split_least:
        text = text.replace(f"kSplitLeast = {header.SPLIT_LEAST}", f"kSplitLeast = {split_least}")
    sources = [HERE / "run.cpp", HERE / "kog/ptx.h"]
    sources += sorted((ROOT / "backends/cuda/include/kog").glob("*.h"))
    digest = hashlib.sha256(text.encode() + " ".join(flags).encode())
    for source in sources:
        digest.update(source.read_bytes())
    CACHE.mkdir(exist_ok=True)
    stem = CACHE / digest.hexdigest()[:24]
    library = stem.with_suffix(".so")
    if not library.exists():
        draft = CACHE / f"{stem.name}.{os.getpid()}"
        draft.with_suffix(".h").write_text(text)
        subprocess.run(
            ["g++", "-std=c++20", "-shared", "-fPIC", "-Wno-unknown-pragmas", *flags,
             f'-DGENERATED="{draft.with_suffix(".h")}"', f"-I{HERE}", f"-I{ROOT}/backends/cuda/include",
             str(HERE / "run.cpp"), "-o", str(draft)],
            check=True,
        )  # fmt: skip
        os.replace(draft, library)
    return ctypes.CDLL(str(library))


class Walk:
    """One model on the emulated GPU."""

    def __init__(
        self, spec, weights, num_blocks=0, max_context=64, split_least=None, flags=("-O1",)
    ):
        self.spec = spec
        self.layout = layout_of(spec, num_blocks, max_context)
        self.library = compile_walk(self.layout, flags, split_least)
        self.library.kog_run.restype = ctypes.c_long
        self.memory = memory.allocate(self.layout, weights, 1, torch.device("cpu"))

    def run(self, request, prompt, seed=0, limit=1 << 20, logits=None, absent=-1, control=0):
        m = self.memory
        for tensor in (m.words, m.error, m.mailbox):
            tensor.zero_()
        m.mailbox[0] = control
        words = np.zeros(memory.REQUEST_WORDS, np.int64)
        words[: len(request)] = request
        m.request.copy_(torch.from_numpy((words & 0xFFFFFFFF).astype(np.uint32).view(np.int32)))
        m.tokens[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        others = {} if logits is None else {"logits": logits}
        pointers = m.pointers(0, limit, **others)
        return self.library.kog_run(ctypes.byref(pointers), seed, absent, ctypes.c_long(MOST))

    def forward_logits(self, tokens, seed=0):
        """Logits [tokens, vocab], every position."""
        count = len(tokens)
        out = torch.full((count, self.spec.vocab_size), torch.nan)
        assert self.run([0, count, count, 0, 1, 0, 0, 0, 0, 1], tokens, seed, logits=out) > 0
        assert int(self.memory.mailbox[2]) == 2, (self.memory.mailbox[:4], self.memory.error)
        return out.numpy()

    def generate(self, prompt, count, sampling=(1, 0, 0, 0, 0), stops=(), seed=0, control=0):
        """Tokens and outcome; sampling = greedy, seed low, seed high, sample, scale bits."""
        request = [0, len(prompt), count, len(stops), *sampling, 0] + [0] * 6 + list(stops)
        assert self.run(request, prompt, seed, control=control) > 0
        box = self.memory.mailbox.numpy()
        made = int(box[3])
        words = box[8 : 8 + 2 * made : 2]
        assert [int(w) >> 32 for w in words] == list(range(1, made + 1))
        return [int(w) & 0xFFFFFFFF for w in words], int(box[2])
