"""The conformance suite's second part: the life of requests, from a mailbox's first word to its last one.

Whatever happens beside a request, it says what it says alone, token by token and bit for bit; it ends where it
is to end, and what is wrong with it is its own affair.
"""

import itertools
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from kog_triton.backends import pace, serving
from kog_triton.backends.cuda import launcher as cuda_launcher
from kog_triton.backends.mailbox import Failure, Mailbox
from kog_triton.errors import RequestError, RunError
from tests.lib.conformance_backends import BACKENDS, HIP, OF_FIBERS, TWO_GPUS
from tests.lib.conformance_requests import (
    GREEDY,
    LANES,
    RANKS,
    RULED,
    SHORT,
    TOGETHER,
    VOID,
    WARM,
    alone,
    at_look,
    every_backend_on,
    impatient,
    long_prompt,
    marked,
    opened,
    planted,
    request,
    resolved,
    said,
    scored,
    served,
    sizes_of,
)

NAMES = [*BACKENDS, *TOGETHER, *RANKS, TWO_GPUS]
every_backend = pytest.mark.parametrize("name", [marked(name) for name in NAMES])
# What touches weights runs with narrow ones as well, on backends that read all of them.
READS_NARROW = [name for name in NAMES if name.startswith("cuda")]
on_narrow = every_backend_on("one lane", names=NAMES, narrow=READS_NARROW)
on_narrow_and_hip_always = every_backend_on("one lane", names=NAMES, narrow=READS_NARROW, hip=(HIP,))

# ---- several requests ----


@every_backend_on(
    "one lane", "lanes", names=NAMES, narrow=READS_NARROW, always=(("cuda on a CPU, together", "int4 g128"),)
)
def test_requests_at_once_say_what_each_says_alone(name, model):
    """Prompts, lengths and rules unlike; two share their beginning."""
    backend, sizes = opened(name, model), sizes_of(name)
    requests = [
        request(0, long_prompt(name), RULED, sizes.count),
        request(1, (9,), GREEDY, sizes.count + 2),
        request(2, long_prompt(name)[:3], WARM, sizes.count - 1),
    ]
    expected = [alone(backend, r, slot) for r, slot in zip(requests, (2, 0, 1), strict=True)]
    assert served(backend, *requests) == expected


@on_narrow_and_hip_always
def test_a_request_that_joins_others_says_what_it_says_alone(name, model):
    backend, count = opened(name, model), sizes_of(name).count
    mailbox = Mailbox()
    late = request(1, (9, 31), RULED, count)

    def invite(output):
        if len(output) == 2:
            mailbox.post(late)

    first = request(0, SHORT, GREEDY, count, mask=invite)
    mailbox.post(first)
    backend.generate(mailbox)
    assert said(mailbox, 0) == alone(backend, first)
    assert said(mailbox, 1) == alone(backend, late)


@on_narrow_and_hip_always
def test_a_request_that_yields_in_prompt_and_answer_says_what_it_says_uninterrupted(name, model):
    """In the answer where a mask's function asks for it: the kernel waits for that, however busy the host is."""
    backend, sizes = opened(name, model), sizes_of(name)
    prompt = long_prompt(name, 3)
    mailbox, places, yields = Mailbox(), [], [1]  # tokens behind which the answer yields

    def yields_there(output):
        if output and len(output) in yields:
            yields.remove(len(output))
            mailbox.yield_now()

    requests = [request(0, prompt, RULED, sizes.count, mask=lambda output: None), request(1, (9,), GREEDY, sizes.count)]
    expected = [alone(backend, r) for r in requests]
    for r in (replace(requests[0], mask=yields_there), requests[1]):
        mailbox.post(r)
    while not places or mailbox.resumed:
        mailbox.resume()
        at_look(mailbox, 2 + len(places) % 3, mailbox.yield_now)
        # A host that looks as often as a GPU makes tokens, so that some look falls into the prompt.
        often = mock.patch.object(pace, "LONGEST_S", 50e-6)
        with often, mock.patch.object(cuda_launcher, "MOST_CHUNKS", 1):
            backend.generate(mailbox)
        if not places:
            backend.forward_logits((7, 8))  # leaves all slots alone
        going_on = mailbox.resumed.get(0)
        places.append(going_on.position if going_on else len(prompt) + sizes.count - 1)
        assert len(places) <= 2 * (sizes.long + sizes.count), "it yields and never goes on"
    assert [said(mailbox, slot) for slot in range(2)] == expected
    assert not yields
    assert any(0 < place < len(prompt) for place in places)
    assert len({place for place in places if place > len(prompt)}) > 1


@on_narrow
@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_a_cancel_frees_the_slot_for_another(name, model, where):
    """While a third request goes on."""
    backend, sizes = opened(name, model), sizes_of(name)
    mailbox, steps = Mailbox(), []
    after = request(0, (31, 2, 8), RULED, sizes.count)

    def replace_it(output):
        if not (steps and steps[-1].finish):
            steps.extend(said(mailbox, 0))
            if steps and steps[-1].finish:
                mailbox.post(after)

    def give_up(output):
        if len(output) == 2:
            mailbox.cancel(0)

    in_prompt = where == "prompt"
    given_up = request(0, long_prompt(name) if in_prompt else SHORT, RULED, 2 * sizes.count)
    beside = request(1, (9,), GREEDY, 3 * sizes.count, mask=replace_it)
    mailbox.post(given_up if in_prompt else replace(given_up, mask=give_up))
    mailbox.post(beside)
    if in_prompt:
        at_look(mailbox, 2, lambda: mailbox.cancel(0))
    with mock.patch.object(cuda_launcher, "MOST_CHUNKS", 1):
        backend.generate(mailbox)
    *tokens, last = steps
    assert last.finish == "cancel"
    assert len(tokens) in ((0,) if in_prompt else (2, 3, 4))  # says how many there were
    assert tokens == alone(backend, given_up)[: len(tokens)]
    assert said(mailbox, 0) == alone(backend, after)
    assert said(mailbox, 1) == alone(backend, beside)


@on_narrow
@pytest.mark.parametrize("word", ["cancel", "yield_now", "close"])
def test_a_word_is_heard_between_pieces_of_a_scored_prompt(name, model, word, monkeypatch):
    """By all requests; what was told by then is not told again."""
    backend, sizes = opened(name, model), sizes_of(name)
    asked = request(0, long_prompt(name), GREEDY, sizes.count, prompt_logprobs=2)
    beside = request(1, (9,), GREEDY, sizes.count)
    whole, answer = scored(backend, asked)
    assert [one.token for one in whole] == [*asked.prompt[1:]]
    monkeypatch.setattr(serving, "SCORED", 2)
    mailbox, places = Mailbox(), []
    push = mailbox.push_prompt

    def push_and_say(slot, logprobs):
        push(slot, logprobs)
        places.append(len(logprobs))
        if len(places) == 2:
            getattr(mailbox, word)(*[slot] if word == "cancel" else [])

    mailbox.push_prompt = push_and_say
    mailbox.post(asked)
    mailbox.post(beside)
    backend.generate(mailbox)
    assert places == [2, 2]
    if word == "cancel":
        assert [(step.finish, step.held) for step in said(mailbox, 0)] == [("cancel", 4)]
        after = request(0, (31, 2, 8), GREEDY, sizes.count)
        assert served(backend, after) == [alone(backend, after)]
    else:
        assert set(mailbox.resumed) == {0, 1} and said(mailbox, 0) == []
    if word == "yield_now":
        backend.forward_logits((7, 8))  # leaves all slots alone
        mailbox.resume()
        backend.generate(mailbox)
        assert said(mailbox, 0) == answer and sum(places) == len(whole)
    if word != "close":
        assert said(mailbox, 1) == alone(backend, beside)
    assert mailbox.read_prompt(0) == (whole if word == "yield_now" else whole[:4])


# ---- ends ----


@every_backend_on("one lane", "lanes", names=NAMES, narrow=READS_NARROW)
def test_a_stop_id_or_the_limit_ends_a_request(name, model):
    backend, count = opened(name, model), sizes_of(name).count
    whole = alone(backend, request(0, SHORT, GREEDY, count))
    assert whole[-1].finish == "length" and len(whole) == count
    tokens = [step.token for step in whole]
    for n in (1, count - 1):
        limited = alone(backend, request(0, SHORT, GREEDY, n))
        last = whole[n - 1]._replace(finish="length", held=len(SHORT) + n - 1)
        assert limited == [*whole[: n - 1], last]
    for at in {tokens.index(token) for token in (tokens[0], tokens[1], tokens[-1])}:
        ids = {tokens[at], *range(VOID)} - set(tokens[:at])
        stopped = alone(backend, request(0, SHORT, GREEDY, count, stop_token_ids=frozenset(ids)))
        assert stopped == [*whole[:at], whole[at]._replace(finish="stop", held=len(SHORT) + at)]


@on_narrow
def test_an_answer_may_fill_the_context_and_nothing_goes_beyond(name, model):
    backend, context = opened(name, model), sizes_of(name).context
    r = request(0, SHORT, GREEDY, context - len(SHORT))
    steps = alone(backend, r)
    assert len(steps) == r.max_tokens and steps[-1].finish == "length"
    tokens = [*SHORT, *(step.token for step in steps)]
    assert backend.forward_logits(tokens)[len(SHORT) - 1 : -1].argmax(1).tolist() == tokens[4:]
    with pytest.raises(RequestError, match=f"{context + 1} tokens do not fit the context"):
        backend.forward_logits([*tokens, 1])


@on_narrow_and_hip_always
def test_a_request_goes_on_from_what_its_slot_holds(name, model):
    backend = opened(name, model)
    first = served(backend, request(1, SHORT[:2], WARM, 2))[0]
    grown = [*SHORT[:2], *(step.token for step in first)]
    again = request(1, grown, RULED, 3, cached=len(grown) - 1)
    assert served(backend, again)[0] == alone(backend, replace(again, cached=0))


# ---- errors ----


@every_backend_on("void", "void lane", names=NAMES)
@pytest.mark.parametrize("where", ["prompt", "long prompt", "answer"])
def test_a_nan_is_the_error_of_its_request_and_the_next_one_runs(name, model, where):
    """The next one has its slot, where keys and values that are not finite lie ahead of it."""
    backend, count = opened(name, model), sizes_of(name).count

    def mask(output):
        return np.full(4, 0xFFFFFFFF if len(output) != 1 else 0, np.uint32) | only_void

    only_void = np.zeros(4, np.uint32)
    only_void[VOID // 32] = 1 << VOID % 32
    long = long_prompt(name)
    prompt = {"prompt": (7, VOID), "long prompt": [*long[:2], VOID, *long[2:]], "answer": SHORT}
    params = GREEDY if where == "long prompt" else RULED
    bad = request(1, prompt[where], params, count, mask=mask if where == "answer" else None)
    good = [request(0, SHORT, RULED, count), request(2, (9,), GREEDY, count)]
    expected = [alone(backend, r) for r in good]
    mailbox = Mailbox()
    for r in (good[0], bad, good[1]):
        mailbox.post(r)
    backend.generate(mailbox)
    *steps, last = mailbox.read(1, 0)
    assert isinstance(last, Failure) and isinstance(last.error, RunError)
    assert "NaN" in str(last.error) and "void" in str(last.error)
    assert [step.token for step in steps][1:] == ([VOID] if where == "answer" else [])
    assert [said(mailbox, r.slot) for r in good] == expected
    again = request(1, (7,), GREEDY, count)
    assert served(backend, again) == [alone(backend, again, 0)]


class Full:
    """A library of prompts that has no memory left; a prompt of one token asks for none."""

    def begin(self, token_ids, first, cache, streams=None):
        raise torch.OutOfMemoryError("out of memory")


def no_memory(slot, logprobs):
    raise MemoryError


@pytest.mark.parametrize(
    ("name", "where"),
    [
        marked(name, where)
        for where in ("library", "log-probabilities")
        for name in NAMES
        if where != "library" or not name.startswith(HIP)  # which refuses it (test_hip.py)
    ],
)
def test_what_fails_in_a_prompt_is_the_error_of_its_request(name, where, monkeypatch):
    """Though it is no error of ours."""
    backend, count = opened(name), sizes_of(name).count
    good = [request(0, (9,), RULED, count), request(2, (31,), GREEDY, count)]
    again = request(1, (7,), GREEDY, count)
    *expected, following = [alone(backend, r) for r in (*good, again)]
    mailbox = Mailbox()
    with monkeypatch.context() as patched:
        if where == "library":
            patched.setattr(backend, "options", replace(backend.options, prefill="library"))
            patched.setattr(backend, "library", Full())
            bad, error = request(1, SHORT, GREEDY, count), torch.OutOfMemoryError
        else:
            patched.setattr(mailbox, "push_prompt", no_memory)
            bad, error = request(1, SHORT, GREEDY, count, prompt_logprobs=1), MemoryError
        for r in (good[0], bad, good[1]):
            mailbox.post(r)
        backend.generate(mailbox)
    (failure,) = mailbox.read(1, 0)
    assert isinstance(failure, Failure) and isinstance(failure.error, error)
    assert [said(mailbox, r.slot) for r in good] == expected
    assert served(backend, again) == [following]


@every_backend
def test_what_one_lane_makes_void_leaves_the_others_finite(name):
    """So that the test above has logits of which only some are NaN: each lane scores its own share of the ids."""
    backend = opened(name, "void lane")
    before, void = np.isfinite(backend.forward_logits((7, VOID))).reshape(2, LANES.num_lanes, -1)
    assert before.all()
    assert void.any(1).tolist() == void.all(1).tolist() == [True, False, True, True]


@every_backend
def test_a_mask_that_takes_too_long_is_the_error_of_its_request(name, monkeypatch):
    """While the others wait for it in the kernel, one of them with masks and penalties of its own."""
    backend, sizes = opened(name), sizes_of(name)

    def slow(output):
        time.sleep(1.0 if len(output) == 2 else 0)

    late = request(1, SHORT, RULED, sizes.count, mask=slow)
    beside = [
        request(0, (9, 31), RULED, sizes.count, mask=lambda output: None),
        request(2, long_prompt(name), GREEDY, sizes.count),
    ]
    expected = [alone(backend, r, 1) for r in (late, *beside)]
    impatient(name, backend, monkeypatch)
    mailbox = Mailbox()
    for r in (beside[0], late, beside[1]):
        mailbox.post(r)
    backend.generate(mailbox)
    *steps, last = mailbox.read(1, 0)
    assert isinstance(last, Failure) and isinstance(last.error, RunError)
    assert str(last.error) == (
        "the mask of this request took more than 0.2 s: find it faster, or before it is asked for"
    )
    assert [step._replace(device_ns=0) for step in steps] == expected[0][:2]
    assert [said(mailbox, r.slot) for r in beside] == expected[1:]


@every_backend
def test_where_nothing_is_allowed_the_request_says_so(name):
    backend = opened(name)
    params = resolved(101, allowed_token_ids=[7], bad=((7,),), top_p=0.5)
    mailbox = Mailbox()
    mailbox.post(request(0, SHORT, params, 3))
    beside = request(1, (9,), GREEDY, 2)
    mailbox.post(beside)
    backend.generate(mailbox)
    (failure,) = mailbox.read(0, 0)
    assert isinstance(failure.error, RequestError)
    assert "no token is allowed at position 4" in str(failure.error)
    assert said(mailbox, 1) == alone(backend, beside)


# ---- planted faults ----

# header, before, after, who must see it; on the model "one lane" unless the test names another
FAULTS = {
    "every request in one slot's cache": (
        "cursor.h", "small->slot = cursor.slot", "small->slot = 0",
        partial(test_a_request_that_joins_others_says_what_it_says_alone, model="one lane"),
    ),
    "a token that is not kept": (
        "cursor.h", "states[2 * cursor.slot + 1] = cursor.token", "states[0] += 0",
        partial(
            test_a_request_that_yields_in_prompt_and_answer_says_what_it_says_uninterrupted,
            model="one lane",
        ),
    ),
    "a host that is not heard": (
        "outcome.h", "static_cast<int>(b.small->control)", "static_cast<int>(kRunning)",
        partial(
            test_a_request_that_yields_in_prompt_and_answer_says_what_it_says_uninterrupted,
            model="one lane",
        ),
    ),
    "a cancel that is not heard": (
        "outcome.h", "static_cast<int>(b.small->control)", "static_cast<int>(kRunning)",
        partial(test_a_cancel_frees_the_slot_for_another, model="one lane", where="answer"),
    ),
    "stop ids beyond those of a warp": (
        "cursor.h", "u32 i = thread + kWarpThreads; i < count", "u32 i = count; i < count",
        partial(test_a_stop_id_or_the_limit_ends_a_request, model="one lane"),
    ),
    "a token too many": (
        "outcome.h", "made >= static_cast<int>(ending.most)",
        "made > static_cast<int>(ending.most)",
        partial(test_a_stop_id_or_the_limit_ends_a_request, model="lanes"),
    ),
    "a NaN that nobody chooses": (
        "sample.h", "!(logit < float_of(kInfinity))", "logit == float_of(kInfinity)",
        partial(test_a_nan_is_the_error_of_its_request_and_the_next_one_runs, model="void", where="prompt"),
    ),
    "a NaN that loses to a number": (
        "sample.h", "{infinity(), kNoNumber}", "{-1e30, kNoNumber}",
        partial(test_a_nan_is_the_error_of_its_request_and_the_next_one_runs, model="void lane", where="prompt"),
    ),
}  # fmt: skip


HIP_FAULTS = {  # of headers that no other backend compiles, in steps that requests share
    "half of what columns have of K, twice": (
        "mma/products.h", "{w.z, w.w}, {columns[2], columns[3]}", "{w.x, w.y}, {columns[0], columns[1]}",
        partial(test_requests_at_once_say_what_each_says_alone, model="one lane"),
    ),
    "another's column": (
        "mma/operands.h", "thread / kSetColumns * kTokens + thread % kSetColumns % kTokens;",
        "thread / kSetColumns * kTokens + (thread + 1) % kSetColumns % kTokens;",
        partial(test_requests_at_once_say_what_each_says_alone, model="one lane"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"), [*itertools.product(OF_FIBERS, FAULTS), *((f"{HIP}, together", f) for f in HIP_FAULTS)]
)
def test_a_planted_fault_is_seen(fault, name):
    *edit, test = (FAULTS | HIP_FAULTS)[fault]
    model = test.keywords.get("model", "one lane") if isinstance(test, partial) else "one lane"
    with planted(name, model, *edit), pytest.raises(AssertionError):
        test(name)
