"""TritonBackend: one launch of the megakernel serves all slots, prompts included, until all stop or the host yields."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from kog_triton.backends import Availability, BackendOptions, WeightSource, refuse_narrow
from kog_triton.backends.compile_log import told_if_slow
from kog_triton.backends.device import Clock, gpu_of
from kog_triton.backends.embedding import Embedding
from kog_triton.backends.gpu_entry import GpuEntry
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.memory_plan import check_memory
from kog_triton.backends.prefill.library import Crossover, library_for, open_library
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.backends.resources import Resources
from kog_triton.backends.serving import LaunchServing
from kog_triton.backends.unseen_gpu import unseen_gpu
from kog_triton.backends.watchdog import free_what_was_kept
from kog_triton.errors import DeviceError, RequestError, RunError
from kog_triton.model.spec import DTYPES, ModelSpec
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import VENDORS
from kog_triton.schedule.triton import lower_tiles
from kog_triton.schedule.triton_codes import unreadable_codes

OLDEST = 80  # capability of NVIDIA GPUs with bfloat16 and asynchronous copies
# AMD GPUs whose machine code is checked (tests/triton/test_triton_compile.py); others have other warps and memory.
AMD_ARCHS = ("gfx90a", "gfx942", "gfx950")
SECOND_NAMES = ("wide", "half_weights", "half_embed")  # of memory that another pointer names
ROWS = 64  # positions whose logits one launch of `forward_logits` keeps
# Llama-3.2-1B on one H200, development runs (benchmarks/triton-log.md#prompts): 16 tokens in chunks 1.06 ms, by the
# library 1.05; 64 tokens 1.21 and 1.09.
# After 2,000 cached positions, from the request to its first token: 128 tokens in chunks 4.81 ms, by the library 6.51;
# 192, three chunks, 6.60 and 6.79; 224, four chunks, 8.12 and 6.52 (second of four).
IN_CHUNKS = Crossover(fresh=17, behind=193)

# Of narrow weights, for which torch makes values of all codes before a pass: Qwen3-8B on one H200, 512 tokens in chunks
# 85 (FP8) and 75 ms (int4), by the library 104 and 113; 1,024 of int4 148 and 124
# (benchmarks/triton-log.md#narrow-chunks). By these FP8 crosses near 640 tokens and int4 near 830: one number for both,
# not timed there, nor behind a cached prefix.
IN_CHUNKS_OR_UNPACKED = Crossover(fresh=640, behind=640)


class TritonBackend:
    """The device modules are imported by what runs them: Triton is not needed to ask whether there is a GPU."""

    name = "triton"
    vendors = VENDORS
    rank = 2
    plans_memory = True
    num_devices = 1

    @classmethod
    def why_not_narrow(cls, spec: ModelSpec) -> str:
        return unreadable_codes(build(spec))

    @classmethod
    def availability(cls) -> Availability:
        if not torch.cuda.is_available():
            gpu = unseen_gpu()
            if gpu is not None and not _why_not_compiled(gpu.name, gpu.arch):
                return Availability(False, gpu.reason, gpu.advice, lacks_software=True)
            return Availability(False, "torch sees no GPU", "run on a machine with an NVIDIA or AMD GPU")
        if reason := _why_not_compiled(*_name_and_arch(torch.device("cuda"))):
            return Availability(False, reason, "choose --backend reference")
        if importlib.util.find_spec("triton") is None:
            advice = "install torch's ROCm build again" if torch.version.hip else 'pip install "kog-triton[cuda]"'
            return Availability(False, "Triton is not installed", advice, lacks_software=True)
        return Availability(True)

    def __init__(
        self, weights: WeightSource, options: BackendOptions, num_blocks: int = 0, device: torch.device | None = None
    ) -> None:
        from kog_triton.backends.triton.host.launcher import TritonLauncher
        from kog_triton.backends.triton.host.matrices import TileMatrices
        from kog_triton.backends.triton.host.memory import allocate, plan_of
        from kog_triton.backends.triton.host.shared_steps import SharedSteps, most_columns

        refuse_narrow(type(self), weights.spec)
        if options.num_gpus != 1:
            raise DeviceError("the triton backend runs on one GPU: choose --gpus 1")
        if device is None:
            if not torch.cuda.is_available():
                raise DeviceError("the triton backend needs a GPU, and torch sees none")
            device = torch.device("cuda")
        if reason := _why_not_compiled(*_name_and_arch(device)):
            raise DeviceError(Availability(False, reason, "choose --backend reference").why("triton"))
        free_what_was_kept()
        self._entry = GpuEntry(device)
        self.spec, self.options, self.device = weights.spec, options, device
        if options.dtype != "auto":
            self.spec = self.spec.replace(dtype=DTYPES[options.dtype])
        self.schedule = build(self.spec)
        self.gpu = gpu_of(device)
        self.max_context = options.max_context or self.spec.max_context
        vendor = self.gpu.vendor if self.gpu else "cpu"
        if self.gpu is not None:
            num_blocks = num_blocks or self.gpu.num_blocks
        self.tiles = lower_tiles(self.schedule, num_blocks, self.max_context, vendor)
        most = most_columns(self.tiles, options.num_slots)
        plan = plan_of(self.schedule, self.tiles, options.num_slots, most)
        check_memory(plan, device, options.memory_share)
        with self._entry.on_stream():
            self.memory = allocate(self.schedule, self.tiles, weights, options.num_slots, device, most)
            held, row = self.memory.pointers.half_embed, self.tiles.embedding
            embed = Embedding(held.view(torch.uint8) if row else held, held.dtype, row)
            arena = self.memory.pointers.weights
            matrices = partial(TileMatrices, self.schedule, self.tiles, arena, embed.dtype)
            rope = self.memory.pointers.rope
            slots = self.memory.pointers.kv
            self.library = open_library(options, weights, self.spec, self.max_context, embed, rope, matrices, slots)
        self._launch_options: dict[str, Any] = {}
        if device.type == "cuda":
            self._launch_options = {
                "num_warps": self.tiles.sizes.warps,
                "launch_cooperative_grid": True,
                "enable_fp_fusion": True,  # not every release has it on by default
            }
        compile = self._compile_shared() if device.type == "cuda" else None
        self.shared_steps = SharedSteps(most, compile)
        self.launcher = TritonLauncher(
            self.spec, self.memory, self.tiles, self._prompt, self._logits, self._run, self.shared_steps
        )
        self._serving: LaunchServing | None = None
        self._compiled: Any = None  # the variant of the kernel that was launched last
        self._launched: set[object] = set()  # variants of kernels, each of which is compiled by its first launch

    # ---- entry points ----

    def generate(self, mailbox: Mailbox) -> None:
        """Serve until the mailbox is idle, closed or yields, at a token boundary; state survives the return."""
        with self._entry.serving(self._free):
            self._serving = LaunchServing(self.launcher, mailbox, self._entry.queue)
            try:
                self._serving.run()
            finally:
                self._serving = None

    def poll(self) -> None:
        """The host's part of serving, for an interpreter in which `generate` cannot poll while the kernel runs."""
        if self._serving is not None:
            self._serving.poll()

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab]; runs in a cache of its own."""
        from kog_triton.backends.triton.host.memory import new_cache

        if len(token_ids) > self.max_context:
            raise RequestError(f"{len(token_ids)} tokens do not fit the context of {self.max_context}")
        firsts = range(0, len(token_ids), ROWS)
        lasts = [min(first + ROWS, len(token_ids)) for first in firsts]
        chunks = zip(firsts, lasts, strict=True)
        with self._entry.at_once():
            kv = new_cache(self.tiles, 1, self.device)
            return np.concatenate([self._logits(kv, token_ids, *chunk) for chunk in chunks])

    def run_stage(self, stage: str, layer: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """One stage alone, a token at a time, on logical tensors (STAGE_READS, STAGE_WRITES).

        RequestError if the model has no such stage; RunError if a wait expires.
        """
        return self._run_stage(stage, layer, state, lambda: None)[0]

    def time_stage(self, stage: str, layer: int, state: Mapping[str, Any], before: Callable[[], None]) -> list[float]:
        """As run_stage; seconds of every token's launch by the GPU's clock, after what `before` queues."""
        return self._run_stage(stage, layer, state, before)[1]

    def _run_stage(
        self, stage: str, layer: int, state: Mapping[str, Any], before: Callable[[], None]
    ) -> tuple[dict[str, Any], list[float]]:
        from kog_triton.backends.triton.host.stages import StageRun

        seconds: list[float] = []

        def launch(*call: Any) -> None:
            seconds.append(self._launch_stage(before, *call))

        run = StageRun(self.schedule, self.tiles, self.memory.pointers, stage, layer, launch)
        with self._entry.at_once():
            return run.run(state), seconds

    def resources(self) -> Resources | None:
        """Of the variant that was launched last; None before that, and in the interpreter."""
        kernel = self._compiled
        if kernel is None:
            return None
        # Triton counts the driver's local memory in words of 32 bits.
        return Resources(kernel.n_regs, 4 * kernel.n_spills, kernel.metadata.shared)

    def memory_bytes(self) -> dict[str, int]:
        m = self.memory
        p = m.pointers
        held = [t for name, t in p._asdict().items() if name not in SECOND_NAMES and isinstance(t, torch.Tensor)]
        held += [m.blank_words, m.blank_error]
        other = sum(t.nbytes for t in held) - m.weight_bytes - p.kv.nbytes
        if self.library is not None:
            other += self.library.memory_bytes()
        return {"weights": m.weight_bytes, "kv_cache": p.kv.nbytes, "other": other}

    def settle(self) -> None:
        self.shared_steps.settle()
        while self.make_ready():
            pass

    def make_ready(self) -> bool:
        if self.library is None:
            return False
        with self._entry.at_once():
            return self.library.make_ready()

    def close(self) -> None:
        self._entry.close(self._free)

    def _free(self) -> None:
        self.library = None
        del self.memory, self.launcher

    # ---- launches ----

    def _prompt(self, request: Request) -> PromptRun | None:
        """All but its last token."""
        crossover = IN_CHUNKS_OR_UNPACKED if self.tiles.has_narrow_layers else IN_CHUNKS
        library = library_for(request, self.library, self.options.prefill, crossover)
        if library is None:
            return None
        cache = self.memory.pointers.kv[request.slot]
        return library.begin(request.prompt[request.cached : -1], request.cached, cache)

    def _run(self, rules: bool, chunks: bool, columns: int) -> Callable[[], bool]:
        """Launch a kernel of requests: with all sampling rules, and with prompts in chunks, if one needs them; of more
        than one column, which has no chunks, the one that `shared_steps` says is ready.

        The result tells whether it has left.
        """
        return self._launch(self.memory.pointers, rules, chunks, columns)

    def _compile_shared(self) -> Callable[[tuple[int, bool]], object]:
        """What compiles a kernel of columns; it keeps neither this backend nor its memory."""
        from kog_triton.backends.triton.host.shared_steps import without_memory

        pointers, tiles, device = without_memory(self.memory.pointers), self.tiles, self.device
        options, grid = self._launch_options, (self.tiles.num_blocks,)

        def compile(key: tuple[int, bool]) -> None:
            from kog_triton.backends.triton.kernel.shared_step import shared_kernel

            with torch.cuda.device(device):
                shared_kernel.warmup(pointers, tiles, *key, grid=grid, **options)

        return compile

    def _logits(self, kv: torch.Tensor, tokens: Sequence[int], first: int, last: int) -> np.ndarray:
        """Logits of positions [first, last), float32, run in a cache [1, ...]. RunError if a wait expires."""
        from kog_triton.backends.triton.host.admission import admit_logits
        from kog_triton.backends.triton.host.waits import describe_wait
        from kog_triton.backends.triton.kernel.slots import BEAT

        p = self.memory.pointers
        alone = p._replace(
            kv=kv,
            slot_order=torch.tensor([1, 0], dtype=torch.int32, device=self.device),
            requests=torch.zeros_like(p.requests[:1]),
            states=torch.zeros_like(p.states[:1]),
            tokens=torch.zeros_like(p.tokens[:1]),
            mailbox=torch.zeros(8, dtype=torch.int64, device=self.device),
            logits=torch.zeros(last - first, self.spec.vocab_size, device=self.device),
        )
        admit_logits(alone, list(tokens), first, last)
        self._launch(alone, False, False, 1)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # and no other engine's
        beat = int(alone.mailbox[BEAT])
        if expired := describe_wait(alone.error.tolist(), self.tiles, beat):
            raise RunError(f"{expired}: the run is void")
        return alone.logits.cpu().numpy()

    def _launch(self, pointers: Any, rules: bool, chunks: bool, columns: int) -> Callable[[], bool]:
        from kog_triton.backends.triton.kernel.decode import decode_kernel
        from kog_triton.backends.triton.kernel.shared_step import shared_kernel

        # Copies and not fills, which would be kernels: a request that needs no library runs in one.
        words = columns * self.tiles.total_words
        pointers.words[:words].copy_(self.memory.blank_words[:words])
        pointers.error.copy_(self.memory.blank_error)
        grid = (self.tiles.num_blocks,)
        parts = " with sampling rules" * rules + " with prompts in chunks" * chunks
        if columns > 1:
            self._compiled = shared_kernel[grid](pointers, self.tiles, columns, rules, **self._launch_options)
        else:
            with self._first_time((rules, chunks), f"the Triton kernel{parts}"):
                self._compiled = decode_kernel[grid](pointers, self.tiles, rules, chunks, **self._launch_options)
        if self.device.type != "cuda":
            return lambda: True
        finished = torch.cuda.Event()
        finished.record()
        return finished.query

    def _first_time(self, variant: object, what: str) -> AbstractContextManager[None]:
        """Around a launch."""
        if variant in self._launched:
            return nullcontext()
        self._launched.add(variant)
        return told_if_slow(what)

    def _launch_stage(
        self,
        before: Callable[[], None],
        pointers: Any,
        x: torch.Tensor,
        out: torch.Tensor,
        layer: int,
        position: int,
        token: int,
        stage: str,
    ) -> float:
        """To its end: seconds on the GPU from what `before` has queued; in the interpreter by the host's clock."""
        from kog_triton.backends.triton.host.waits import describe_wait
        from kog_triton.backends.triton.kernel.stage import stage_kernel

        pointers.error.copy_(self.memory.blank_error)
        grid = (self.tiles.num_blocks,)
        before()
        seconds = Clock(self.device)
        with self._first_time(stage, f"the Triton kernel of {stage}"):
            stage_kernel[grid](pointers, x, out, layer, position, token, stage, self.tiles, **self._launch_options)
        took = seconds()
        # Without the heartbeat in `pointers`, which is that of the last launch that served.
        if expired := describe_wait(pointers.error.tolist(), self.tiles):
            raise RunError(f"{expired}: the run is void")
        return took


def _name_and_arch(device: torch.device) -> tuple[str, str]:
    """Of a torch device; of a CPU the second is ""."""
    if device.type != "cuda":
        return "CPU", ""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:
        return name, torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return name, "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _why_not_compiled(name: str, arch: str) -> str:
    """Why the kernel cannot run on a GPU; "" if it can, and where the architecture is not known."""
    if arch.startswith("gfx"):
        return "" if arch in AMD_ARCHS else f"{name} is {arch}, and it takes {', '.join(AMD_ARCHS)}"
    old = arch.startswith("sm_") and int(arch[3:].rstrip("a")) < OLDEST
    return f"{name} is {arch}, and it takes sm_{OLDEST} or newer" if old else ""
