"""Small models for the Triton kernel in the concurrent interpreter, and requests served there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kog_triton.backends import BackendOptions, WeightSource
from kog_triton.backends.mailbox import Failure, Mailbox, Request, Step
from kog_triton.backends.triton import TritonBackend
from kog_triton.backends.triton.host.shared_steps import SharedSteps
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from kog_triton.sampling import SamplingParams
from kog_triton.schedule import triton
from tests.lib.concurrent_interpreter import concurrent
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.ring_walker import spec_of

CPU = torch.device("cpu")
PROMPT = (3, 42, 12)
GREEDY = SamplingParams(temperature=0.0)


def plain(layers: int = 1, **changes) -> ModelSpec:
    """One lane; 50 rows of the head divide by nothing."""
    base = {"hidden_size": 32, "intermediate_size": 44, "num_heads": 4, "vocab_size": 50, "dtype": DType.F16}
    return spec_of(num_layers=layers, **(base | changes))


def lanes(reduce: tuple[Reduce, ...], delay: int, head: Head = Head.MEAN, **changes) -> ModelSpec:
    """Two lanes of two blocks each; both modules of a layer reduce alike."""
    base = {"intermediate_size": 64, "num_lanes": 2, "delay": delay, "head": head}
    return plain(len(reduce), reduce_attention=reduce, reduce_mlp=reduce, **(base | changes))


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    num_blocks: int = 4
    tokens: tuple[int, ...] = PROMPT
    split_least: int = 16  # attention.SPLIT_LEAST, BLOCK_N and FEW: small ones give a short context
    block_n: int = 64  # what a long one has; twice as many keys are walked by one split
    few: int = 128
    narrow_cost: int = triton.NARROW_COST  # what keeps a small model's rows in tiles of one width


def backend_of(case: Case, weights=None, limit: int = 1 << 22, num_slots: int = 1) -> TritonBackend:
    options = BackendOptions(max_context=16, num_slots=num_slots)
    weights = weights or ArrayWeights(case.spec)
    with patch.object(triton, "NARROW_COST", case.narrow_cost):
        backend = TritonBackend(weights, options, case.num_blocks, CPU)
    backend.memory.pointers = backend.memory.pointers._replace(limit=limit)
    return backend


def round_robin(case: Case, **sizes) -> TritonBackend:
    """A backend whose requests share no step (test_triton_shared_steps.py has those that do)."""
    backend = backend_of(case, **sizes)
    backend.launcher.shared_steps = SharedSteps(1, None)
    return backend


def serve(backend: TritonBackend, *requests: Request, seed: int = 0, host=None) -> list[list[Step | Failure]]:
    """The steps of each request, all of them posted at once; `host` is called all the time."""
    mailbox = Mailbox()
    for request in requests:
        mailbox.post(request)

    def watch() -> None:
        backend.poll()
        if host is not None:
            host(mailbox)

    with concurrent(seed, "stale", watch):
        backend.generate(mailbox)
    return [mailbox.read(request.slot, 0) for request in requests]


class InterpretedBackend(TritonBackend):
    """The Triton backend on a CPU: every launch runs in the concurrent interpreter, on a few blocks."""

    def __init__(self, weights: WeightSource, options: BackendOptions) -> None:
        lanes = weights.spec.num_lanes
        super().__init__(weights, options, num_blocks=max(4, lanes), device=CPU)

    def generate(self, mailbox: Mailbox) -> None:
        with concurrent(0, "stale", self.poll):
            super().generate(mailbox)

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        with concurrent(1, "stale"):
            return super().forward_logits(token_ids)

    def run_stage(self, stage: str, layer: int, state: Mapping[str, Any]) -> dict[str, Any]:
        with concurrent(2, "stale"):
            return super().run_stage(stage, layer, state)
