"""The CUDA kernel's own source on a CPU: compiled by g++ over lib/cuda_host, run as fibers, one GPU thread each."""

import ctypes
import functools
import itertools
import re
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from kog_triton.backends import Availability
from kog_triton.backends.cuda import memory
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.launcher import UNLIMITED
from kog_triton.backends.cuda.layout import header, layout
from kog_triton.backends.cuda.layout.columns import COUNTS, POSITIONS
from kog_triton.backends.cuda.matrices import ArenaMatrices
from kog_triton.backends.cuda.prompt_texts import PromptKernels
from kog_triton.backends.mailbox import Request
from kog_triton.backends.pace import Pace
from kog_triton.backends.request_words import OFFSETS, encode, encode_logits
from kog_triton.backends.token_words import NUMBER_MASK
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests import ROOT
from tests.lib.compiled import made_once, version_of

HERE = Path(__file__).parent / "cuda_host"
INCLUDE = ROOT / "backends/cuda/include"
MOST = 4_000_000  # rounds
POLL_S = 2e-3  # how often the host looks for tokens
GREEDY = SamplingParams(temperature=0)
FLAGS = {
    "decode.cu": ("-O1",),
    "stage.cu": ("-O0", "-DSTAGE"),  # of what is launched a few times
    "columns.cu": ("-O1", "-DCOLUMNS"),
    "head_steps.cu": ("-O1", "-DHEAD_STEPS"),
    "head_step.cu": ("-O1", "-DHEAD_STEP"),
}


def layout_of(spec, num_blocks=0, max_context=64, gpu="h200"):
    lowering = lower(build(spec), GPUS[gpu], num_blocks)
    return layout.lay_out(lowering, max_context)


def changed(text: str, **numbers) -> str:
    """A layout's header with other numbers, by their names in snake case, where they are given."""
    for name, wanted in numbers.items():
        if wanted:
            camel = "k" + "".join(map(str.capitalize, name.split("_")))
            text, count = re.subn(rf"{camel} = \w+;", f"{camel} = {wanted};", text)
            assert count == 1
    return text


def build_walk(
    layout, source, flags, include=INCLUDE, split_least=None, merged_length=None, streams=None, seams=(HERE,), entry=""
) -> Path:
    """What g++ makes of one model and a source of cuda_host; kept by content.

    seams  folders whose headers stand before those of `include`
    entry  the text of a kernel's source, behind the layout's header
    """
    changes = {"split_least": split_least, "merged_length": merged_length, "streams": streams}
    text = changed(header.render(layout), **changes) + entry
    folders = [*seams, include]
    sources = [source, *(header for each in folders for header in sorted(each.rglob("*.h")))]
    parts = [version_of("g++"), text.encode(), " ".join(flags).encode()]

    def make(draft: Path) -> None:
        draft.with_suffix(".h").write_text(text)
        subprocess.run(
            ["g++", "-std=c++20", "-Wno-unknown-pragmas", *flags,
             f'-DGENERATED="{draft.with_suffix(".h")}"', *(f"-I{folder}" for folder in folders),
             str(source), "-o", str(draft)],
            check=True,
        )  # fmt: skip

    return made_once([*parts, *(path.read_bytes() for path in sources)], make)


def compile_walk(layout, flags=("-O1",), include=INCLUDE, **changes):
    """The shared library of one model."""
    made = build_walk(layout, HERE / "run.cpp", ("-shared", "-fPIC", *flags), include, **changes)
    loaded = ctypes.CDLL(str(made))
    loaded.kog_run.restype = ctypes.c_long
    return loaded


def write_request(m, request, prompt, logits, control):
    """One request's words into slot 0 of memory as it is before a launch, and what the launch takes besides."""
    for tensor in (m.words, m.error, m.mailbox):
        tensor.zero_()
    m.mailbox[0] = control
    m.write_request(0, request, prompt, int(request[OFFSETS["first"]]))
    return {} if logits is None else {"logits": logits}


class Walk:
    """One model on the emulated GPU."""

    def __init__(
        self,
        spec,
        weights,
        num_blocks=0,
        max_context=64,
        split_least=None,
        merged_length=None,
        flags=("-O1",),
        streams=None,
        deep=False,
    ):
        self.spec = spec
        self.layout = replace(layout_of(spec, num_blocks, max_context), deep=deep)
        self.library = compile_walk(
            self.layout, flags, split_least=split_least, merged_length=merged_length, streams=streams
        )
        self.memory = memory.allocate(self.layout, weights, 1, torch.device("cpu"))

    def run(self, request, prompt, seed=0, limit=1 << 20, logits=None, absent=-1, control=0):
        """Rounds that one request's words in slot 0 took, or -1."""
        others = write_request(self.memory, request, prompt, logits, control)
        pointers = self.memory.pointers([0], limit, UNLIMITED, **others)
        left_out = (absent, int(absent >= 0))
        return self.library.kog_run(ctypes.byref(pointers), seed, *left_out, ctypes.c_long(MOST))

    def store_late(self, region, rounds, rows=None, memory=None):
        """In the next run stores to a region's words, or its first rows', land up to so many rounds late, in any
        order; in this memory or another rank's."""
        words = self.layout.regions[region]
        first = (memory or self.memory).words.data_ptr() + 4 * words.offset
        stored = words.end - words.offset if rows is None else rows * words.stride
        count = ctypes.c_long(stored)
        self.library.kog_store_late(ctypes.c_void_p(first), count, ctypes.c_long(rounds))

    def fetches(self):
        """What the last run asked to come into the L2: addresses and bytes [n, 2]."""
        count = ctypes.c_long()
        self.library.kog_fetches.restype = ctypes.POINTER(ctypes.c_int64)
        first = self.library.kog_fetches(ctypes.byref(count))
        return np.ctypeslib.as_array(first, (count.value, 2)).copy()

    @property
    def outcome(self):
        return int(self.memory.mailbox[2])

    def forward_logits(self, tokens, seed=0, limit=1 << 20):
        """Logits [tokens, vocab], every position."""
        count = len(tokens)
        out = torch.full((count, self.spec.vocab_size), torch.nan)
        assert self.run(encode_logits(count), tokens, seed, limit, logits=out) > 0
        assert self.outcome == 2, (self.memory.mailbox, self.memory.error)
        return out.numpy()

    def words(self, prompt, count, params=GREEDY, stops=(), **fields):
        request = Request(0, tuple(prompt), params, params.seed or 0, count, frozenset(stops), **fields)
        return encode(request, self.spec.vocab_size)

    def generate(self, prompt, count, params=GREEDY, stops=(), seed=0, control=0):
        """Tokens and outcome."""
        assert self.run(self.words(prompt, count, params, stops), prompt, seed, control=control) > 0
        return self.tokens(), self.outcome

    def tokens(self):
        """What slot 0 said; -1 for logits that are not finite."""
        words = self.memory.outbox[0, :, 0].tolist()
        made = words.index(0)
        assert [w >> 32 & NUMBER_MASK for w in words[:made]] == list(range(1, made + 1))
        return [int(np.int32(np.uint32(w & 0xFFFFFFFF))) for w in words[:made]]


class FiberKernel:
    """The kernel on the emulated GPU behind the methods of RankKernel: a launch is a thread."""

    def __init__(self, layout, flags, seed):
        self.layout, self.flags, self.seed = layout, flags, seed
        self.launches, self.absent, self.absent_rank = 0, -1, None

    @functools.cached_property
    def library(self):
        return self.compiled()

    def compiled(self, include=INCLUDE):
        """Its library, of other headers where some are given."""
        return compile_walk(self.layout, self.flags, include)

    def launch(self, blocks, threads, arguments):
        """`absent`: a block that never comes, of those of all ranks; `absent_rank`: all blocks of a rank."""
        self.launches += 1
        each = (type(arguments[0]) * len(arguments))(*arguments)
        left_out = self.absent, int(self.absent >= 0)
        if self.absent_rank is not None:
            left_out = self.absent_rank * blocks, blocks
        self.last = FiberLaunch(self.library, each, self.seed + self.launches, left_out)
        return self.last

    def time(self, blocks, threads, argument, before):
        before()
        begun = time.perf_counter()
        self.launch(blocks, threads, [argument]).synchronize()
        return time.perf_counter() - begun

    def resources(self):
        """None: a CPU's function has no registers to tell of."""

    def close(self):
        pass


class FiberLaunch(threading.Thread):
    """A launch in flight; what it cannot say as an error of its request fails the test."""

    def __init__(self, library, arguments, seed, left_out):
        super().__init__(daemon=True)
        self._run = lambda: library.kog_run(ctypes.byref(arguments), seed, *left_out, ctypes.c_long(MOST))
        self.start()

    def run(self):
        self.rounds = self._run()

    def query(self):
        if self.is_alive():
            return False
        assert self.rounds > 0, "blocks of the emulated GPU wait for ever"
        return True

    def synchronize(self):
        self.join()
        assert self.query()


class FiberBackend(CudaBackend):
    """The CUDA backend with the emulated GPU in place of a real one; requests go round robin."""

    column_counts = ()
    columns_ahead = False  # where a test opens them, it says which
    chunk_positions = 0
    early_kernels = deep_kernel = False
    prompt_kernels = PromptKernels(False, False)  # tests/lib/short_pass.py has passes

    @classmethod
    def availability(cls):
        return Availability(True)

    def __init__(self, weights, options, num_blocks=2, seed=0):
        self._seed, self._moments = seed, itertools.count(0, 1 << 20)
        # The kernel's own prefill is what is tested, unless another is asked for.
        prefill = "kernel" if options.prefill == "auto" else options.prefill
        super().__init__(weights, replace(options, prefill=prefill), num_blocks)
        self.wait_ns = 1 << 20  # rounds

    def generate(self, mailbox):
        """Looks for tokens less often than beside a real GPU: the emulated one needs the CPU itself."""
        with mock.patch.object(Pace, "wait", lambda *_: time.sleep(POLL_S)):
            super().generate(mailbox)

    def _open_devices(self):
        return [torch.device("cpu")] * self.num_devices, GPUS["h200"]

    def _compile(self, source, layout):
        """A kernel that is launched is compiled then: many tests launch one of those that a backend has."""

    def _compile_products(self):
        """Its kernels are Hopper's own: what they read is unpacked instead."""

    def _open_matrices(self, lowering, memory, rank):
        from tests.lib.unpacked import unpacking_of  # which takes its folders from here

        unpacking = unpacking_of(lowering, memory, rank=rank) if self.spec.narrow else None
        return ArenaMatrices(lowering, memory.weights, memory.embed.dtype, unpacking)

    def _read_clocks(self):
        """Clocks that agree: every emulated GPU counts the same rounds."""
        asked = next(self._moments)
        return np.array([[[asked, asked + 1, asked + 2]]] * (self.num_devices - 1))

    def _load(self, source, entry, layout):
        return FiberKernel(layout, FLAGS[source], self._seed)


class ColumnBackend(FiberBackend):
    """FiberBackend with kernels of columns, compiled before a request comes."""

    def __init__(self, weights, options, num_blocks=2, seed=0, counts=COUNTS):
        self.column_counts = counts
        super().__init__(weights, options, num_blocks, seed)
        for count in self.columns.counts:
            if not self.columns.ready(count):
                self.settle()
                assert self.columns.ready(count), f"no kernel of {count} columns"
        self.first_tokens.begin()
        self.settle()


class ChunkBackend(FiberBackend):
    """FiberBackend with prompts in chunks of so many positions; requests go round robin."""

    def __init__(self, weights, options, num_blocks=2, seed=0, positions=POSITIONS):
        self.chunk_positions = positions
        super().__init__(weights, options, num_blocks, seed)
        self.settle()


class BothBackend(ColumnBackend):
    """Chunks for prompts, columns for what follows."""

    chunk_positions = POSITIONS


def noting(sources: list[str]) -> type[FiberBackend]:
    """The backend of a model whose prompts may run in chunks; it notes every source that it begins to compile."""

    class Noting(FiberBackend):
        chunk_positions = POSITIONS

        def _compile(self, source, layout):
            sources.append(source)
            super()._compile(source, layout)

    return Noting
