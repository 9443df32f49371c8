"""Requests of a backend against the reference, on a small model (model/small.py): by each kernel that serves them.

What stages alone leave out on a GPU that this project never ran on (stage_check.py): several requests a step, a prompt
in chunks, and the ranks of several GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kog_triton.backends import Backend, BackendOptions, DeepPositions, SeveralTokens, find_backend
from kog_triton.backends.mailbox import Failure, Mailbox, Request, Step
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError, KogError
from kog_triton.model.small import CONTEXT
from kog_triton.model.spec import ModelSpec
from kog_triton.sampling import History, SamplingParams, raw_logprobs, sample

# Cuts and edits of ids that many threads hold, several of a warp among them. What a compiler makes of such code was
# wrong for one GPU and right for another (docs/HIP.md, "One source, two vendors").
CHOICES: tuple[dict[str, Any], ...] = (
    {"top_k": 20},
    {"top_k": 300, "top_p": 0.3},
    {"min_p": 0.02, "repetition_penalty": 1.3, "logit_bias": dict.fromkeys(range(0, 1000, 9), 2.0)},
)
CHOSEN = 6  # tokens of a request
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
TOLD = 20  # log-probabilities with each token
PROMPT = 2  # tokens: fewer than a chunk is worth
DEEP = CONTEXT - CHOSEN - 3  # of a prompt whose keys and values a kernel of deep positions reads
# Of log-probabilities, in the deviation of the logits: the root mean square of what they may be off, and what a logit
# may be where a token is chosen that the reference finds nearly as good.
OFF, NEAR = 0.05, 0.1


def sampled(rules: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=2.5, seed=5, ignore_eos=True, **rules)


def serve(backend: Backend, *requests: Request) -> list[list[Step]]:
    """What requests that come together are answered; the error of the first that fails."""
    mailbox = Mailbox()
    for request in requests:
        mailbox.post(request)
    backend.generate(mailbox)
    answers = []
    for request in requests:
        steps = []
        for step in mailbox.read(request.slot, 0):
            if isinstance(step, Failure):
                raise step.error
            steps.append(step)
        answers.append(steps)
    return answers


def check_requests(
    backend: type[Backend], spec: ModelSpec, where: str, num_slots: int = 1, num_gpus: int = 1
) -> list[str]:
    """The kernels whose requests agree with the reference, by name; DeviceError names the first whose do not. None are
    tried of a backend that has one kernel for all."""
    if not issubclass(backend, SeveralTokens):
        return []
    weights = RandomWeights(spec)
    reference = find_backend("reference")(weights, BackendOptions(max_context=CONTEXT))
    ours = backend(weights, BackendOptions(num_slots, CONTEXT, num_gpus, prefill="kernel"))
    kernels, advice = [], "choose another backend, and report this"
    try:
        for kernel, requests in _cases(ours):
            for together in requests:
                try:
                    answers = serve(ours, *together)
                except KogError as error:
                    raise DeviceError(
                        f"backend {backend.name}: {kernel} fails on {where} ({error}): {advice}"
                    ) from error
                for request, steps in zip(together, answers, strict=True):
                    if wrong := _compare(reference, request, steps):
                        raise DeviceError(
                            f"backend {backend.name}: {kernel} computes wrong on {where} ({wrong}): {advice}"
                        )
            kernels.append(kernel)
    finally:
        ours.close()
    return kernels


def _cases(ours: Any) -> Iterator[tuple[str, list[list[Request]]]]:
    """Each kernel by its name, and the requests that it serves, one behind the other or several together."""
    spec, slots, gpus = ours.spec, ours.options.num_slots, ours.num_devices
    ways = [GREEDY, *map(sampled, CHOICES)]
    alone = ways if gpus > 1 else ways[:1]  # on one GPU stage_check.py tries the others
    name = "the kernel of one token" if gpus == 1 else f"the kernel of {gpus} ranks"
    yield name, [[_request(spec, 0, PROMPT, params)] for params in alone]
    for tokens, of_one in ours.kernels_of_several():
        if of_one:
            name = f"the kernel of {tokens} tokens of a prompt"
            yield name, [[_request(spec, 0, 2 * tokens + 3, GREEDY)]]
        else:
            each = range(min(tokens, slots))
            together = [_request(spec, slot, PROMPT, ways[slot % len(ways)]) for slot in each]
            yield f"the kernel of {tokens} requests a step", [together]
    if isinstance(ours, DeepPositions) and ours.serve_deep():
        yield "the kernel of deep positions", [[_request(spec, 0, DEEP, way)] for way in ways]


def _request(spec: ModelSpec, slot: int, length: int, params: SamplingParams) -> Request:
    prompt = tuple((7 + 131 * slot + 293 * i) % spec.vocab_size for i in range(length))
    seed = 5 + slot
    return Request(slot, prompt, replace(params, logprobs=TOLD, seed=seed), seed, CHOSEN)


def _compare(reference: Backend, request: Request, steps: Sequence[Step]) -> str:
    """What is wrong with an answer, by the reference's logits of the same tokens; "" if nothing is."""
    prompt, tokens = request.prompt, [step.token for step in steps]
    if len(tokens) != request.max_tokens:
        return f"{len(tokens)} tokens of {request.max_tokens}"
    vocab = reference.spec.vocab_size
    for step in steps:
        for token in (step.token, *(i for i, _ in step.top)):
            if not 0 <= token < vocab:
                return f"token {token} is none of {vocab}"
        if len(step.top) < TOLD:
            return f"{len(step.top)} log-probabilities of {TOLD}"
    logits = reference.forward_logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    spread, history, off = float(logits.std()), History(prompt), []
    params = request.params
    for position, (row, step) in enumerate(zip(logits, steps, strict=True), len(prompt)):
        own, best = raw_logprobs(row, step.token, -1)
        right = dict(best)
        off += [(step.logprob or 0.0) - own, *(told - right[i] for i, told in step.top)]
        off += [told - best[rank][1] for rank, (_, told) in enumerate(step.top)]
        if not _is_right(row, step.token, NEAR * spread, params, history, position):
            return f"token {step.token} is chosen at position {position}, by {params}"
        history.append(step.token)
    error = float(np.sqrt(np.mean(np.square(off)))) / spread
    return "" if error < OFF else f"log-probabilities are off by {error:.2g} of their deviation"


def _is_right(
    row: np.ndarray, token: int, near: float, params: SamplingParams, history: History, position: int
) -> bool:
    """Whether the definition of sampling chooses the token, by these logits or by some as near."""
    right = sample(row, params, history, position).token
    if token == right:
        return True
    row = row.copy()
    row[token] += near
    row[right] -= near
    return sample(row, params, history, position).token == token
