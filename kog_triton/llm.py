"""A model ready to generate: checkpoint, tokenizer, backend and engine behind one object.

    from kog_triton import LLM, SamplingParams

    with LLM() as llm:  # the demo that ships; or LLM("org/name"), LLM("path/to/folder")
        for delta in llm.stream("def add(a, b):", SamplingParams(temperature=0, max_tokens=32)):
            print(delta.text, end="", flush=True)

The names are vLLM's and mean what they mean there; what vLLM has and kog_triton has not is refused by name, or ignored
with a warning where it would not change a result (vllm_names.py). Threads and asyncio tasks may share an `LLM`: a
request that finds every slot busy waits in line, and `async for` reads a stream as `for` does.
"""

import itertools
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from kog_triton.backends import DTYPE_NAMES, PREFILLS, Backend, BackendOptions, check_blocks
from kog_triton.backends.choose import Choice, choose
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.hub import TOKENIZER_FILES, model_folder
from kog_triton.demo import checkpoint_path
from kog_triton.engine import MAX_SLOTS, MAX_WAITING, Engine, Job
from kog_triton.errors import DeviceError, RequestError, wrong
from kog_triton.generation import Generation
from kog_triton.llm_arguments import (
    check_flag,
    check_integer,
    check_share,
    device_and_count,
    one_each,
    one_of,
    template_text,
)
from kog_triton.metrics import Peak, measure
from kog_triton.model.generation import READ
from kog_triton.outputs import CompletionOutput, RequestOutput
from kog_triton.progress import Progress
from kog_triton.prompts import ChatPrompt, Prompt, list_of_prompts, read_prompt
from kog_triton.request_queue import QueueFull
from kog_triton.sampling.params import SamplingParams, draw_seed
from kog_triton.schedule.schedule import MOST_GPUS
from kog_triton.stage_check import check_new_gpu
from kog_triton.text import Tokenizer
from kog_triton.text.gguf_tokenizer import tokenizer_of_gguf
from kog_triton.text.no_tokenizer import NoTokenizer
from kog_triton.text.tool_calls import ToolCallParser
from kog_triton.vllm_names import check_others, no_attribute

log = logging.getLogger(__name__)
Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": ...}

MAX_BLOCKS = 1 << 16  # beyond any machine: more is a mistake


class LLM:
    """Open a checkpoint on a backend.

    model          a folder, a .gguf file, a Hugging Face id, or None for the demo that ships
    backend        "auto", a name, or a class that implements `kog_triton.backends.Backend`
    devices        None (the backend's choice), "cpu", "nvidia", "amd" or a row of schedule.topology,
                   and how many: "h200", "h200:4", or 4
    dtype          of the weights in memory: "fp32", "bf16", "fp16", or "auto": as stored (the
                   reference backend: fp32); torch's own and vLLM's names are taken too
    max_model_len  positions a slot holds, None for all that the model allows
    num_slots      requests that may run at once, 1 if not given; each slot remembers its last conversation,
                   and the least recently used one makes room: see `kv_cache_bound_bytes`
    max_waiting    requests that may wait for a slot, first come, first served; one more is a
                   RequestError
    seed           makes a whole session repeatable; a request's own seed comes first
    prefill        "kernel", "library" or "auto"; `walk` is the reference backend's
    num_blocks     of the hip backend's kernels on each GPU, one a compute unit at most; None: as many as are usual
    revision       of a model of the hub: a branch, tag or commit; `download_dir` is where it is kept
    tokenizer      a folder or hub id with another tokenizer.json, at `tokenizer_revision`, or a Tokenizer
    skip_tokenizer_init     token ids in, token ids out: no tokenizer is read
    chat_template           a template's file or text, instead of the checkpoint's
    tensor_parallel_size    GPUs, as the count of `devices`; max_num_seqs is num_slots
    enable_prefix_caching   False: every prompt is computed in full
    gpu_memory_utilization  the share of a GPU's memory that the model may take: DeviceError, before weights are
                            loaded, if weights, keys and values of all slots and what works beside them are more
    disable_log_stats       False: the log "kog_triton.llm" gets a line of figures for each request
    generation_config       "auto": the checkpoint's sampling defaults, "vllm": none;
                            `override_generation_config` goes on top

    Others of vLLM's are judged by vllm_names.py. Raises ModelError, DeviceError, or RequestError for an argument out
    of range.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        backend: str | type[Backend] = "auto",
        devices: str | int | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        num_slots: int | None = None,
        max_waiting: int = MAX_WAITING,
        seed: int | None = None,
        prefill: str = "auto",
        walk: str = "stage",
        num_blocks: int | None = None,
        revision: str | None = None,
        download_dir: str | Path | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        tokenizer_revision: str | None = None,
        skip_tokenizer_init: bool = False,
        chat_template: str | Path | None = None,
        tensor_parallel_size: int | None = None,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool | None = None,
        gpu_memory_utilization: float | None = None,
        disable_log_stats: bool = True,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        started = time.perf_counter()
        check_others("LLM", others, LLM.__init__)
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in DTYPE_NAMES:
            raise RequestError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPE_NAMES)}")
        device, count = device_and_count(devices)
        num_gpus = one_of(1, devices=count, tensor_parallel_size=tensor_parallel_size)
        num_slots = one_of(1, num_slots=num_slots, max_num_seqs=max_num_seqs)
        check_integer("devices", num_gpus, 1, MOST_GPUS)
        check_integer("num_slots", num_slots, 1, MAX_SLOTS)
        check_integer("max_waiting", max_waiting, 0, MAX_SLOTS)
        if seed is not None:
            check_integer("seed", seed, 0, (1 << 64) - 1)
        if prefill not in PREFILLS:
            raise wrong("prefill", prefill, f"one of {', '.join(PREFILLS)}")
        if num_blocks is not None:
            check_integer("num_blocks", num_blocks, 1, MAX_BLOCKS)
        if gpu_memory_utilization is not None:
            check_share("gpu_memory_utilization", gpu_memory_utilization)
        check_flag("skip_tokenizer_init", skip_tokenizer_init)
        check_flag("disable_log_stats", disable_log_stats)
        if enable_prefix_caching is not None:
            check_flag("enable_prefix_caching", enable_prefix_caching)
        if generation_config not in ("auto", "vllm"):
            raise wrong("generation_config", generation_config, "auto or vllm")
        override = dict(override_generation_config or {})
        SamplingParams.from_generation_config(override)  # refused now
        if unknown := sorted(set(override) - set(READ)):
            raise RequestError(f"override_generation_config.{unknown[0]} is not supported: have {', '.join(READ)}")
        self._chat_template = template_text(chat_template)
        self._shares_prefixes = enable_prefix_caching is not False
        self._logs_stats = not disable_log_stats
        if isinstance(backend, str):
            self.choice = choose(backend, device)
        elif isinstance(backend, type):
            self.choice = Choice(backend, backend.name, "given by the caller")
        else:
            raise wrong("backend", backend, "a name or a class")
        place = checkpoint_path() if model is None else model
        if revision is not None or download_dir is not None:
            place = model_folder(place, revision, download_dir)
        self.checkpoint = Checkpoint.open(place)
        if isinstance(backend, str) and self.checkpoint.spec.narrow:
            without, self.choice = self.choice, choose(backend, device, self.checkpoint.spec)
            if self.choice.name != without.name:
                log.warning("backend %s: %s", self.choice.name, self.choice.reason)
        for note in self.checkpoint.notes:
            log.warning("%s: %s", self.checkpoint.folder, note)
        limit = self.checkpoint.spec.max_context
        if max_model_len is not None:
            check_integer("max_model_len", max_model_len, 2, limit)
        defaults = self.checkpoint.generation if generation_config == "auto" else {}
        self._defaults = defaults | override
        if skip_tokenizer_init:
            self.tokenizer: Tokenizer = NoTokenizer()
        elif isinstance(tokenizer, Tokenizer):
            self.tokenizer = tokenizer
        elif tokenizer is not None:
            self.tokenizer = Tokenizer.load(model_folder(tokenizer, tokenizer_revision, download_dir, TOKENIZER_FILES))
        else:
            self.tokenizer = load_tokenizer(self.checkpoint)
        options = BackendOptions(
            num_slots=num_slots,
            max_context=max_model_len or limit,
            num_gpus=num_gpus,
            device=device,
            dtype=DTYPE_NAMES[dtype],
            prefill=prefill,
            walk=walk,
            num_blocks=num_blocks or 0,
            memory_share=1.0 if gpu_memory_utilization is None else gpu_memory_utilization,
        )
        if num_blocks:
            check_blocks(self.choice.backend, self.checkpoint.spec, options)
        if isinstance(backend, str):
            check_new_gpu(self.choice.backend, self.checkpoint.spec, options)
        running = _start(self.choice.backend, self.checkpoint, options)
        own_end = [i for i in (self.tokenizer.eos_token_id,) if i is not None]
        gpu = running.gpu
        if num_gpus > running.num_devices:
            here = gpu.name if gpu else "a CPU"
            log.warning("%d ranks run in one process on %s", num_gpus, here)
        if gpu and gpu.share:
            log.warning("%s: %s", gpu.name, gpu.share)
        self.engine = Engine(
            running,
            self.tokenizer,
            {*self.checkpoint.eos_token_ids, *own_end},
            Peak.of(gpu, running.num_devices) if gpu else None,
            max_waiting,
        )
        if gpu_memory_utilization is not None and not (gpu and getattr(running, "plans_memory", False)):
            warnings.warn(
                f"LLM: gpu_memory_utilization is ignored: the {running.name} backend"
                f"{'' if gpu else ' on a CPU'} does not plan its memory",
                stacklevel=2,
            )
        self.engine.get_ready()
        self._seeds = None if seed is None else Random(seed)
        self._request_ids = itertools.count()
        self.load_s = time.perf_counter() - started

    # ---- generating ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt; outputs come in the order of the prompts.

        A prompt is text, token ids, or {"prompt": text, "prompt_token_ids": ids, "cache_salt": text}; only prompts of
        one salt share keys and values. `sampling_params` are one for all, one for each, or None for
        `get_default_sampling_params()`. All prompts are checked before the first one starts. `use_tqdm` is whether a
        bar shows progress (None: if stderr is a terminal), or a function that makes bars as tqdm does.
        """
        check_others("LLM.generate", others, LLM.generate)
        many = list_of_prompts(prompts)
        each = one_each(self._or_defaults(sampling_params), len(many))
        jobs = []
        for index, (prompt, params) in enumerate(zip(many, each, strict=True)):
            try:
                jobs.append(self._job(prompt, params))
            except RequestError as error:
                if len(many) == 1:
                    raise
                raise RequestError(f"prompts[{index}]: {error}") from error
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        *,
        tool_call_parser: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the model's chat template.

        chat_template           a template's text, instead of the model's
        chat_template_kwargs    what the template takes, such as {"enable_thinking": False}
        chat_template_content_format    whether a message's content goes to the template as a "string" or, as in
                                "openai", as the list of parts that it may be; "auto": as the template reads it
        continue_final_message  continue the last message; it goes with add_generation_prompt=False
        tool_call_parser        how the model writes tool calls (see text/tool_calls.py). They come as `tool_calls`,
                                the text is what remains, and an answer that ended with calls has the finish reason
                                "tool_calls". Special tokens, which mark calls, then stay in the text.
        """
        check_others("LLM.chat", others, LLM.chat)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError("messages must be a list: of messages, or of conversations")
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Iterable[Any] = [messages] if one else messages
        prompts = [
            self.chat_prompt(
                conversation,
                tools,
                add_generation_prompt,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                chat_template_content_format=chat_template_content_format,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]
        if tool_call_parser is None:
            return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)
        ToolCallParser(tool_call_parser)  # an unknown name is refused before anything runs
        each = one_each(self._or_defaults(sampling_params), len(prompts))
        if not all(p.detokenize for p in each):
            raise RequestError("detokenize is False: tool_call_parser needs text")
        each = [replace(p, skip_special_tokens=False) for p in each]
        outputs = self.generate(prompts, each, use_tqdm=use_tqdm)
        return [replace(o, outputs=[_with_tool_calls(c, tool_call_parser) for c in o.outputs]) for o in outputs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generation:
        """Start one prompt; iterate over the result for `Delta`s, the last with the output.

        With `for` in a thread, or `async for` on an event loop. Leaving the loop, `cancel()`, `close()` or dropping
        the result ends the request and frees its slot; `close()` waits until it is free. RequestError if `max_waiting`
        others wait for a slot.
        """
        (params,) = one_each(self._or_defaults(sampling_params), 1)
        job = self._job(prompt, params)
        if job.params.n != 1:
            raise RequestError(f"n is {job.params.n}: a stream has one sample, use generate")
        return self._start(job)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        continue_final_message: bool = False,
    ) -> ChatPrompt:
        """A conversation as a prompt for `stream` or `generate`; the parameters are those of `chat`."""
        how = dict(chat_template_kwargs or {}) | {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template or self._chat_template,
            "content_format": chat_template_content_format,
        }
        ids = self.tokenizer.encode_chat(messages, self.engine.max_context, **how)
        return ChatPrompt(prompt=self.tokenizer.render_chat(messages, **how), prompt_token_ids=ids)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: encode, decode, apply_chat_template."""
        return self.tokenizer

    def get_default_sampling_params(self, **explicit: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults, else vLLM's (so max_tokens is 16), below what is explicit."""
        return SamplingParams.from_generation_config(self._defaults, **explicit)

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of one sequence, float32 [tokens, vocab].

        Running requests wait meanwhile; slots keep what they hold.
        """
        ids = self.engine.check_ids(token_ids)
        if len(ids) > self.engine.max_context:
            raise RequestError(f"{len(ids)} tokens do not fit the context of {self.engine.max_context}")
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
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM is of one process: open another one there, instead of a copy")

    # ---- inside ----

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(name)

    def _or_defaults(
        self, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.get_default_sampling_params() if params is None else params

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        if isinstance(self.tokenizer, NoTokenizer):
            if params.stop:
                raise RequestError("stop needs a tokenizer, and skip_tokenizer_init left it out")
            params = replace(params, detokenize=False)
        read = read_prompt(prompt, self.engine)
        seed = draw_seed() if self._seeds is None else self._seeds.getrandbits(32)
        request_id = str(next(self._request_ids))
        # a salt of its own shares with nobody
        salt = read.cache_salt if self._shares_prefixes else f"request {request_id}"
        return self.engine.prepare(
            read.token_ids,
            params,
            prompt=read.text,
            seed=seed,
            cache_salt=salt,
            request_id=request_id,
            ends_with_context=True,
        )

    def _start(self, job: Job, sample_idx: int = 0) -> Generation:
        engine = self.engine
        claim = engine.start(job, sample_idx)
        figures = partial(measure, spec=engine.backend.spec, backend=engine.backend.name, peak=engine.peak)
        return Generation(
            claim,
            job.prompt,
            self.tokenizer,
            engine.eos_token_ids,
            figures,
            _log_stats if self._logs_stats else None,
            job.request_id,
        )

    def _run(self, jobs: list[Job], use_tqdm: bool | Callable[..., Any] | None) -> list[RequestOutput]:
        """Every sample of every job, as many in line at once as there are slots."""
        waiting = deque((j, s) for j, job in enumerate(jobs) for s in range(job.params.n))
        running: dict[tuple[int, int], Generation] = {}
        done: dict[tuple[int, int], Generation] = {}
        news: SimpleQueue[tuple[int, int]] = SimpleQueue()  # whose there is something to read of
        with Progress(len(waiting), use_tqdm) as progress:
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


def _log_stats(output: RequestOutput) -> None:
    m, done = output.metrics, output.outputs[0]
    rate = "-" if m.decode_tokens_per_s is None else f"{m.decode_tokens_per_s:,.1f}"
    first = "-" if m.ttft_s is None else f"{m.ttft_s * 1e3:,.1f}"
    log.info(
        f"request {output.request_id}: {m.prompt_tokens} prompt tokens ({m.cached_tokens} cached), "
        f"{m.output_tokens} made at {rate} tokens/s, the first after {first} ms; {done.finish_reason}"
    )


def _join(samples: list[Generation]) -> RequestOutput:
    """One output of the samples of one prompt."""
    first = samples[0].output()
    if len(samples) == 1:
        return first
    return replace(first, outputs=[sample.completion() for sample in samples])


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
