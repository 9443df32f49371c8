"""Masks that come later than the CUDA kernel waits for them, its own C++ on a CPU (cuda_walk.py).

A step that waited in vain runs again with the mask: of the requests that shared it, penalized ones too, each says
what it says alone. Only a caller's function that takes longer than MASK_S fails its request.
"""

import re
import time
from unittest import mock

import pytest
import torch

from kog_triton.backends import serving, watchdog
from kog_triton.backends.cuda import launcher
from kog_triton.backends.serving import LateMask, LaunchServing
from kog_triton.errors import RunError
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import PROMPTS, error_of, make, request, run, serve, timeless
from tests.lib.cuda_walk import ColumnBackend, FiberBackend
from tests.lib.slow import some_always

PENALIZED = SamplingParams(temperature=0, frequency_penalty=0.6, repetition_penalty=1.1)
COUNT = 8
ROUNDS = 2000  # that a wait of the kernel takes: milliseconds, several times that on a busy machine


def anything(output):
    """Allows every id."""


def slow(numbers, seconds):
    """A function that takes so long for the masks of these tokens."""
    return lambda output: time.sleep(seconds if len(output) in numbers else 0)


@pytest.fixture(scope="module", params=[FiberBackend, ColumnBackend])
def backend(request):
    return make(request.param)


@pytest.fixture(scope="module")
def expected(backend):
    """What PROMPTS say alone, each in its slot, and what was counted of it."""
    steps = [run(backend, request(slot, PROMPTS[slot], COUNT, PENALIZED))[slot] for slot in range(3)]
    return steps, backend.memory.counts.clone()


@pytest.fixture
def hasty(backend, monkeypatch):
    monkeypatch.setattr(backend, "wait_ns", ROUNDS)
    return backend


def launches_in_vain(monkeypatch, kind=LateMask):
    """Errors of launches that waited for a mask, as they come; of another kind, they name another wait."""
    seen, check = [], launcher.check_launch

    def watched(*arguments):
        try:
            return check(*arguments)
        except LateMask as error:
            seen.append(error)
            raise kind(str(error).replace("mask", "peaks")) from None

    monkeypatch.setattr(launcher, "check_launch", watched)
    return seen


def asked(slot, mask=None):
    return request(slot, PROMPTS[slot], COUNT, PENALIZED, mask=mask)


def assert_alone(backend, steps, expected, *slots):
    said, counts = expected
    for slot in slots:
        assert timeless(steps[slot]) == said[slot]
        assert torch.equal(backend.memory.counts[slot], counts[slot])


@pytest.mark.parametrize(
    ("others", "kind"), some_always([(None, LateMask), (anything, LateMask), (anything, RunError)], None)
)
def test_one_that_takes_too_long_fails_its_request_alone(hasty, expected, monkeypatch, others, kind):
    """Also where a block that waited for one that waits for the mask was the first to give up."""
    monkeypatch.setattr(serving, "MASK_S", 2.0)
    in_vain = launches_in_vain(monkeypatch, kind)
    steps = serve(hasty, asked(0, others), asked(1, slow({3}, 3)), asked(2, others))
    assert in_vain
    *said, last = steps[1]
    assert isinstance(last.error, RunError)
    assert str(last.error).startswith("the mask of this request took more than 2 s: ")
    assert timeless(said) == expected[0][1][:3]
    assert_alone(hasty, steps, expected, 0, 2)


def test_those_that_are_late_together_fail_nobody(hasty, expected, monkeypatch):
    monkeypatch.setattr(serving, "MASK_S", 60.0)
    in_vain = launches_in_vain(monkeypatch)
    steps = serve(hasty, *(asked(slot, slow({2, 5}, 0.6)) for slot in range(3)))
    assert in_vain
    assert_alone(hasty, steps, expected, 0, 1, 2)


def test_a_mask_that_never_comes_is_an_error(hasty, expected):
    """Of the launch: the host has brought it, and the kernel does not see it."""
    with mock.patch.object(LaunchServing, "_bring_mask"):
        steps = serve(hasty, asked(0, anything), asked(1, anything))
    for slot in range(2):
        error = error_of(steps[slot])
        assert isinstance(error, LateMask)
        assert re.search(r"expired: .* mask, word \d of the host's, seen 0, wanted 1", str(error))
    assert_alone(hasty, serve(hasty, asked(1)), expected, 1)


@pytest.mark.parametrize("backend", [FiberBackend], indirect=True)
def test_a_callers_function_is_not_the_gpus_silence(hasty, expected, monkeypatch):
    """Though the host had heard of the step by then whose token it reads."""
    monkeypatch.setattr(serving, "MASK_S", 60.0)
    monkeypatch.setattr(watchdog, "SILENCE_S", 3.0)
    monkeypatch.setattr(hasty, "wait_ns", 5 * ROUNDS)
    read, looked = LaunchServing._read, []

    def read_at_the_second_look(self, one, words):
        if words.tokens[1] and not looked:
            looked.append(one)
            return 0
        return read(self, one, words)

    monkeypatch.setattr(LaunchServing, "_read", read_at_the_second_look)
    assert_alone(hasty, serve(hasty, asked(0, slow({2}, 4))), expected, 0)
    assert looked
