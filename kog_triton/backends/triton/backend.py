"""TritonBackend: one launch of the megakernel serves one request, prompt included, until it stops.

Requests of several slots run one after another; the host reads tokens from mapped memory as they are made.
"""

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kog_triton.backends import Availability, BackendOptions, WeightSource
from kog_triton.backends.mailbox import Failure, Mailbox, Request, Step, now_ns
from kog_triton.errors import DeviceError, RequestError, RunError
from kog_triton.sampling.definition import inverse_temperature
from kog_triton.schedule.schedule import build
from kog_triton.schedule.tiles import lower_tiles
from kog_triton.schedule.topology import Gpu, find_gpu

STOP, LENGTH, CANCEL, FAILED = 1, 2, 3, 4  # outcomes; the host's word is CANCEL
MOST_STOPS = 16
NUM_WARPS = 8  # of 32 threads, 255 registers each; 16 are 30 % slower (H200, benchmarks/README.md)
# What a wait is for: the kernel reports index * num_layers + layer; anything above is the head's.
WAITS = (
    "", "", "qkv words", "attention splits", "attention_out", "mlp_out", "late outputs",
    "attention words", "mlp words",
)  # fmt: skip
POLL_S = 50e-6  # how often the host looks for tokens


class TritonBackend:
    name = "triton"
    num_devices = 1

    @classmethod
    def availability(cls) -> Availability:
        if not torch.cuda.is_available():
            return Availability(
                False, "torch sees no GPU", "run on a machine with an NVIDIA or AMD GPU"
            )
        return Availability(True)

    def __init__(
        self,
        weights: WeightSource,
        options: BackendOptions,
        num_blocks: int = 0,
        depth: int = 1,
        device: torch.device | None = None,
    ) -> None:
        from kog_triton.backends.triton.memory import allocate

        if options.num_gpus != 1:
            raise DeviceError("the triton backend runs on one GPU: choose --gpus 1")
        if options.prefill == "library":
            raise DeviceError("the triton backend prefills in the kernel: choose --prefill kernel")
        if device is None:
            if not torch.cuda.is_available():
                raise DeviceError("the triton backend needs a GPU, and torch sees none")
            device = torch.device("cuda")
        self.spec, self.options, self.device = weights.spec, options, device
        if options.dtype != "auto":
            from kog_triton.model.spec import DType

            names = {"bf16": DType.BF16, "fp16": DType.F16, "fp32": DType.F32}
            self.spec = self.spec.replace(dtype=names[options.dtype])
        self.schedule = build(self.spec)
        self.gpu = _known_gpu(device)
        self.max_context = options.max_context or self.spec.max_context
        vendor = "cpu"
        if device.type == "cuda":
            vendor = "amd" if torch.version.hip else "nvidia"
            num_blocks = num_blocks or _blocks(self.gpu, device)
        self.tiles = lower_tiles(self.schedule, num_blocks, self.max_context, vendor, depth)
        self.memory = allocate(self.schedule, self.tiles, weights, options.num_slots, device)
        self._launch_options: dict[str, Any] = {}
        if vendor != "cpu":
            warps = NUM_WARPS if vendor == "nvidia" else NUM_WARPS // 2
            self._launch_options = {"num_warps": warps, "launch_cooperative_grid": True}

    # ---- doors ----

    def new_mailbox(self) -> Mailbox:
        return Mailbox(self.options.num_slots)

    def generate(self, mailbox: Mailbox) -> None:
        """Serve until the mailbox is idle, closed or yields; a request in flight ends first."""
        while not (mailbox.closed or mailbox.yielding):
            requests = mailbox.take()
            if not requests:
                return
            for request in requests:
                try:
                    self._serve(request, mailbox)
                except Exception as error:
                    mailbox.push(request.slot, Failure(error))

    def _serve(self, request: Request, mailbox: Mailbox) -> None:
        self._describe(request)
        self._start(request.slot)
        words, made = self.memory.mailbox.numpy(), 0
        finished = torch.cuda.Event() if self.device.type == "cuda" else None
        if finished:
            finished.record()
        while True:
            done = finished is None or finished.query()
            outcome = int(words[1]) if done else 0
            while made < request.max_tokens and int(words[8 + made]) >> 32 == made + 1:
                token = int(words[8 + made]) & 0xFFFFFFFF
                made += 1
                finish = None
                if token in request.stop_token_ids:
                    finish = "stop"
                elif made == request.max_tokens:
                    finish = "length"
                if token != 0xFFFFFFFF:
                    mailbox.push(request.slot, Step(token, finish, device_ns=now_ns()))
                    mailbox.prefilled[request.slot] = len(request.prompt) + made - 1
            if done:
                break
            if mailbox.cancelled(request.slot):
                words[0] = CANCEL
            time.sleep(POLL_S)
        if finished is not None:
            torch.cuda.synchronize()
        self._check_outcome(request, outcome, made)
        if outcome == CANCEL:
            mailbox.push(request.slot, Step(-1, "cancel", device_ns=now_ns()))

    def _check_outcome(self, request: Request, outcome: int, made: int) -> None:
        error = int(self.memory.pointers.error[0])
        if error:
            raise RunError(f"{self._where(error)} after {made} tokens: the run is void")
        words = self.memory.mailbox.numpy()
        if made and int(words[8 + made - 1]) & 0xFFFFFFFF == 0xFFFFFFFF:
            raise RunError(f"the logits hold NaN or +inf after {made - 1} tokens: the run is void")
        if outcome == 0 or outcome == FAILED:
            raise RunError("the triton kernel ended without an outcome")

    def _where(self, error: int) -> str:
        kind, layer = divmod(error - 1, self.spec.num_layers)
        if kind >= len(WAITS):
            return "a wait of the triton kernel for the words of lm_head expired"
        return f"a wait of the triton kernel for {WAITS[kind]} of layer {layer} expired"

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab]; runs in a cache of its own."""
        if len(token_ids) > self.max_context:
            raise RequestError(
                f"{len(token_ids)} tokens do not fit the context of {self.max_context}"
            )
        m, count = self.memory, len(token_ids)
        logits = torch.zeros(count, self.spec.vocab_size, device=self.device)
        self._write(token_ids, [0, count, count, 0, 1, 0, 0, 0, 0, 1])
        pointers = m.pointers._replace(logits=logits, kv=torch.zeros_like(m.kv[0]))
        self._launch(pointers)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if int(m.pointers.error[0]):
            raise RunError(f"{self._where(int(m.pointers.error[0]))}: the run is void")
        return logits.cpu().numpy()

    def run_stage(self, stage: str, layer: int, state: Mapping[str, Any]) -> dict[str, Any]:
        raise RequestError("the triton backend runs whole steps only: compare forward_logits")

    def memory_bytes(self) -> dict[str, int]:
        m = self.memory
        other = sum(t.nbytes for t in m.pointers if isinstance(t, torch.Tensor)) - m.weight_bytes
        return {"weights": m.weight_bytes, "kv_cache": m.kv.nbytes, "other": other - m.kv[0].nbytes}

    def close(self) -> None:
        del self.memory

    # ---- a launch ----

    def _describe(self, request: Request) -> None:
        p = request.params
        for name, plain in (("top_k", (0, -1)), ("top_p", (1,)), ("min_p", (0,))):
            if not p.greedy and getattr(p, name) not in plain:
                raise RequestError(f"the triton backend does not sample with {name} yet")
        if p.has_penalties or p.logit_bias or p.allowed_token_ids is not None or request.mask:
            raise RequestError("the triton backend does not apply penalties, bias or masks yet")
        if p.prompt_logprobs is not None:
            raise RequestError("the triton backend has no prompt_logprobs yet")
        if p.min_tokens or p.bad_words_token_ids or p.logprobs is not None:
            raise RequestError("the triton backend has no min_tokens, bad_words or logprobs yet")
        stops = sorted(request.stop_token_ids)
        if len(stops) > MOST_STOPS:
            raise RequestError(f"{len(stops)} stop ids: the triton backend takes {MOST_STOPS}")
        scale = 0.0 if p.greedy else inverse_temperature(p)
        low, high = request.seed & 0xFFFFFFFF, (request.seed >> 32) & 0xFFFFFFFF
        bits = struct.unpack("<i", struct.pack("<f", scale))[0]
        head = [
            request.cached, len(request.prompt), request.max_tokens, len(stops), int(p.greedy),
            low, high, request.sample_idx, bits, 0,
        ]  # fmt: skip
        self._write(request.prompt, head + [0] * 6 + stops)

    def _write(self, prompt: Sequence[int], request: list[int]) -> None:
        m = self.memory.pointers
        words = np.zeros(64, np.uint32)
        words[: len(request)] = np.asarray(request, np.int64) & 0xFFFFFFFF
        m.request.copy_(torch.from_numpy(words.view(np.int32)))
        m.tokens[: len(prompt)] = torch.tensor(list(prompt), dtype=torch.int32)

    def _start(self, slot: int) -> None:
        self._launch(self.memory.pointers._replace(kv=self.memory.kv[slot]))

    def _launch(self, pointers: Any) -> None:
        from kog_triton.backends.triton.kernel import decode_kernel

        pointers.words.zero_()
        pointers.error.zero_()
        pointers.mailbox.zero_()
        decode_kernel[(self.tiles.num_blocks,)](pointers, self.tiles, **self._launch_options)


def _known_gpu(device: torch.device) -> Gpu | None:
    """The GPU's row in the table, if it has one."""
    if device.type != "cuda":
        return None
    try:
        return find_gpu(torch.cuda.get_device_name(device))
    except DeviceError:
        return None


def _blocks(gpu: Gpu | None, device: torch.device) -> int:
    """One block a multiprocessor; the table of known GPUs may say fewer."""
    return gpu.num_blocks if gpu else torch.cuda.get_device_properties(device).multi_processor_count
