"""transformers, compiled: the prompt and the step of one token by torch.compile, each in one CUDA graph.

Model, mask and static cache are transformers' own, the loop is ours: `generate` reaches two thirds of the
tokens/s, because it spends 0.7 ms of host time a token (benchmarks/README.md#why-not-generate). Token and
position stay on the GPU, and the next step is queued before the token of the last one is read.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from kog_triton.bench.engines import Run
from kog_triton.bench.peers import Setting
from kog_triton.bench.peers.transformers_model import TransformersPeer

TRIES = 3  # calls before a capture: the first compiles


class TransformersCompiled(TransformersPeer):
    name = "transformers-compiled"
    ran = "this adapter has run on an H200"
    how = "torch.compile, CUDA graph"
    step_options: ClassVar[dict[str, Any] | None] = None  # of torch.compile

    @staticmethod
    def absent(setting: Setting) -> str:
        if setting.device.type == "cpu":
            return "it compiles for a GPU only"
        return TransformersPeer.absent(setting)

    def __init__(self, setting: Setting) -> None:
        from transformers.cache_utils import StaticCache, StaticLayer

        super().__init__(setting)
        self._device = setting.device
        self._cache: Any = StaticCache(config=self._model.config, max_cache_len=setting.max_context)
        # Layers of a window too keep all positions: a cache that turns counts on the host, out of a
        # graph's sight. Their mask hides what lies outside the window.
        self._cache.layers = [StaticLayer(setting.max_context) for _ in self._cache.layers]
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=setting.device)
        pinned = setting.device.type == "cuda"
        self._host = torch.zeros(setting.max_context, dtype=torch.int64, pin_memory=pinned)
        self._prompts: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}  # by length
        self._step: Callable[[], None] | None = None

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> Run:
        ids, run_prompt = self._prompt_of(len(prompt))
        step = self._steps() if count > 1 else None
        run = Run(time.perf_counter())
        ids.copy_(torch.tensor([list(prompt)]))
        run_prompt()
        wait = self._bring(0)
        for made in range(count):
            wait_now = wait
            if step is not None and made + 1 < count:
                step()
                wait = self._bring(made + 1)
            wait_now()
            run.add(int(self._host[made]))
        return run

    def close(self) -> None:
        self._prompts, self._step, self._cache = {}, None, None
        super().close()

    def _prompt_of(self, length: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Where the ids of a prompt of this length go, and what runs it."""
        if length not in self._prompts:
            ids = torch.zeros(1, length, dtype=torch.int64, device=self._device)

            def run_prompt() -> None:
                self._restart()
                self._choose(ids)

            run_prompt()  # makes the cache's tensors, out of the compiler's sight
            self._prompts[length] = ids, captured(run_prompt, lambda: None, self._device)
        return self._prompts[length]

    def _steps(self) -> Callable[[], None]:
        """What runs the step of one token; the cache has its tensors."""
        if self._step is None:
            work = partial(self._choose, self._token)
            self._step = captured(work, self._restart, self._device, self.step_options)
        return self._step

    def _restart(self) -> None:
        for layer in self._cache.layers:
            layer.cumulative_length.zero_()

    def _choose(self, ids: torch.Tensor) -> None:
        """Run ids [1, T] after what the cache holds; the greedy next token goes to `_token`."""
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))

    def _bring(self, index: int) -> Callable[[], Any]:
        """Start the copy of the token to the host; what comes back waits for it."""
        self._host[index : index + 1].copy_(self._token.view(-1), non_blocking=True)
        if self._device.type == "cpu":
            return lambda: None
        return torch.cuda.current_stream(self._device).record_event().synchronize


def captured(
    work: Callable[[], None], before: Callable[[], None], device: torch.device, options: dict[str, Any] | None = None
) -> Callable[[], None]:
    """`work` compiled and in a CUDA graph; on a CPU as it is. `before` precedes each trial of it."""
    if device.type == "cpu":
        return work
    compiled: Any = torch.compile(work, fullgraph=True, dynamic=False, options=options)
    for _ in range(TRIES):
        before()
        compiled()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled()
    return graph.replay
