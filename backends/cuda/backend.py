"""CudaBackend: one launch of the monokernel serves one request, prompt included, until it stops.

Requests run one after another; the host reads tokens from mapped memory as they are made. What the kernel
cannot do is refused by name before anything runs.
"""

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.header import MOST_STOPS, STEPS, lay_out, render
from kog_triton.backends.cuda.jit import compile_cubin, compiler_name
from kog_triton.backends.cuda.memory import MAILBOX_HEAD, REQUEST_WORDS, TENSORS, Pointers, allocate

from kog_triton.backends import Availability, BackendOptions, WeightSource
from kog_triton.backends.mailbox import Failure, Mailbox, Request, Step, now_ns
from kog_triton.errors import DeviceError, ModelError, RequestError, RunError
from kog_triton.model.spec import DType
from kog_triton.sampling.definition import inverse_temperature
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import Gpu, find_gpu

# How a launch ends (`kog::Outcome`); the host's word is CANCEL.
STOP, LENGTH, CANCEL, FAILED, NOT_FINITE = 1, 2, 3, 4, 5
CONTROL, OUTCOME, MADE = 0, 2, 3  # words of the mailbox
WAIT_TICKS = 4 * 10**9  # that a wait of the kernel may take: two seconds
POLL_S = 50e-6  # how often the host looks for tokens
DTYPES = {"bf16": DType.BF16, "fp16": DType.F16, "fp32": DType.F32}


class CudaBackend:
    name = "cuda"

    @classmethod
    def availability(cls) -> Availability:
        if not torch.cuda.is_available() or torch.version.hip:
            return Availability(
                False, "torch sees no NVIDIA GPU", "run on a machine with a Hopper GPU"
            )
        if torch.cuda.get_device_capability() != (9, 0):
            name = torch.cuda.get_device_name()
            return Availability(False, f"{name} is no Hopper GPU", "choose --backend triton")
        try:
            compiler_name()
        except DeviceError as error:
            return Availability(False, str(error), "pip install cupy-cuda13x")
        return Availability(True)

    def __init__(self, weights: WeightSource, options: BackendOptions, num_blocks: int = 0) -> None:
        if options.num_gpus != 1:
            raise DeviceError("the cuda backend runs on one GPU: choose --gpus 1")
        if options.num_slots != 1:
            raise DeviceError("the cuda backend serves one slot: leave the number of slots at 1")
        if options.prefill == "library":
            raise DeviceError("the cuda backend prefills in the kernel: choose --prefill kernel")
        available = self.availability()
        if not available.ok:
            raise DeviceError(
                f"the cuda backend cannot run: {available.reason}; {available.advice}"
            )
        self.options, self.spec = options, weights.spec
        if options.dtype != "auto":
            self.spec = self.spec.replace(dtype=DTYPES[options.dtype])
        if self.spec.kv_dtype not in (None, self.spec.dtype):
            raise ModelError("the cuda backend keeps keys and values in the type of the weights")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.gpu: Gpu | None = find_gpu(torch.cuda.get_device_name())
        self.max_context = options.max_context or self.spec.max_context
        lowering = lower(build(self.spec), self.gpu, num_blocks)
        check_lowering(lowering)
        self.layout = lay_out(lowering, self.max_context)
        torch.zeros(1, device=self.device)  # makes torch's context, which the driver calls need
        cubin = compile_cubin(render(self.layout))
        self.kernel = Kernel(cubin, "kog_decode", self.layout.shared_bytes)
        self.memory = allocate(self.layout, weights, 1, self.device)

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
        self._write(request.prompt, describe(request))
        finished = self._launch(self._pointers())
        words, made, done = self.memory.mailbox.numpy(), 0, False
        while not done:
            done = finished.query()  # before the words: what it leaves behind is then complete
            made = self._push_tokens(request, mailbox, words, made)
            if mailbox.cancelled(request.slot):
                words[CONTROL] = CANCEL
            time.sleep(POLL_S)
        self._check(words)
        if words[OUTCOME] == CANCEL:
            mailbox.push(request.slot, Step(-1, "cancel", device_ns=now_ns()))

    def _push_tokens(self, request: Request, mailbox: Mailbox, words: np.ndarray, made: int) -> int:
        """Hand on the tokens that came since; how many there are now."""
        while made < request.max_tokens:
            word, device_ns = (int(w) for w in words[MAILBOX_HEAD + 2 * made :][:2])
            token = word & 0xFFFFFFFF
            if word >> 32 != made + 1 or token == 0xFFFFFFFF:
                break
            made += 1
            finish = "length" if made == request.max_tokens else None
            if token in request.stop_token_ids:
                finish = "stop"
            mailbox.push(request.slot, Step(token, finish, device_ns=device_ns))
            mailbox.prefilled[request.slot] = len(request.prompt) + made - 1
            if finish:
                break
        return made

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab]; runs in a cache of its own."""
        count = len(token_ids)
        if count > self.max_context:
            raise RequestError(f"{count} tokens do not fit the context of {self.max_context}")
        logits = torch.zeros(count, self.spec.vocab_size, device=self.device)
        self._write(token_ids, [0, count, count, 0, 1, 0, 0, 0, 0, 1])
        cache = torch.zeros_like(self.memory.cache[0])
        self._launch(self._pointers(logits=logits, cache=cache)).synchronize()
        self._check(self.memory.mailbox.numpy())
        return logits.cpu().numpy()

    def run_stage(self, stage: str, layer: int, state: Mapping[str, Any]) -> dict[str, Any]:
        raise RequestError("the cuda backend runs whole steps only: compare forward_logits")

    def memory_bytes(self) -> dict[str, int]:
        m = self.memory
        weights = m.weights.nbytes + m.embed.nbytes
        total = sum(getattr(m, name).nbytes for name in TENSORS)
        other = total - weights - m.cache.nbytes
        return {"weights": weights, "kv_cache": m.cache.nbytes, "other": other}

    def close(self) -> None:
        self.kernel.close()
        del self.memory

    # ---- a launch ----

    def _pointers(self, **others: torch.Tensor) -> Pointers:
        return self.memory.pointers(0, WAIT_TICKS, **others)

    def _write(self, prompt: Sequence[int], request: list[int]) -> None:
        m = self.memory
        words = np.zeros(REQUEST_WORDS, np.int64)
        words[: len(request)] = request
        m.request.copy_(torch.from_numpy((words & 0xFFFFFFFF).astype(np.uint32).view(np.int32)))
        m.tokens[: len(prompt)] = torch.tensor(list(prompt), dtype=torch.int32)
        m.mailbox.zero_()

    def _launch(self, pointers: Pointers) -> torch.cuda.Event:
        """Start the kernel; the event says when it has ended."""
        self.memory.words.zero_()
        self.memory.error.zero_()
        stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        layout = self.layout
        blocks = layout.lowering.num_blocks
        self.kernel.launch(blocks, layout.threads, pointers, stream.cuda_stream)
        finished = torch.cuda.Event()
        finished.record(stream)
        return finished

    def _check(self, words: np.ndarray) -> None:
        """RunError if the launch did not end well."""
        torch.cuda.synchronize()
        flag, block, step, layer, seen, wanted = self.memory.error.tolist()[:6]
        made = int(words[MADE])
        if flag:
            raise RunError(
                f"a wait of the cuda kernel expired: block {block}, {STEPS[step]}, layer {layer}, "
                f"seen {seen}, wanted {wanted}, after {made} tokens"
            )
        if words[OUTCOME] == NOT_FINITE:
            raise RunError(f"the logits hold NaN or +inf after {made - 1} tokens: the run is void")
        if words[OUTCOME] not in (STOP, LENGTH, CANCEL):
            raise RunError("the cuda kernel ended without an outcome")


def describe(request: Request) -> list[int]:
    """The request as words (`kog::Request`); RequestError names what the kernel cannot do."""
    p = request.params
    for name, plain in (("top_k", (0, -1)), ("top_p", (1,)), ("min_p", (0,))):
        if not p.greedy and getattr(p, name) not in plain:
            raise RequestError(f"the cuda backend does not sample with {name} yet")
    refused = {
        "penalties": p.has_penalties,
        "logit_bias": p.logit_bias,
        "allowed_token_ids": p.allowed_token_ids is not None,
        "masks": request.mask,
        "min_tokens": p.min_tokens,
        "bad_words": p.bad_words_token_ids,
        "logprobs": p.logprobs is not None,
    }
    for name, asked in refused.items():
        if asked:
            raise RequestError(f"the cuda backend has no {name} yet")
    stops = sorted(request.stop_token_ids)
    if len(stops) > MOST_STOPS:
        raise RequestError(f"{len(stops)} stop ids: the cuda backend takes {MOST_STOPS}")
    scale = 0.0 if p.greedy else inverse_temperature(p)
    bits = struct.unpack("<I", struct.pack("<f", scale))[0]
    head = [
        request.cached, len(request.prompt), request.max_tokens, len(stops), int(p.greedy),
        request.seed & 0xFFFFFFFF, request.seed >> 32, request.sample_idx, bits, 0,
    ]  # fmt: skip
    return head + [0] * 6 + stops
