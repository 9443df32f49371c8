"""transformers as it comes: `model.generate` with its dynamic cache, one kernel at a time."""

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from kog_triton.bench.engines import Run
from kog_triton.bench.peers import Setting
from kog_triton.bench.peers.transformers_model import (
    Stamps,
    forward_logits,
    load_model,
    why_absent,
)

RAN = "this adapter has run on a CPU and on one H200"


def absent(setting: Setting) -> str:
    return why_absent(setting)


class TransformersEager:
    name = "transformers"
    checks_text = True

    def __init__(self, setting: Setting) -> None:
        self.version = f"transformers {version('transformers')}, eager, sdpa"
        self.spec = setting.weights.spec
        self._model: Any = load_model(setting.weights, setting.device)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        return forward_logits(self._model, token_ids)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> Run:
        run = Run(time.perf_counter())
        ids = torch.tensor([list(prompt)], device=self._model.device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=Stamps(run),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
        return run

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": sum(p.nbytes for p in self._model.parameters())}

    def close(self) -> None:
        self._model = None


def open_peer(setting: Setting) -> TransformersEager:
    return TransformersEager(setting)
