"""CudaBackend: the monokernel of one model on one Hopper GPU, or a rank of it on each of several.

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
from kog_triton.backends.cuda.chunks import Chunks
from kog_triton.backends.cuda.columns import ColumnKernel, Columns, make_kernel
from kog_triton.backends.cuda.compilers import Background
from kog_triton.backends.cuda.deep import LEAST, DeepKernel, deep_layout
from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.early import FirstKernels
from kog_triton.backends.cuda.gpus import open_gpus
from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.launcher import UNLIMITED, CudaLauncher, check_launch, check_waits
from kog_triton.backends.cuda.layout.columns import COUNTS, POSITIONS, LayOut
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout, lay_out
from kog_triton.backends.cuda.layout.protocol import TENSORS, StageCall
from kog_triton.backends.cuda.layout.unpack import unpacked_bytes, unpacked_stages
from kog_triton.backends.cuda.memory import HALF, Memory, plan_of, stamp_tensors
from kog_triton.backends.cuda.placing import Placing
from kog_triton.backends.cuda.prompt_options import prompts_of
from kog_triton.backends.cuda.prompts_beside import PromptsBeside
from kog_triton.backends.cuda.rank_clocks import open_clocks, read_clocks
from kog_triton.backends.cuda.rank_kernel import Finished, RankKernel
from kog_triton.backends.cuda.rank_memory import Ranks, allocate_ranks
from kog_triton.backends.cuda.rank_outputs import outputs_bytes
from kog_triton.backends.cuda.recording import record
from kog_triton.backends.cuda.short_pass import workspace_bytes
from kog_triton.backends.cuda.short_prompts import ShortPrompts, stream_of
from kog_triton.backends.cuda.stages import StageRunner
from kog_triton.backends.cuda.toolchain import compiler_name
from kog_triton.backends.cuda_archs import HOPPER, not_compiled_for
from kog_triton.backends.gpu_entry import GpuEntry
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.memory_plan import check_memory
from kog_triton.backends.nvidia_driver import arch_of
from kog_triton.backends.prefill.fused_ahead import import_fused
from kog_triton.backends.prefill.library import fuses, library_for, wants_library
from kog_triton.backends.prefill.ranks import RankPrefill, bucket_bytes
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.backends.recording import RankRecording, Recording
from kog_triton.backends.request_words import encode, encode_logits
from kog_triton.backends.resources import Resources
from kog_triton.backends.serving import MASK_S, LaunchServing
from kog_triton.backends.unseen_gpu import unseen_gpu
from kog_triton.backends.watchdog import free_what_was_kept
from kog_triton.errors import DeviceError, ModelError, RequestError
from kog_triton.model.spec import DTYPES, ModelSpec
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.cuda_weights import unreadable
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import Gpu

WAIT_NS = int(2 * MASK_S * 1e9)  # that a wait of the kernel may take: more than a mask


class CudaBackend(PromptsBeside):
    name = "cuda"
    vendors = ("nvidia",)
    rank = 1
    plans_memory = True
    column_counts: tuple[int, ...] = COUNTS  # of the kernels that serve several requests together
    lay_out_columns: LayOut | None = None  # if not as layout/columns.py
    columns_ahead = True  # compiled as a model is opened, or when requests first share a step
    early_kernels = True  # a first start has kernels that make tokens alone (early.py)
    deep_kernel = True  # requests get another kernel of one token as they get deep (deep.py)
    chunk_positions = POSITIONS  # of a step of a prompt; 0: a token at a time

    @classmethod
    def availability(cls) -> Availability:
        if not torch.cuda.is_available() or torch.version.hip:
            gpu = unseen_gpu()
            if gpu is not None and not not_compiled_for(gpu.name, gpu.arch):
                return Availability(False, gpu.reason, gpu.advice, lacks_software=True)
            return Availability(False, "torch sees no NVIDIA GPU", "run on a machine with a Hopper GPU")
        name, arch = torch.cuda.get_device_name(), arch_of(*torch.cuda.get_device_capability())
        if refused := not_compiled_for(name, arch):
            return refused
        try:
            compiler_name()
        except DeviceError as error:
            return Availability(False, str(error), 'pip install "kog-triton[cuda]"', lacks_software=True)
        return Availability(True, by_name_only="" if arch == HOPPER else f"it has not run on {arch} yet")

    @classmethod
    def why_not_narrow(cls, spec: ModelSpec) -> str:
        return unreadable(build(spec))

    def __init__(self, weights: WeightSource, options: BackendOptions, num_blocks: int = 0) -> None:
        refuse_narrow(type(self), weights.spec)
        available = self.availability()
        if not available.ok:
            raise DeviceError(available.why(self.name))
        self.options, self.spec, self.num_devices = options, weights.spec, options.num_gpus
        if options.dtype != "auto":
            self.spec = self.spec.replace(dtype=DTYPES[options.dtype])
        if self.spec.dtype not in HALF:
            raise ModelError(
                f"the {self.name} backend reads 16-bit weights, and these are fp32: choose --dtype bf16 or fp16"
            )
        if self.spec.kv_dtype not in (None, self.spec.dtype):
            raise ModelError(f"the {self.name} backend keeps keys and values in the type of the weights")
        free_what_was_kept()
        self.devices, self.gpu = self._open_devices()
        self.device = self.devices[0]
        self._entry = GpuEntry(*self.devices)
        self.options = options = prompts_of(self.gpu, options)
        self.max_context = options.max_context or self.spec.max_context
        self.wait_ns = WAIT_NS
        self._stages: StageRunner | None = None  # compiled when it is asked for
        self._clocks: RankKernel | None = None  # likewise
        self.short: ShortPrompts | None = None  # beside the library
        self.placing: Placing | None = None  # likewise
        self._kernels: list[Kernel | RankKernel] = []
        self._blank: dict[int, torch.Tensor] = {}  # zeros, by rank
        self._ahead: dict[tuple[int, str], tuple[Layout, bytes]] = {}  # by the layout's id, which lives on here
        self.layout = self._lay_out(num_blocks)
        lowering = self.layout.lowering
        self._check_memory()
        compile_columns = partial(self._compile_ahead, "columns.cu")
        load_columns = partial(self._open_kernel, "columns.cu", "kog_columns")
        # Weights are read and packed while compilers work, each in a process of its own; behind them kernels are found
        # kept. A request waits for the first alone.
        beside = Background(most=8)
        heads = wants_library(options, self.device)
        try:
            compile, load = self._compile_ahead, self._open_kernel
            self.first = FirstKernels(self.layout, heads, self.early_kernels, compile, load, beside)
            if heads:
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
                self._moves_outputs(lowering),
                self.lay_out_columns,
                self._make_columns,
            )
            self.columns = Columns(
                lowering,
                self.max_context,
                self.column_counts,
                options.num_slots,
                compile_columns,
                load_columns,
                lay_out=self.lay_out_columns,
                make=self._make_columns,
            )
            # First tokens together: of the widest kernel alone, whose step costs two requests hardly more than theirs.
            shared = self.columns.counts[-1:] if wants_library(options, self.device) else ()
            self.first_tokens = Columns(
                lowering,
                self.max_context,
                shared if lowering.schedule.num_shards == 1 else (),
                options.num_slots,
                partial(self._compile_ahead, "head_step.cu"),
                partial(self._open_kernel, "head_step.cu", "kog_head_step"),
                "first tokens",
            )
            self.deep = self._deep_from(LEAST)
            if self.columns_ahead:
                self.columns.begin()
                self.first_tokens.begin()
                self.deep.begin()
            with self._entry.on_stream():
                self.ranks = self._allocate(weights)
                self.library = self._open_library(weights, lowering)
            self.first.wait()
        except BaseException:
            self.__dict__.clear()  # in a cycle, it would hold the weights until the collector comes
            raise

    @property
    def kernel(self) -> RankKernel:
        """That of one token, whatever a request wants."""
        return self.first.decode.take()

    @property
    def memory(self) -> Memory:
        """Rank 0's."""
        return self.ranks.first

    def _open_devices(self) -> tuple[list[torch.device], Gpu]:
        return open_gpus(self.num_devices)

    def _lay_out(self, num_blocks: int) -> Layout:
        lowering = lower(build(self.spec, self.num_devices), self.gpu, num_blocks)
        check_lowering(lowering)
        return lay_out(lowering, self.max_context)

    def _check_memory(self) -> None:
        lowering, beside = self.layout.lowering, 0
        if wants_library(self.options, self.device):
            beside = unpacked_bytes(lowering, unpacked_stages(lowering))
            if self._passes_short(lowering):
                beside += workspace_bytes(lowering, self.options.num_slots, self._most_blocks)
            if self._moves_outputs(lowering):
                beside += outputs_bytes(lowering.schedule)
                beside += bucket_bytes(lowering.schedule, self.max_context)
        for rank, device in enumerate(self.devices):
            plan = plan_of(self.layout, self.options.num_slots, rank)
            plan = replace(plan, weights=plan.weights + beside)
            where = f"GPU {device.index}: " if self.num_devices > 1 else ""
            check_memory(plan, device, self.options.memory_share, where)

    def _allocate(self, weights: WeightSource) -> Ranks:
        return allocate_ranks(self.layout, weights, self.options.num_slots, self.devices)

    def _make_columns(self, layout: Layout, kernel: RankKernel, devices: Sequence[torch.device]) -> ColumnKernel:
        return make_kernel(layout, kernel, devices)

    def _open_kernel(self, source: str, entry: str, layout: Layout) -> RankKernel:
        kernel = self._load(source, entry, layout)
        self._kernels.append(kernel)
        return kernel

    def _compile(self, source: str, layout: Layout) -> bytes:
        return compile_cubin(render(layout), source, layout.lowering.gpu.arch)

    def _compile_ahead(self, source: str, layout: Layout) -> None:
        """For `_code`. To render a layout and find its kernel takes 0.1 s or more, in which the thread that launches
        would leave every request without a token."""
        self._ahead[id(layout), source] = layout, self._compile(source, layout)

    def _code(self, source: str, layout: Layout) -> bytes:
        _, cubin = self._ahead.pop((id(layout), source), (layout, b""))
        return cubin or self._compile(source, layout)

    def _load(self, source: str, entry: str, layout: Layout) -> RankKernel:
        return RankKernel(self._code(source, layout), entry, layout.shared_bytes, self.devices)

    # ---- entry points ----

    def generate(self, mailbox: Mailbox) -> None:
        """Serve until the mailbox is idle, closed or yields."""
        whole = self.options.prefill == "decode"
        launcher = CudaLauncher(
            self.spec,
            self.ranks,
            self.columns,
            self.first_tokens,
            self.chunks,
            self.deep,
            self._prompt,
            self._admit,
            self._score,
            self._launch_slots,
            self._launch_heads,
            self._gave_up,
            self._entry.aside,
            whole,
        )
        with self._entry.serving(self._free):
            LaunchServing(launcher, mailbox, self._entry.queue).run()

    def _admit(self, request: Request, position: int) -> None:
        words = encode(request, self.spec.vocab_size)  # while the GPU runs the prompt
        self.first.note(request.slot, words)
        lay = self.ranks.write_request if self.placing is None else self.placing.add
        lay(request.slot, words, request.prompt, position)

    def _prompt(self, request: Request) -> PromptRun | None:
        """All of it, to the streams of its last token."""
        library, short = self.library, self.short
        passes = short is not None and short.takes(request)
        crossover = self.chunks.crossover_of_passes if passes else self.chunks.crossover
        if not library or not library_for(request, library, self.options.prefill, crossover):
            return None
        if short is not None and passes:
            return short.begin(request)
        slot, d, hidden = request.slot, self.spec.head_dim, self.spec.hidden_size
        each = self.layout.lowering.schedule.shards_per_rank
        caches = [memory.cache[slot][..., :d] for memory in self.ranks.each]
        streams = [
            memory.streams[slot, rank * each : (rank + 1) * each, :hidden]
            for rank, memory in enumerate(self.ranks.each)
        ]
        tokens, first = request.prompt[request.cached :], request.cached
        if isinstance(library, RankPrefill):
            return library.begin(tokens, first, caches, streams)
        return library.begin(tokens, first, caches[0], streams[0])

    def _gave_up(self) -> str:
        """On several GPUs: of a pass of short prompts, or else of the library's."""
        said = "" if self.short is None else self.short.gave_up()
        if not said and isinstance(self.library, RankPrefill):
            said = self.library.gave_up()
        return said

    def _score(self, request: Request, first: int, last: int) -> np.ndarray:
        """Run positions [first, last) of a prompt in its slot: their logits, float32 [last - first, vocab]."""
        logits = torch.zeros(last - first, self.spec.vocab_size, device=self.device)
        words, prompt = encode_logits(last), request.prompt[:last]
        self.ranks.write_request(request.slot, words, prompt, first)
        self._run(self.ranks, [request.slot], logits=logits)
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
        ranks = self.ranks.apart()
        logits = torch.zeros(count, self.spec.vocab_size, device=self.device)
        ranks.write_request(0, encode_logits(count), token_ids, 0)
        self._run(ranks, [0], logits=logits)
        return logits.cpu().numpy()

    def run_stage(self, stage: str, layer: int, state: Mapping[str, Any]) -> dict[str, Any]:
        with self._entry.at_once():
            return self._stage_runner().run(stage, layer, state)

    def time_stage(self, stage: str, layer: int, state: Mapping[str, Any], before: Callable[[], None]) -> list[float]:
        with self._entry.at_once():
            runner = self._stage_runner()
            runner.run(stage, layer, state, before)
            return runner.seconds

    def _stage_runner(self) -> StageRunner:
        self._refuse_ranks("a stage alone runs")
        if self._stages is None:
            kernel = self._open_kernel("stage.cu", "kog_stage", self.layout)
            ranks = self.ranks.apart()

            def launch(call: StageCall, before: Callable[[], None]) -> float:
                blocks, threads = self.layout.lowering.num_blocks, self.layout.threads
                seconds = kernel.time(blocks, threads, call, before)
                check_waits(ranks, self.layout)
                return seconds

            self._stages = StageRunner(self.layout, ranks.first, launch, self.wait_ns)
        return self._stages

    def _refuse_ranks(self, what: str) -> None:
        if self.num_devices > 1:
            raise DeviceError(f"{what} on one GPU: leave --gpus out")

    def profile(self, prompt: Sequence[int], tokens: int) -> Recording:
        """Stamps of `tokens` greedy steps behind the prompt, by a kernel compiled to take as many. DeviceError on
        several GPUs: `profile_ranks`."""
        if self.num_devices > 1:
            raise DeviceError("several GPUs are profiled together: kog profile --gpus N")
        self._check_profile(prompt, tokens)
        with self._entry.at_once():
            (one,) = self._profile(prompt, tokens)
        return one

    def profile_ranks(self, prompt: Sequence[int], tokens: int) -> RankRecording:
        """As `profile`, of every GPU, their clocks read beside each other before and behind the steps."""
        if self.num_devices == 1:
            raise DeviceError("one GPU has no clocks to bring together: leave --gpus out")
        self._check_profile(prompt, tokens)
        with self._entry.at_once():
            readings: list[np.ndarray] = []
            each = self._profile(prompt, tokens, lambda: readings.append(self._read_clocks()))
        return RankRecording(tuple(each), *readings)

    def _read_clocks(self) -> np.ndarray:
        if self._clocks is None:
            self._clocks = open_clocks(self.devices, self.gpu.arch)
            self._kernels.append(self._clocks)
        return read_clocks(self._clocks, self.devices)

    def _check_profile(self, prompt: Sequence[int], tokens: int) -> None:
        if len(prompt) + tokens > self.max_context:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {tokens} more do not fit the context of {self.max_context}"
            )

    def _profile(
        self, prompt: Sequence[int], tokens: int, read_clocks: Callable[[], None] = lambda: None
    ) -> list[Recording]:
        """A recording a rank, of the kernel that serves a request behind the prompt; `read_clocks` is called around the
        launch that takes stamps."""
        kernel = self.deep.wait(len(prompt))
        layout = replace(self.layout, deep=kernel is not None, profile_tokens=tokens)
        ranks = self.ranks.apart().changed(lambda rank: stamp_tensors(layout, self.devices[rank]))
        stamping = self._load("decode.cu", "kog_decode", layout)

        def stamped() -> None:
            read_clocks()
            self._run(ranks, [0], stamping)
            read_clocks()

        try:
            return record(layout, ranks, prompt, [partial(self._run, ranks, [0], kernel), stamped])
        finally:
            stamping.close()

    def resources(self) -> Resources | None:
        """Of the kernel of one token, which takes no stamps."""
        return self.kernel.resources()

    def settle(self) -> None:
        while self.make_ready():  # which compiles, too
            pass
        self.first.settle()
        self.columns.settle()
        self.first_tokens.settle()
        self.deep.settle()
        self.chunks.settle(self.devices)

    def kernels_of_several(self) -> list[tuple[int, bool]]:
        self.columns.begin()
        self.settle()
        with self._entry.at_once():
            each = {n: self.columns.take(n, self.devices) for n in self.columns.counts}
        missing = [f"{n} columns" for n, kernel in each.items() if kernel is None]
        if self.chunks.gave_up:
            missing.append("chunks")
        if missing:
            raise DeviceError(
                f"backend {self.name} has no kernel of {missing[0]} for {self.gpu.name}: the log says why"
            )
        kernels = [kernel for kernel in (*each.values(), self.chunks.kernel) if kernel]
        return [(kernel.layout.columns, kernel.layout.chunk) for kernel in kernels]

    def serve_deep(self) -> bool:
        if not self.deep_kernel:
            return False
        self.deep = self._deep_from(0)
        with self._entry.at_once():
            found = self.deep.wait(0)
        if found is None:
            raise DeviceError(
                f"backend {self.name} has no kernel of deep positions for {self.gpu.name}: the log says why"
            )
        return True

    def _deep_from(self, least: int) -> DeepKernel:
        return DeepKernel(
            deep_layout(self.layout, least) if self.deep_kernel else None,
            partial(self._compile_ahead, "decode.cu"),
            partial(self._open_kernel, "decode.cu", "kog_decode"),
            least,
        )

    def make_ready(self) -> bool:
        if self.library is None:
            return False
        with self._entry.at_once():
            if self.short is not None and self.short.make_ready():
                return True
            return self.library.make_ready()

    def memory_bytes(self) -> dict[str, int]:
        """Of all GPUs together."""
        each = self.ranks.each
        weights = sum(m.weights.nbytes + m.embed.nbytes for m in each)
        cache = sum(m.cache.nbytes for m in each)
        other = sum(getattr(m, name).nbytes for m in each for name in TENSORS) - weights - cache
        other += sum(blank.nbytes for blank in self._blank.values())
        other += self.columns.memory_bytes() + self.first_tokens.memory_bytes()
        other += self.chunks.memory_bytes()
        if self.library is not None:
            other += self.library.memory_bytes()
        if self.short is not None:
            other += self.short.memory_bytes()
        return {"weights": weights, "kv_cache": cache, "other": other}

    def close(self) -> None:
        self._entry.close(self._free)

    def _free(self) -> None:
        self.columns.close()
        self.first_tokens.close()
        self.deep.close()
        for kernel in self._kernels:
            kernel.close()
        self._kernels, self._stages = [], None
        self.chunks.close()
        self.library, self.short, self.placing, self._blank = None, None, None, {}
        del self.ranks

    # ---- a launch ----

    def _launch_slots(
        self, slots: Sequence[int], most_steps: int, step: ColumnKernel | None, of_deep: RankKernel | None = None
    ) -> tuple[Layout, Finished]:
        """Start the kernel of one token, or that of deep positions, on slots round robin, or one of columns on all of
        them together."""
        if step is None:
            kernel = of_deep or self.first.of_steps(slots)
            return self.layout, self._launch(self.ranks, slots, most_steps, kernel)
        ranks = self.ranks.changed(lambda r: {"words": step.words[r], "scores": step.scores[r]})
        cursors = [*slots] * step.layout.columns if step.layout.chunk else slots
        return step.layout, self._launch(ranks, cursors, most_steps, step.kernel)

    def _run(
        self, ranks: Ranks, slots: Sequence[int], kernel: RankKernel | None = None, **others: torch.Tensor
    ) -> None:
        """A launch of a kernel of one token, to its end. RunError if it did not end well."""
        finished = self._launch(ranks, slots, UNLIMITED, kernel, **others)
        finished.synchronize()
        check_launch(ranks, self.layout, finished)

    def _launch_heads(self, slots: Sequence[int], step: ColumnKernel | None = None) -> tuple[Layout, Finished]:
        """Start the kernel of heads on slots whose `streams` are there: a step of each, or one of all together."""
        if step is not None:
            return self._launch_slots(slots, 1, step)
        return self.layout, self._launch(self.ranks, slots, len(slots), self.first.of_heads(slots))

    def _launch(
        self,
        ranks: Ranks,
        slots: Sequence[int],
        most_steps: int,
        kernel: RankKernel | None = None,
        **others: torch.Tensor,
    ) -> Finished:
        """Start the kernel on slots of all ranks' memory; what comes back says when it has ended on all."""
        if self.placing is not None:
            self.placing.place(stream_of(self.device))
        for rank, memory in enumerate(ranks.each):
            self._clear(rank, memory)
        arguments = ranks.arguments(slots, self.wait_ns, most_steps, **others)
        kernel = kernel or self.kernel
        return kernel.launch(self.layout.lowering.num_blocks, self.layout.threads, arguments)

    def _clear(self, rank: int, memory: Memory) -> None:
        """Zero what a launch finds zero; on the GPU by copies, for a fill is a kernel beside ours."""
        blank = self._blank.get(rank)
        if blank is None or len(blank) < len(memory.words):
            blank = self._blank[rank] = torch.zeros_like(memory.words)
        for tensor in (memory.words, memory.error):
            tensor.copy_(blank[: len(tensor)])
        memory.mailbox.numpy()[:] = 0
