"""transformers with a static cache: its `generate` compiles the decode step (mode reduce-overhead).

One cache of the request's length is made once and emptied between requests, so that the CUDA graphs
behind "reduce-overhead" are recorded once: the best that transformers does at batch 1.
"""

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from kog_triton.bench.peers import Setting
from kog_triton.bench.peers.transformers_model import (
    Stamps,
    forward_logits,
    load_model,
    why_absent,
)
from kog_triton.bench.subjects import Run
from kog_triton.errors import RunError

RAN = "this adapter has run on a CPU only, compiled, without CUDA graphs"


def absent(setting: Setting) -> str:
    if setting.device.type == "cpu":
        return "its generate compiles on a GPU only"
    return why_absent(setting)


class TransformersCompiled:
    name = "transformers-compiled"
    checks_text = True

    def __init__(self, setting: Setting) -> None:
        from transformers import StaticCache

        self.version = f"transformers {version('transformers')}, static cache, torch.compile"
        self.spec = setting.weights.spec
        self._model: Any = load_model(setting.weights, setting.device)
        self._cache: Any = StaticCache(config=self._model.config, max_cache_len=setting.max_context)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        return forward_logits(self._model, token_ids)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> Run:
        run = Run(time.perf_counter())
        self._cache.reset()
        ids = torch.tensor([list(prompt)], device=self._model.device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self._cache,
            streamer=Stamps(run),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
        if self._model.device.type != "cpu" and not hasattr(self._model, "_compiled_call"):
            raise RunError("transformers did not compile its decode step: this is not that peer")
        return run

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": sum(p.nbytes for p in self._model.parameters())}

    def close(self) -> None:
        self._model = self._cache = None


def open_peer(setting: Setting) -> TransformersCompiled:
    return TransformersCompiled(setting)
