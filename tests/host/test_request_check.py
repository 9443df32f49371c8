"""The check of a new GPU by requests: of backends that compute as the reference does, but for a fault of one kernel."""

import re
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure, Mailbox
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.errors import DeviceError, RunError
from kog_triton.model.shapes import named_shape
from kog_triton.model.small import small_model
from kog_triton.request_check import CHOSEN, GREEDY, OFF, _is_right, check_requests, sampled
from kog_triton.sampling import History, sample

SPEC = small_model(named_shape("qwen2.5-0.5b"))
ONE, TWO, FOUR, CHUNKS = (
    "the kernel of one token",
    "the kernel of 2 requests a step",
    "the kernel of 4 requests a step",
    "the kernel of 8 tokens of a prompt",
)
RANKS = "the kernel of 2 ranks"


def backend(several=((2, False), (4, False), (8, True)), damage=lambda requests, index, step: step):
    """With kernels of several tokens a step; `damage` changes the steps of requests that come together."""

    class Several(ReferenceBackend):
        served: ClassVar[list[list[int]]] = []
        closed = 0

        def __init__(self, weights, options):
            super().__init__(weights, BackendOptions(options.num_slots, options.max_context))
            self.num_devices = options.num_gpus
            type(self).served = []

        def kernels_of_several(self):
            return list(several)

        def generate(self, mailbox):
            requests, inner = mailbox.take(), Mailbox()
            self.served.append([len(request.prompt) for request in requests])
            for request in requests:
                inner.post(request)
            super().generate(inner)
            for request in requests:
                for index, step in enumerate(inner.read(request.slot, 0)):
                    mailbox.push(request.slot, damage(requests, index, step))

        def close(self):
            type(self).closed += 1
            super().close()

    return Several


def told(of, **options):
    with pytest.raises(DeviceError) as error:
        check_requests(of, SPEC, "an MI300X", **{"num_slots": 4} | options)
    said = str(error.value)
    assert of.closed == 1 and "\n" not in said
    return said


def test_every_kernel_serves_as_many_as_it_takes():
    of = backend()
    assert check_requests(of, SPEC, "here", num_slots=4) == [ONE, TWO, FOUR, CHUNKS]
    assert of.served == [[2], [2] * 2, [2] * 4, [19]] and of.closed == 1
    assert check_requests(of, SPEC, "here", num_slots=3) == [ONE, TWO, FOUR, CHUNKS]
    assert of.served == [[2], [2] * 2, [2] * 3, [19]]


def test_ranks_choose_by_all_rules():
    of = backend(())
    assert check_requests(of, SPEC, "here", num_gpus=2) == [RANKS]
    assert of.served == [[2]] * 4


def test_a_backend_of_one_kernel_has_nothing_more_to_try():
    assert check_requests(ReferenceBackend, SPEC, "here", num_slots=8) == []


KERNELS = {
    ONE: lambda requests: len(requests) == 1 and len(requests[0].prompt) == 2,
    TWO: lambda requests: len(requests) == 2,
    FOUR: lambda requests: len(requests) == 4,
    CHUNKS: lambda requests: len(requests[0].prompt) == 19,
}
WRONG = {
    "a token": lambda step: step._replace(token=(step.token + 1) % SPEC.vocab_size),
    "log-probabilities": lambda step: step._replace(top=tuple((i, logprob + 0.9) for i, logprob in step.top)),
    "its own": lambda step: step._replace(logprob=step.logprob - 8),
    "another's": lambda step: step._replace(top=tuple((i ^ 1, told) for i, told in step.top)),
    "the best": lambda step: step._replace(top=tuple((step.token, step.logprob) for _ in step.top)),
    "nothing": lambda step: step._replace(logprob=np.nan),
}
NONE = {  # what is no token, and what is missing
    "a token": lambda step: step._replace(token=SPEC.vocab_size),
    "one of the best": lambda step: step._replace(top=((-1, -2.0), *step.top[1:])),
    "the best": lambda step: step._replace(top=step.top[:-1]),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_that_is_wrong_is_named(kernel, wrong):
    def damage(requests, index, step):
        return WRONG[wrong](step) if index == 3 and KERNELS[kernel](requests) else step

    said = told(backend(damage=damage))
    assert re.fullmatch(
        rf"backend reference: {kernel} computes wrong on an MI300X \((token \d+ is chosen at position \d+, by .*|"
        r"log-probabilities are off by [\w.]+ of their deviation)\): choose another backend, and report this",
        said,
    )


@pytest.mark.parametrize("wrong", NONE)
def test_what_is_no_answer_is_refused_too(wrong):
    of = backend(damage=lambda requests, index, step: NONE[wrong](step) if index == 3 else step)
    assert re.search(r"computes wrong on .* \((token -?\d+ is none of \d+|19 log-pr.* of 20)\)", told(of))


def test_a_kernel_that_fails_is_named():
    failed = Failure(RunError("a wait of the kernel expired"))
    of = backend(damage=lambda requests, index, step: failed if len(requests) == 2 else step)
    assert told(of) == (
        f"backend reference: {TWO} fails on an MI300X (a wait of the kernel expired): choose another backend, and "
        "report this"
    )


def test_what_16_bits_cost_is_not_wrong():
    """Twice what small models of named shapes had at most, by the kernels' own C++ on a CPU: 0.017 (Qwen3-0.6B)."""
    noise = np.random.default_rng(0)
    off = 0.034 * 6  # of RandomWeights' deviation

    def rounded(requests, index, step):
        near = tuple((i, told + noise.normal(0, off)) for i, told in step.top)
        return step._replace(top=near, logprob=step.logprob + noise.normal(0, off))

    assert OFF > 0.034 and check_requests(backend(damage=rounded), SPEC, "here", num_slots=4)


@pytest.mark.parametrize("params", [GREEDY, sampled({"top_k": 300, "top_p": 0.3})], ids=["greedy", "sampled"])
def test_a_token_that_is_nearly_as_good_is_right(params):
    params, row = replace(params, seed=7), np.linspace(0, 20, 64, dtype=np.float32)
    history = History((3,))
    best = sample(row, params, history, 1).token
    others = {t for t in range(64) if t != best and _is_right(row, t, 1.0, params, history, 1)}
    assert _is_right(row, best, 0.0, params, history, 1) and 1 <= len(others) < 12
    assert not any(_is_right(row, t, 0.0, params, history, 1) for t in others)


def test_an_answer_that_ends_early_is_wrong():
    class Short(backend()):
        def generate(self, mailbox):
            super().generate(mailbox)
            for slot in range(len(self.served[-1])):
                steps = mailbox.read(slot, 0)
                for step in steps[: CHOSEN - 1]:
                    mailbox.push(slot, step)

    assert f"{ONE} computes wrong on an MI300X (5 tokens of 6)" in told(Short)
