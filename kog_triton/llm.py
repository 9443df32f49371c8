"""A model ready to generate: checkpoint, tokenizer, backend and engine behind one object.

    from kog_triton import LLM, SamplingParams

    with LLM() as llm:  # the demo that ships; or LLM("org/name"), LLM("path/to/folder")
        for delta in llm.stream("def add(a, b):", SamplingParams(temperature=0, max_tokens=32)):
            print(delta.text, end="", flush=True)

The names are vLLM's. Threads and asyncio tasks may share an `LLM`: a request that finds every slot busy waits in line,
and `async for` reads a stream as `for` does.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from kog_triton.backends import DTYPE_NAMES, PREFILLS, Backend, BackendOptions
from kog_triton.backends.choose import Choice, choose
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.demo import checkpoint_path
from kog_triton.engine import MAX_WAITING, Engine, Job, draw_seed
from kog_triton.errors import DeviceError, RequestError, shown, wrong
from kog_triton.generation import Generation
from kog_triton.metrics import Peak, measure
from kog_triton.outputs import CompletionOutput, RequestOutput
from kog_triton.progress import Progress
from kog_triton.request_queue import QueueFull
from kog_triton.sampling.params import SamplingParams
from kog_triton.text import Tokenizer
from kog_triton.text.gguf_tokenizer import tokenizer_of_gguf
from kog_triton.text.tool_calls import ToolCallParser

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | Mapping[str, Any]  # text, or {"prompt_token_ids": [...]}
Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": ...}

MAX_SLOTS, MAX_DEVICES = 1 << 16, 1 << 10  # beyond any machine: more is a mistake


class LLM:
    """Open a checkpoint on a backend.

    model          a folder, a .gguf file, a Hugging Face id, or None for the demo that ships
    backend        "auto", a name, or a class that implements `kog_triton.backends.Backend`
    devices        None (the backend's choice), "cpu", "nvidia", "amd" or a row of schedule.topology,
                   and how many: "h200", "h200:4", or 4
    dtype          of the weights in memory: "fp32", "bf16", "fp16", or "auto": as stored (the
                   reference backend: fp32)
    max_model_len  positions a slot holds, None for all that the model allows
    num_slots      requests that may run at once; each slot remembers its last conversation, and
                   the least recently used one makes room: see `kv_cache_bound_bytes`
    max_waiting    requests that may wait for a slot, first come, first served; one more is a
                   RequestError
    seed           makes a whole session repeatable; a request's own seed comes first
    prefill        "kernel", "library" or "auto"; `walk` is the reference backend's

    Raises ModelError, DeviceError, or RequestError for an argument out of range.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        backend: str | type[Backend] = "auto",
        devices: str | int | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        num_slots: int = 1,
        max_waiting: int = MAX_WAITING,
        seed: int | None = None,
        prefill: str = "auto",
        walk: str = "stage",
    ) -> None:
        started = time.perf_counter()
        if dtype not in DTYPE_NAMES:
            raise RequestError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPE_NAMES)}")
        device, num_gpus = _devices(devices)
        _check_integer("devices", num_gpus, 1, MAX_DEVICES)
        _check_integer("num_slots", num_slots, 1, MAX_SLOTS)
        _check_integer("max_waiting", max_waiting, 0, MAX_SLOTS)
        if seed is not None:
            _check_integer("seed", seed, 0, (1 << 64) - 1)
        if prefill not in PREFILLS:
            raise wrong("prefill", prefill, f"one of {', '.join(PREFILLS)}")
        if isinstance(backend, str):
            self.choice = choose(backend, device)
        elif isinstance(backend, type):
            self.choice = Choice(backend, backend.name, "given by the caller")
        else:
            raise wrong("backend", backend, "a name or a class")
        self.checkpoint = Checkpoint.open(checkpoint_path() if model is None else model)
        if isinstance(backend, str) and self.checkpoint.spec.narrow:
            without, self.choice = self.choice, choose(backend, device, self.checkpoint.spec)
            if self.choice.name != without.name:
                log.warning("backend %s: %s", self.choice.name, self.choice.reason)
        for note in self.checkpoint.notes:
            log.warning("%s: %s", self.checkpoint.folder, note)
        limit = self.checkpoint.spec.max_context
        if max_model_len is not None:
            _check_integer("max_model_len", max_model_len, 2, limit)
        self.tokenizer = load_tokenizer(self.checkpoint)
        options = BackendOptions(
            num_slots=num_slots,
            max_context=max_model_len or limit,
            num_gpus=num_gpus,
            device=device,
            dtype=DTYPE_NAMES[dtype],
            prefill=prefill,
            walk=walk,
        )
        running = _start(self.choice.backend, self.checkpoint, options)
        own_end = [i for i in (self.tokenizer.eos_token_id,) if i is not None]
        gpu = running.gpu  # a GPU backend says which row of topology it runs on
        self.engine = Engine(
            running,
            self.tokenizer,
            {*self.checkpoint.eos_token_ids, *own_end},
            Peak.of(gpu, running.num_devices) if gpu else None,
            max_waiting,
        )
        self._seeds = None if seed is None else Random(seed)
        self.load_s = time.perf_counter() - started

    # ---- generating ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress_bar: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs come in the order of the prompts.

        `params` is one for all, one for each, or None for `default_params()`. All prompts are
        checked before the first one starts. The progress bar is on if stderr is a terminal.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(
                f"prompts is {shown(prompts)}: it must be a prompt or a list of them"
            )
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        each = _one_each(self.default_params() if params is None else params, len(many))
        jobs = [self._job(prompt, p) for prompt, p in zip(many, each, strict=True)]
        if use_progress_bar is None:
            use_progress_bar = sys.stderr.isatty()
        return self._run(jobs, use_progress_bar)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_call_parser: str | None = None,
        add_generation_prompt: bool = True,
        use_progress_bar: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's chat template.

        `tool_call_parser` names how the model writes tool calls (see text/tool_calls.py). They come
        as `tool_calls`, the text is what remains, and an answer that ended with calls has the
        finish reason "tool_calls". Special tokens, which mark calls, then stay in the text.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError("messages must be a list: of messages, or of conversations")
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Iterable[Any] = [messages] if one else messages
        prompts = [self.chat_prompt(c, tools, add_generation_prompt) for c in conversations]
        if tool_call_parser is None:
            return self.generate(prompts, params, use_progress_bar=use_progress_bar)
        ToolCallParser(tool_call_parser)  # an unknown name is refused before anything runs
        each = _one_each(self.default_params() if params is None else params, len(prompts))
        if not all(p.detokenize for p in each):
            raise RequestError("detokenize is False: tool_call_parser needs text")
        each = [replace(p, skip_special_tokens=False) for p in each]
        outputs = self.generate(prompts, each, use_progress_bar=use_progress_bar)
        return [
            replace(o, outputs=[_with_tool_calls(c, tool_call_parser) for c in o.outputs])
            for o in outputs
        ]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Start one prompt; iterate over the result for `Delta`s, the last with the output.

        With `for` in a thread, or `async for` on an event loop. Leaving the loop, `cancel()`, `close()` or dropping
        the result ends the request and frees its slot; `close()` waits until it is free. RequestError if `max_waiting`
        others wait for a slot.
        """
        job = self._job(prompt, self.default_params() if params is None else params)
        if job.params.n != 1:
            raise RequestError(f"n is {job.params.n}: a stream has one sample, use generate")
        return self._start(job)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> dict[str, Any]:
        """A conversation as a prompt for `stream` or `generate`."""
        how: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return {
            "prompt": self.tokenizer.render_chat(messages, **how),
            "prompt_token_ids": self.tokenizer.encode_chat(messages, **how),
        }

    def default_params(self, **explicit: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults; up to the end of the context unless told."""
        given = {"max_tokens": None} | explicit
        return SamplingParams.from_generation_config(self.checkpoint.generation, **given)

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of one sequence, float32 [tokens, vocab].

        Running requests wait meanwhile; slots keep what they hold.
        """
        ids = self.engine.check_ids(token_ids)
        if len(ids) > self.engine.max_context:
            raise RequestError(
                f"{len(ids)} tokens do not fit the context of {self.engine.max_context}"
            )
        with self.engine.paused():
            return self.engine.backend.forward_logits(ids)

    def kv_cache_bound_bytes(self) -> int:
        """The most bytes that the conversations' keys and values take, however long it runs.

        num_slots x max_model_len x 2 x layers x key/value heads x head_dim x bytes a number. What
        is held now is `engine.backend.memory_bytes()["kv_cache"]`. `forward_logits` works beside
        the slots, in memory of its own that it gives back.
        """
        return self.engine.kv_cache_bound_bytes

    # ---- closing ----

    def close(self) -> None:
        """End what runs and free the backend; safe to call twice."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside ----

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        text, ids = self._tokenize(prompt)
        seed = draw_seed() if self._seeds is None else self._seeds.getrandbits(32)
        return self.engine.prepare(ids, params, prompt=text, seed=seed)

    def _start(self, job: Job, sample_idx: int = 0) -> Generation:
        engine = self.engine
        claim = engine.start(job, sample_idx)
        figures = partial(
            measure, spec=engine.backend.spec, backend=engine.backend.name, peak=engine.peak
        )
        return Generation(claim, job.prompt, self.tokenizer, engine.eos_token_ids, figures)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
                return text, list(ids)
            if ids is None and isinstance(text, str):
                return text, self.tokenizer.encode(text)
        raise RequestError(
            f'a prompt is text or {{"prompt_token_ids": [...]}}, not {type(prompt).__name__}'
        )

    def _run(self, jobs: list[Job], show: bool) -> list[RequestOutput]:
        """Every sample of every job, as many in line at once as there are slots."""
        waiting = deque((j, s) for j, job in enumerate(jobs) for s in range(job.params.n))
        running: dict[tuple[int, int], Generation] = {}
        done: dict[tuple[int, int], Generation] = {}
        news: SimpleQueue[tuple[int, int]] = SimpleQueue()  # whose there is something to read of
        with Progress(len(waiting), show) as progress:
            try:
                while waiting or running:
                    while waiting and len(running) < self.engine.num_slots:
                        key = waiting[0]
                        try:
                            running[key] = self._start(jobs[key[0]], key[1])
                        except QueueFull:
                            if not running:
                                raise
                            break  # until one of our own has ended
                        running[waiting.popleft()].listen(partial(news.put, key))
                    key = news.get()
                    if key not in running:
                        continue
                    delta = running[key].poll(0)
                    if delta is not None:
                        progress.add_tokens(len(delta.token_ids))
                    if running[key].finished:
                        running[key].close()
                        done[key] = running.pop(key)
                        progress.add_sample()
            finally:
                for generation in running.values():
                    generation.cancel()
                for generation in running.values():
                    generation.close()
        return [_join([done[j, s] for s in range(job.params.n)]) for j, job in enumerate(jobs)]


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer: of its folder, or of its GGUF file's metadata."""
    if checkpoint.metadata is not None:
        return tokenizer_of_gguf(checkpoint.metadata, checkpoint.folder)
    return Tokenizer.load(checkpoint.folder)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:
        raise wrong(name, value, f"an integer from {low} to {high}")


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    each: list[Any] = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(p, SamplingParams) for p in each):
        raise RequestError("params must be a SamplingParams, or a list with one for each prompt")
    if len(each) != count:
        raise RequestError(f"{len(each)} sampling params for {count} prompts: give one for each")
    return each


def _join(samples: list[Generation]) -> RequestOutput:
    """One output of the samples of one prompt."""
    first = samples[0].output()
    completions = [sample.completion() for sample in samples]
    return replace(first, outputs=completions)


def _with_tool_calls(completion: CompletionOutput, parser_name: str) -> CompletionOutput:
    """The completion with its calls taken out of the text."""
    parser = ToolCallParser(parser_name)
    deltas = (parser.feed(completion.text), parser.finish())
    calls = [call for delta in deltas for call in delta.calls]
    reason = completion.finish_reason
    return replace(
        completion,
        text="".join(delta.content for delta in deltas),
        tool_calls=calls,
        finish_reason="tool_calls" if calls and reason == "stop" else reason,
    )


def _devices(said: str | int | None) -> tuple[str, int]:
    """(device, count) of what the caller calls `devices`."""
    if not isinstance(said, str):
        return "", 1 if said is None else said
    name, _, count = said.partition(":")
    if count and not (count.isdecimal() and len(count) < 9):
        raise RequestError(f"devices is {said!r}: behind the colon belongs a number, as in h200:4")
    return name, int(count or 1)


def _start(backend: type[Backend], checkpoint: Checkpoint, options: BackendOptions) -> Backend:
    """The backend on its device; DeviceError if the model does not fit there."""
    try:
        return backend(checkpoint, options)
    except (MemoryError, RuntimeError) as error:
        # torch's own errors, known by name: this module does not import torch
        if not isinstance(error, MemoryError) and "OutOfMemory" not in type(error).__name__:
            raise
        raise DeviceError(
            f"the model does not fit the device's memory ({error}): a shorter max_model_len, fewer "
            "slots or a smaller model may"
        ) from error
