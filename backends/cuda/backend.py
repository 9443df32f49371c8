"""CudaBackend: the monokernel of one model on one Hopper GPU.

What the kernel cannot do is refused by name before anything runs. How requests share it, and how they come
and go, is kog_triton/backends/serving.py's and launcher.py's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kog_triton.backends import Availability, BackendOptions, WeightSource, refuse_narrow
from kog_triton.backends.compile_log import waited_for
from kog_triton.backends.cuda.chunks import POSITIONS, Chunks
from kog_triton.backends.cuda.columns import ColumnKernel, Columns
from kog_triton.backends.cuda.compilers import Background
from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.jit import begin_cubin, compile_cubin
from kog_triton.backends.cuda.launcher import (
    UNLIMITED,
    CudaLauncher,
    Finished,
    check_launch,
    check_waits,
)
from kog_triton.backends.cuda.layout.columns import COUNTS
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout, lay_out
from kog_triton.backends.cuda.layout.prompt import KERNELS, ProductKernel, render_product
from kog_triton.backends.cuda.layout.protocol import TENSORS, StageCall
from kog_triton.backends.cuda.memory import HALF, Memory, allocate, plan_of, stamp_tensors
from kog_triton.backends.cuda.products import ArenaProducts
from kog_triton.backends.cuda.recording import record
from kog_triton.backends.cuda.stages import StageRunner
from kog_triton.backends.cuda.toolchain import ARCHS, HOPPER, compiler_name
from kog_triton.backends.device import gpu_of
from kog_triton.backends.gpu_entry import GpuEntry
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.memory_plan import check_memory
from kog_triton.backends.nvidia_driver import arch_of
from kog_triton.backends.prefill.forward import import_fused
from kog_triton.backends.prefill.library import begin_prompt, fuses, open_library, wants_library
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.backends.prefill.weights import Matrices
from kog_triton.backends.recording import Recording
from kog_triton.backends.request_words import encode, encode_logits
from kog_triton.backends.resources import Resources
from kog_triton.backends.serving import MASK_S, LaunchServing
from kog_triton.backends.unseen_gpu import unseen_gpu
from kog_triton.backends.watchdog import free_what_was_kept
from kog_triton.errors import DeviceError, ModelError, RequestError
from kog_triton.model.spec import DTYPES, ModelSpec
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.cuda import CudaLowering, lower
from kog_triton.schedule.cuda_weights import unreadable
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import Gpu

PRODUCTS = (
    "prompt.cu"  # reads weights of 16 bits alone: prompts of others run in the kernel of chunks
)
WAIT_NS = int(2 * MASK_S * 1e9)  # that a wait of the kernel may take: more than a mask


def _kernel_prompts(options: BackendOptions) -> BackendOptions:
    """For narrow weights."""
    if options.prefill == "library":
        raise ModelError("prompts of narrow weights run in the kernel: choose --prefill kernel")
    return replace(options, prefill="kernel") if options.prefill == "auto" else options


class CudaBackend:
    name = "cuda"
    vendors = ("nvidia",)
    rank = 1
    plans_memory = True
    num_devices = 1
    column_counts = COUNTS  # of the kernels that serve several requests together
    columns_ahead = True  # compiled as a model is opened, or when requests first share a step
    chunk_positions = POSITIONS  # of a step of a prompt; 0: a token at a time
    _blank: torch.Tensor | None = None  # zeros

    @classmethod
    def availability(cls) -> Availability:
        if not torch.cuda.is_available() or torch.version.hip:
            gpu = unseen_gpu()
            if gpu is not None and gpu.arch in ARCHS:
                return Availability(False, gpu.reason, gpu.advice, lacks_software=True)
            return Availability(
                False, "torch sees no NVIDIA GPU", "run on a machine with a Hopper GPU"
            )
        name, arch = torch.cuda.get_device_name(), arch_of(*torch.cuda.get_device_capability())
        if arch not in ARCHS:
            reason = f"{name} is {arch}, and it takes {', '.join(ARCHS)}"
            return Availability(False, reason, "choose --backend triton")
        try:
            compiler_name()
        except DeviceError as error:
            return Availability(
                False, str(error), 'pip install "kog-triton[cuda]"', lacks_software=True
            )
        return Availability(
            True, by_name_only="" if arch == HOPPER else f"it has not run on {arch} yet"
        )

    @classmethod
    def why_not_narrow(cls, spec: ModelSpec) -> str:
        return unreadable(build(spec))

    def __init__(self, weights: WeightSource, options: BackendOptions, num_blocks: int = 0) -> None:
        refuse_narrow(type(self), weights.spec)
        if options.num_gpus != 1:
            raise DeviceError("the cuda backend runs on one GPU: choose --gpus 1")
        available = self.availability()
        if not available.ok:
            raise DeviceError(
                f"the cuda backend cannot run: {available.reason}; {available.advice}"
            )
        if weights.spec.narrow:
            options = _kernel_prompts(options)
        self.options, self.spec = options, weights.spec
        if options.dtype != "auto":
            self.spec = self.spec.replace(dtype=DTYPES[options.dtype])
        if self.spec.dtype not in HALF:
            raise ModelError(
                "the cuda backend reads 16-bit weights, and these are fp32: choose --dtype bf16 or fp16"
            )
        if self.spec.kv_dtype not in (None, self.spec.dtype):
            raise ModelError("the cuda backend keeps keys and values in the type of the weights")
        free_what_was_kept()
        self.device, self.gpu = self._open_device()
        self._entry = GpuEntry(self.device)
        self.options = options = prompts_of(self.gpu, options)
        self.max_context = options.max_context or self.spec.max_context
        self.wait_ns = WAIT_NS
        self._stages: StageRunner | None = None  # compiled when it is asked for
        self._kernels: list[Kernel] = []
        self._ahead: dict[
            tuple[int, str], tuple[Layout, bytes]
        ] = {}  # by the layout's id, which lives on here
        lowering = lower(build(self.spec), self.gpu, num_blocks)
        check_lowering(lowering)
        self.layout = lay_out(lowering, self.max_context)
        check_memory(plan_of(self.layout, options.num_slots), self.device, options.memory_share)
        compile_columns = partial(self._compile_ahead, "columns.cu")
        load_columns = partial(self._open_kernel, "columns.cu", "kog_columns")
        # Weights are read and packed while compilers work, each in a process of its own; behind them kernels are found
        # kept. A request waits for the first alone.
        beside = Background(most=4)
        try:
            compiled = beside.submit(self._compile_ahead, "decode.cu", self.layout)
            if wants_library(options, self.device):
                self._products_compiled = beside.submit(self._compile_products)
                if fuses(self.device):
                    beside.submit(import_fused)
            self.chunks = Chunks(
                lowering,
                self.max_context,
                0 if options.prefill in ("library", "decode") else self.chunk_positions,
                beside,
                compile_columns,
                load_columns,
            )
            counts = [c for c in self.column_counts if c < 2 * options.num_slots]
            self.columns = Columns(
                lowering, self.max_context, counts, compile_columns, load_columns
            )
            if self.columns_ahead:
                self.columns.begin()
            with self._entry.on_stream():
                self.memory = allocate(self.layout, weights, options.num_slots, self.device)
                matrices = partial(self._open_matrices, lowering)
                self.library = open_library(
                    options,
                    weights,
                    self.spec,
                    self.max_context,
                    self.memory.embed[:, : self.spec.hidden_size],
                    self.memory.rope,
                    matrices,
                )
            compiled.result()
        except BaseException:
            self.__dict__.clear()  # in a cycle, it would hold the weights until the collector comes
            raise
        self.kernel = self._open_kernel("decode.cu", "kog_decode", self.layout)

    def _open_device(self) -> tuple[torch.device, Gpu]:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=device)  # makes torch's context, which the driver calls need
        gpu = gpu_of(device)
        assert gpu is not None
        return device, gpu

    def _open_kernel(self, source: str, entry: str, layout: Layout) -> Kernel:
        self._kernels.append(self._load(source, entry, layout))
        return self._kernels[-1]

    def _compile_products(self) -> None:
        for kernel in KERNELS:
            begin_cubin(render_product(kernel, self.spec.dtype), PRODUCTS, self.gpu.arch)
        for kernel in KERNELS:
            compile_cubin(render_product(kernel, self.spec.dtype), PRODUCTS, self.gpu.arch)

    def _open_matrices(self, lowering: CudaLowering) -> Matrices:
        def load(kernel: ProductKernel, entry: str, shared: int) -> Kernel:
            cubin = compile_cubin(render_product(kernel, self.spec.dtype), PRODUCTS, self.gpu.arch)
            self._kernels.append(Kernel(cubin, entry, shared, self.device))
            return self._kernels[-1]

        with waited_for("the kernels of products"):
            self._products_compiled.result()
        return ArenaProducts(lowering, self.memory.weights, self.memory.embed.dtype, load)

    def _compile(self, source: str, layout: Layout) -> bytes:
        return compile_cubin(render(layout), source, layout.lowering.gpu.arch)

    def _compile_ahead(self, source: str, layout: Layout) -> None:
        """For `_load`. To render a layout and find its kernel takes 0.1 s or more, in which the thread that launches
        would leave every request without a token."""
        self._ahead[id(layout), source] = layout, self._compile(source, layout)

    def _load(self, source: str, entry: str, layout: Layout) -> Kernel:
        _, cubin = self._ahead.pop((id(layout), source), (layout, b""))
        cubin = cubin or self._compile(source, layout)
        return Kernel(cubin, entry, layout.shared_bytes, self.device)

    # ---- entry points ----

    def generate(self, mailbox: Mailbox) -> None:
        """Serve until the mailbox is idle, closed or yields."""
        whole = self.options.prefill == "decode"
        launcher = CudaLauncher(
            self.spec,
            self.memory,
            self.columns,
            self.chunks,
            self._prompt,
            self._admit,
            self._score,
            self._launch_slots,
            whole,
        )
        with self._entry.serving(self._free):
            LaunchServing(launcher, mailbox, self._entry.queue).run()

    def _admit(self, request: Request, position: int) -> None:
        words = encode(request, self.spec.vocab_size)  # while the GPU runs the prompt
        self.memory.write_request(request.slot, words, request.prompt, position)

    def _prompt(self, request: Request) -> PromptRun | None:
        cache = self.memory.cache[request.slot][..., : self.spec.head_dim]
        crossover = self.chunks.crossover
        return begin_prompt(self.library, self.options.prefill, request, cache, crossover)

    def _score(self, request: Request, first: int, last: int) -> np.ndarray:
        """Run positions [first, last) of a prompt in its slot: their logits, float32 [last - first, vocab]."""
        logits = torch.zeros(last - first, self.spec.vocab_size, device=self.device)
        words, prompt = encode_logits(last), request.prompt[:last]
        self.memory.write_request(request.slot, words, prompt, first)
        self._launch(self.memory, [request.slot], UNLIMITED, logits=logits).synchronize()
        check_launch(self.memory, self.layout)
        return logits.cpu().numpy()

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab]; runs in a cache of its own."""
        count = len(token_ids)
        if count > self.max_context:
            raise RequestError(f"{count} tokens do not fit the context of {self.max_context}")
        with self._entry.at_once():
            return self._logits(token_ids)

    def _logits(self, token_ids: Sequence[int]) -> np.ndarray:
        count = len(token_ids)
        memory = self.memory.apart()
        logits = torch.zeros(count, self.spec.vocab_size, device=self.device)
        memory.write_request(0, encode_logits(count), token_ids, 0)
        self._launch(memory, [0], UNLIMITED, logits=logits).synchronize()
        check_launch(memory, self.layout)
        return logits.cpu().numpy()

    def run_stage(self, stage: str, layer: int, state: Mapping[str, Any]) -> dict[str, Any]:
        with self._entry.at_once():
            return self._stage_runner().run(stage, layer, state)

    def time_stage(
        self, stage: str, layer: int, state: Mapping[str, Any], before: Callable[[], None]
    ) -> list[float]:
        with self._entry.at_once():
            runner = self._stage_runner()
            runner.run(stage, layer, state, before)
            return runner.seconds

    def _stage_runner(self) -> StageRunner:
        if self._stages is None:
            kernel = self._open_kernel("stage.cu", "kog_stage", self.layout)
            memory = self.memory.apart()

            def launch(call: StageCall, before: Callable[[], None]) -> float:
                blocks, threads = self.layout.lowering.num_blocks, self.layout.threads
                seconds = kernel.time(blocks, threads, call, before)
                check_waits(memory, self.layout)
                return seconds

            self._stages = StageRunner(self.layout, memory, launch, self.wait_ns)
        return self._stages

    def profile(self, prompt: Sequence[int], tokens: int) -> Recording:
        """Stamps of `tokens` greedy steps behind the prompt, by a kernel compiled to take as many."""
        if len(prompt) + tokens > self.max_context:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {tokens} more do not fit the context of "
                f"{self.max_context}"
            )
        with self._entry.at_once():
            return self._profile(prompt, tokens)

    def _profile(self, prompt: Sequence[int], tokens: int) -> Recording:
        layout = replace(self.layout, profile_tokens=tokens)
        memory = replace(self.memory.apart(), **stamp_tensors(layout, self.device))
        stamping = self._load("decode.cu", "kog_decode", layout)

        def launch(kernel: Kernel) -> None:
            self._launch(memory, [0], UNLIMITED, kernel).synchronize()
            check_launch(memory, layout)

        try:
            return record(
                layout, memory, prompt, [partial(launch, k) for k in (self.kernel, stamping)]
            )
        finally:
            stamping.close()

    def resources(self) -> Resources | None:
        """Of the kernel of one token, which takes no stamps."""
        return self.kernel.resources()

    def settle(self) -> None:
        self.columns.settle()
        self.chunks.settle(self.device)
        while self.make_ready():
            pass

    def make_ready(self) -> bool:
        if self.library is None:
            return False
        with self._entry.at_once():
            return self.library.make_ready()

    def memory_bytes(self) -> dict[str, int]:
        m = self.memory
        weights = m.weights.nbytes + m.embed.nbytes
        total = sum(getattr(m, name).nbytes for name in TENSORS)
        blank = 0 if self._blank is None else self._blank.nbytes
        other = total - weights - m.cache.nbytes + blank + self.columns.memory_bytes()
        other += self.chunks.memory_bytes()
        if self.library is not None:
            other += self.library.memory_bytes()
        return {"weights": weights, "kv_cache": m.cache.nbytes, "other": other}

    def close(self) -> None:
        self._entry.close(self._free)

    def _free(self) -> None:
        self.columns.close()
        for kernel in self._kernels:
            kernel.close()
        self._kernels, self._stages = [], None
        self.chunks.close()
        self.library = self._blank = None
        del self.memory

    # ---- a launch ----

    def _launch_slots(
        self, slots: Sequence[int], most_steps: int, step: ColumnKernel | None
    ) -> tuple[Layout, Finished]:
        """Start the kernel of one token on slots round robin, or one of columns on all of them together."""
        if step is None:
            return self.layout, self._launch(self.memory, slots, most_steps)
        memory = replace(self.memory, words=step.words, scores=step.scores)
        cursors = [*slots] * step.layout.columns if step.layout.chunk else slots
        return step.layout, self._launch(memory, cursors, most_steps, step.kernel)

    def _launch(
        self,
        memory: Memory,
        slots: Sequence[int],
        most_steps: int,
        kernel: Kernel | None = None,
        **others: torch.Tensor,
    ) -> Finished:
        """Start the kernel on slots of `memory`; what comes back says when it has ended."""
        self._clear(memory)
        pointers = memory.pointers(slots, self.wait_ns, most_steps, **others)
        kernel = kernel or self.kernel
        return kernel.launch(self.layout.lowering.num_blocks, self.layout.threads, pointers)

    def _clear(self, memory: Memory) -> None:
        """Zero what a launch finds zero; on the GPU by copies, for a fill is a kernel beside ours."""
        if self._blank is None or len(self._blank) < len(memory.words):
            self._blank = torch.zeros_like(memory.words)
        for tensor in (memory.words, memory.error):
            tensor.copy_(self._blank[: len(tensor)])
        memory.mailbox.zero_()


def prompts_of(gpu: Gpu, options: BackendOptions) -> BackendOptions:
    """The options with the prompts that this GPU can run: the products of prompt.cu are Hopper's own instructions
    (wgmma), without which prompts go in chunks. DeviceError where the library is asked for."""
    if gpu.arch == HOPPER or options.prefill in ("kernel", "decode"):
        return options
    if options.prefill == "library":
        raise DeviceError(
            f"the products of prompts are for Hopper GPUs, and {gpu.name} is {gpu.arch}: choose --prefill kernel"
        )
    return replace(options, prefill="kernel")
