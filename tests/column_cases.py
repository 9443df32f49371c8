"""Requests for the emulated kernels of token columns, and what each says and leaves alone (cuda_walk.py)."""

from dataclasses import replace

import numpy as np
from cuda_walk import FiberBackend, lower
from kog_triton.backends.cuda.columns import lay_out_columns
from ring_walker import f16_spec

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure, Request
from kog_triton.random_weights import RandomWeights
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS

GREEDY = SamplingParams(temperature=0)
PROMPTS = (
    (5, 17, 60),
    (5, 90),
    (31, 2, 8, 77),
    (9, 9, 9),
    (4, 77, 4, 1, 3),
    (8, 1),
    (3, 3, 60),
    (1,),
)
COUNT = 5
ODD = f16_spec(hidden_size=54, intermediate_size=90, num_heads=4, head_dim=8, qkv_bias=True)
EXTRAS = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True}
ALLOWED = np.array([0x0F0F0F0F] * 4, np.uint32)
MIXED = {  # of each column
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=2.0, seed=7),
    "cut": SamplingParams(temperature=3.0, seed=8, top_k=9, top_p=0.8, logprobs=3),
    "penalized": SamplingParams(
        temperature=1.5, seed=9, repetition_penalty=1.7, logit_bias={3: 2.0, 60: -4.0}
    ),
    "masked": SamplingParams(temperature=1.0, seed=10, min_p=0.01),
    "banned": SamplingParams(
        temperature=0, min_tokens=2, end_token_ids=(5, 60), bad_words_token_ids=((9, 8), (7,))
    ),
    "told": SamplingParams(temperature=0, logprobs=5),
}


def layout_of(spec, columns, num_blocks=0, max_context=1024):
    return lay_out_columns(lower(build(spec), GPUS["h200"], num_blocks), max_context, columns)


def make(kind, spec=None, num_slots=3, num_blocks=2, seed=0, **options):
    spec = spec or f16_spec()
    weights, slots = RandomWeights(spec), BackendOptions(num_slots=num_slots)
    return kind(weights, slots, num_blocks, seed, **options)


def request(slot, prompt, count=COUNT, params=GREEDY, **options):
    return Request(slot, tuple(prompt), params, params.seed or 0, count, **options)


def run(backend, *requests):
    """All steps of requests that were posted at once, slot by slot, without their times."""
    mailbox = backend.new_mailbox()
    for r in requests:
        mailbox.post(r)
    backend.generate(mailbox)
    return {r.slot: [said(step) for step in mailbox.read(r.slot)] for r in requests}


def said(step):
    assert not isinstance(step, Failure), step.error
    return step.token, step.finish, step.logprob, step.top


def alone(spec, requests, num_blocks=2):
    """What each request says alone in a slot of its own, and what it leaves there."""
    backend = make(FiberBackend, spec, len(requests), num_blocks)
    steps = {r.slot: run(backend, r)[r.slot] for r in requests}
    return steps, backend.memory.cache.clone()


def staggered(backend, requests):
    """The same steps from different positions on: what every other slot begins with is there already."""
    out = []
    for r in requests:
        held = len(r.prompt) - 1 if r.slot % 2 else 0
        if held:
            run(backend, request(r.slot, r.prompt[:held], 1))
        out.append(replace(r, cached=held))
    return out
