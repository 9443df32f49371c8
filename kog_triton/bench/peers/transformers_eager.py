"""transformers as it comes: `model.generate` with its dynamic cache, one kernel at a time; a streamer stamps tokens."""

import time
from collections.abc import Sequence

import torch

from kog_triton.bench.engines import Run
from kog_triton.bench.peers.transformers_model import TransformersPeer


class TransformersEager(TransformersPeer):
    name = "transformers"
    ran = "this adapter has run on a CPU and on one H200"
    how = "eager, sdpa"

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


class Stamps:
    """A streamer: `generate` hands it the prompt, then the tokens as it makes them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._prompt = True

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        for token in ids.reshape(-1).tolist():
            self._run.add(token)

    def end(self) -> None:
        pass
