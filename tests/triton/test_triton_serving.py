"""Requests served by the Triton kernel in the concurrent interpreter: slots, turns, yield, cancel, failures.

A request's tokens are the same whoever else is served, however often the kernel leaves and comes back.
"""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

from kog_triton.backends import StageTimer, serving
from kog_triton.backends.launch_queue import LaunchQueue
from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.backends.token_words import OUTCOME_SHIFT, Outcome
from kog_triton.backends.triton.host import launcher
from kog_triton.backends.triton.host.stages import StageRun
from kog_triton.backends.triton.host.waits import describe_wait
from kog_triton.backends.triton.kernel import slots
from kog_triton.backends.triton.kernel.slots import BEAT
from kog_triton.backends.triton.kernel.words import WAITS
from kog_triton.errors import RequestError, RunError
from kog_triton.model.spec import Head, Reduce
from kog_triton.sampling import History, SamplingParams, sample
from kog_triton.sampling.definition import raw_logprobs
from tests.lib.concurrent_interpreter import concurrent
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.triton_cases import GREEDY, Case, backend_of, lanes, plain, round_robin, serve

ONE = Case(plain(qk_norm=True), 3)
LANES = Case(lanes((Reduce.OWN, Reduce.DELAYED), 1, Head.VOCAB_PARALLEL, lane_norms=True), 4)
EDITED = SamplingParams(temperature=0.7, seed=5, frequency_penalty=1.5, top_k=9)

COUNTED = SamplingParams(temperature=0.7, seed=5, frequency_penalty=1.5)


class Planted(ArrayWeights):
    """Weights with one value set by hand."""

    def __init__(self, spec, name: str, at: tuple[int, ...], value: float):
        super().__init__(spec)
        self.arrays[name][at] = value


def tokens(steps) -> list[int]:
    assert all(not isinstance(s, Failure) for s in steps), steps
    return [s.token for s in steps if s.token >= 0]


@triton.jit
def striking(S: tl.constexpr):
    """A clock that stands still."""
    return tl.full((), 1234567890123, tl.int64)


ALONE: dict[str, list[int]] = {}


def alone(params: SamplingParams, prompt: tuple[int, ...], count: int) -> list[int]:
    """What a request makes with the model to itself; made once for the tests that ask."""
    if (key := repr((params, prompt, count))) not in ALONE:
        (steps,) = serve(backend_of(ONE), Request(0, prompt, params, params.seed or 0, count))
        assert [s.finish for s in steps] == [None] * (count - 1) + ["length"]
        ALONE[key] = tokens(steps)
    return ALONE[key]


@pytest.mark.parametrize("case", [ONE, LANES], ids=["one lane", "vocabulary cut"])
def test_tokens_are_the_definitions_own(case):
    """The ids that kog_triton.sampling draws from the kernel's own logits, bit for bit."""
    params = SamplingParams(temperature=1.7, seed=2**63 + 11)
    backend = backend_of(case)
    (steps,) = serve(backend, Request(0, (3, 42), params, params.seed, 3, sample_idx=2))
    made = tokens(steps)
    with concurrent(1, "sc"):
        logits = backend.forward_logits([3, 42, *made[:-1]])
    for i, token in enumerate(made):
        assert token == sample(logits[1 + i], params, History((3, 42)), 2 + i, 2).token


def test_a_token_carries_the_kernel_s_clock_or_none(monkeypatch):
    """Not the host's: what the interpreter, which has no clock, cannot say stays 0."""
    request = Request(0, (3, 42), SamplingParams(temperature=0.0), 0, 3)
    (steps,) = serve(backend_of(ONE), request)
    assert [s.device_ns for s in steps] == [0, 0, 0]
    monkeypatch.setattr(slots, "clock", striking)
    for module in (slots, launcher):
        monkeypatch.setattr(module, "stamps_tokens", lambda tiles: True)
    (stamped,) = serve(backend_of(ONE), request)
    assert [s.device_ns for s in stamped] == [1234567890123] * 3
    assert tokens(stamped) == tokens(steps)


def test_every_launch_of_a_stage_is_timed():
    """Behind what is called for each, which a run that is not timed does not call."""
    backend, calls = backend_of(ONE), []
    assert isinstance(backend, StageTimer)
    state = {"token_ids": torch.tensor([3, 42, 12])}
    with concurrent(1, "sc"):
        seconds = backend.time_stage("embed", 0, state, lambda: calls.append("before"))
        again = backend.run_stage("embed", 0, state)
    assert len(seconds) == len(calls) == 3 and all(s > 0 for s in seconds)
    want = backend.memory.pointers.half_embed[[3, 42, 12]].float()
    assert torch.equal(again["x"][0], want)


def test_a_token_waits_for_its_stamp():
    backend, mailbox = backend_of(ONE), Mailbox()
    backend.launcher.stamps = True
    host = serving.LaunchServing(backend.launcher, mailbox, LaunchQueue())
    request = Request(0, (3, 42), SamplingParams(temperature=0.0), 0, 2)
    mailbox.post(request)
    host.running[0] = host.begin(request)
    at, words = slots.mailbox_offsets(backend.tiles), backend.memory.pointers.mailbox[0]
    words[at["tokens"]] = 1 << 32 | 7
    host.poll()
    assert mailbox.read(0, 0) == []
    words[at["stamps"]] = 55
    host.poll()
    assert [(s.token, s.device_ns) for s in mailbox.read(0, 0)] == [(7, 55)]


def test_the_kernel_says_why_a_request_ends_and_the_host_believes_it():
    """The word of its last token; of a stop id that is also the last that was asked for, that it stops."""
    backend, at = backend_of(ONE), slots.mailbox_offsets(backend_of(ONE).tiles)["tokens"]
    (whole,) = serve(backend, Request(0, (3, 42), GREEDY, 0, 2))
    words = backend.memory.pointers.mailbox[0, at : at + 2].tolist()
    assert [word >> 32 + OUTCOME_SHIFT for word in words] == [Outcome.RUNNING, Outcome.LENGTH]
    stop = frozenset({whole[-1].token})
    (stopped,) = serve(backend, Request(0, (3, 42), GREEDY, 0, 2, stop_token_ids=stop))
    assert backend.memory.pointers.mailbox[0, at + 1] >> 32 + OUTCOME_SHIFT == Outcome.STOP
    assert [step.finish for step in (whole[-1], stopped[-1])] == ["length", "stop"]


def test_stop_ids_and_kept_keys():
    """A stop id ends the request and is its last token; a prompt's known part is not run again."""
    backend = backend_of(ONE)
    (first,) = serve(backend, Request(0, (3, 42), GREEDY, 0, 3))
    whole = tokens(first)
    stop = frozenset({49 - whole[1], whole[1], *range(50, 90)} - {whole[0]})
    (again,) = serve(backend, Request(0, (3, 42), GREEDY, 0, 3, stop_token_ids=stop, cached=1))
    assert [(s.token, s.finish) for s in again] == [(whole[0], None), (whole[1], "stop")]


def test_slots_take_turns_and_do_not_touch_each_other():
    """Two requests, one of them with rules of its own, and a third that joins them late."""
    backend, watched, ahead = round_robin(ONE, num_slots=3), [], []

    def host(mailbox):
        made = [mailbox._inboxes[slot]._steps.qsize() for slot in range(2)]
        ahead.append(made[0] - made[1])
        if made[0] == 1 and not watched:
            watched.append(mailbox)
            mailbox.post(Request(2, (7,), GREEDY, 0, 1))

    steps = serve(backend, Request(0, (3, 42), EDITED, 5, 3), Request(1, (12, 8), GREEDY, 0, 3), host=host)
    assert tokens(steps[0]) == alone(EDITED, (3, 42), 3)
    assert tokens(steps[1]) == alone(GREEDY, (12, 8), 3)
    assert tokens(watched[0].read(2, 0)) == alone(GREEDY, (7,), 1)
    assert set(ahead) == {0, 1, -1}  # a launch begins where the last one did not


def test_launches_that_end_at_every_token_serve_all_alike():
    """As where requests are cancelled again and again."""
    backend, ahead = round_robin(ONE, num_slots=2), []

    def host(mailbox):
        backend.launcher.leave()
        made = [mailbox._inboxes[slot]._steps.qsize() for slot in range(2)]
        ahead.append(made[0] - made[1])

    serve(backend, Request(0, (3, 42), GREEDY, 0, 4), Request(1, (12, 8), GREEDY, 0, 4), host=host)
    assert -1 <= min(ahead) < max(ahead) <= 1


def test_a_yield_at_any_token_leaves_all_to_go_on():
    """Counts, masks of bad words and positions survive in device memory; prompts are left half done too."""
    backend = round_robin(ONE, num_slots=2)
    mailbox = Mailbox()
    mailbox.post(Request(0, (3, 42), EDITED, 5, 3))
    mailbox.post(Request(1, (12, 8), GREEDY, 0, 3))
    first = backend.memory.pointers.states[:, 0, 0]
    returns, seen = 0, set()

    def host():
        backend.poll()
        if int(first.sum()) > before:
            mailbox.yield_now()

    while not returns or mailbox.resumed:
        mailbox.resume()
        before = int(first.sum()) if returns else 0
        with concurrent(returns, "stale", host):
            backend.generate(mailbox)
        returns += 1
        seen.add(tuple(first.tolist()))
    assert tokens(mailbox.read(0, 0)) == alone(EDITED, (3, 42), 3)
    assert tokens(mailbox.read(1, 0)) == alone(GREEDY, (12, 8), 3)
    assert returns >= 4 and len(seen) == returns


@pytest.mark.parametrize("in_prompt", [True, False])
def test_cancel_ends_at_a_token(in_prompt):
    backend = backend_of(ONE)
    prompt = tuple(range(8)) if in_prompt else (3, 42)

    def host(mailbox):
        if in_prompt or mailbox._inboxes[0]._steps.qsize():
            mailbox.cancel(0)

    (steps,) = serve(backend, Request(0, prompt, GREEDY, 0, 8), host=host)
    assert steps[-1].finish == "cancel"
    assert len(steps) - 1 <= (0 if in_prompt else 3)  # in the pass that read the word, or the one after


def test_prompt_log_probabilities():
    backend = backend_of(ONE)
    mailbox = Mailbox()
    prompt = (3, 42, 12, 8)
    mailbox.post(Request(0, prompt, GREEDY, 0, 1, prompt_logprobs=2))
    with concurrent(0, "sc", backend.poll):
        backend.generate(mailbox)
    with concurrent(1, "sc"):
        logits = backend.forward_logits(prompt)
    told = mailbox.read_prompt(0)
    assert [t.token for t in told] == [42, 12, 8]
    for row, one in zip(logits, told, strict=False):
        assert (one.logprob, one.top) == raw_logprobs(row, one.token, 2)
    assert [s.token for s in mailbox.read(0, 0)] == [logits[3].argmax()]


# ---- failures ----


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name, at", [("lm_head", (7, 0)), ("layers.0.down_proj", (0, 2, 1))])
def test_a_number_that_is_none_voids_the_run(name, at, value):
    weights = Planted(ONE.spec, name, at, value)
    if name == "lm_head":  # plus infinity for one token of two at most: keep its sign
        weights.arrays[name][8] = -weights.arrays[name][7]
    ((failure,),) = serve(backend_of(ONE, weights), Request(0, (3, 42), GREEDY, 0, 2))
    assert isinstance(failure.error, RunError)
    assert "NaN" in str(failure.error) and "inf" in str(failure.error)


@pytest.mark.parametrize("name", ["q_norm", "mlp_norm"])
def test_what_float16_cannot_hold_voids_the_run(name):
    """Keys of -inf would weigh nothing and pass unseen; the error says what may help."""
    weights = ArrayWeights(ONE.spec)
    weights.arrays[f"layers.0.{'k_norm' if name == 'q_norm' else name}"][..., 3] = 6e4
    ((failure,),) = serve(backend_of(ONE, weights), Request(0, (3, 42), GREEDY, 0, 2))
    assert isinstance(failure.error, RunError) and "--dtype bf16" in str(failure.error)


def test_an_error_is_one_requests_own():
    """NaN where one prompt looks, in its token's embedding."""
    weights = Planted(ONE.spec, "embed", (30, 4), np.nan)
    good, bad = Request(0, (3, 42), GREEDY, 0, 3), Request(1, (12, 30), GREEDY, 0, 3)
    steps = serve(backend_of(ONE, weights, num_slots=2), good, bad)
    assert isinstance(steps[1][0].error, RunError)
    assert tokens(steps[0]) == alone(GREEDY, (3, 42), 3)


def let_wait(machine):
    """A program may wait for the host as long as it likes: no deadlock yet, though who was held back goes on."""
    machine.still = min(machine.still, 40)


LATE = "the mask of this request took more than 2 s: find it faster, or before it is asked for"


@pytest.mark.parametrize(
    ("slot", "number", "slow"), [(0, 2, True), (1, 1, True), (1, 1, False)],
    ids=["the slow one's token", "another's token", "nobody is slow"],
)  # fmt: skip
def test_a_late_mask_is_one_requests_error(slot, number, slow, monkeypatch):
    """The host is busy from one token on, in a function that takes too long or elsewhere, and the kernel waits in vain,
    in whosever pass it is. The others go on, bit for bit; the next one has the slot."""
    seconds, backend = [0.0], round_robin(ONE, limit=200, num_slots=3)
    clocks = SimpleNamespace(monotonic=lambda: seconds[0], sleep=lambda seconds: None)
    monkeypatch.setattr(serving, "time", clocks)
    words, at = backend.memory.pointers.mailbox, slots.mailbox_offsets(backend.tiles)["tokens"]
    launches, mailbox = [], Mailbox()

    def masks(output):
        seconds[0] += 10 * (slow and len(output) == 2)

    requests = [
        Request(0, (3, 42), EDITED, 5, 3, mask=masks),
        Request(1, (12, 8), COUNTED, 5, 3, mask=lambda output: None),
        Request(2, (7,), GREEDY, 0, 2),
    ]

    def host():
        running = mailbox.resumed.get(slot)
        told = int(words[slot, at + number - 1]) >> 32 == number
        if told and running is not None and len(running.output) < number:
            let_wait(machine)
        else:
            backend.poll()

    def watched(*served):
        launches.append(settle(*served))
        return launches[-1]

    settle = backend.launcher._settle
    monkeypatch.setattr(backend.launcher, "_settle", watched)
    for request in requests:
        mailbox.post(request)
    with concurrent(0, "stale", host) as machine:
        backend.generate(mailbox)
    assert sum(isinstance(one.error, serving.LateMask) for one in launches) == 1
    *first, last = mailbox.read(0, 0)
    expected = [alone(r.params, r.prompt, r.max_tokens) for r in requests]
    assert tokens(first) == expected[0][:2]
    if slow:
        assert isinstance(last.error, RunError) and str(last.error) == LATE
    else:
        assert last.token == expected[0][2]
    assert [tokens(mailbox.read(n, 0)) for n in (1, 2)] == expected[1:]
    (again,) = serve(backend, Request(0, (7,), GREEDY, 0, 2))
    assert tokens(again) == expected[2]


def test_a_launch_that_makes_nothing_for_want_of_a_mask_is_void(monkeypatch):
    """Rather than another one for ever."""
    backend = backend_of(ONE, limit=200)
    monkeypatch.setattr(serving.LaunchServing, "_bring_mask", lambda *_: None)
    mailbox = Mailbox()
    mailbox.post(Request(0, (3,), COUNTED, 5, 2, mask=lambda output: None))
    with concurrent(0, "stale", lambda: let_wait(machine)) as machine:
        backend.generate(mailbox)
    (failure,) = mailbox.read(0, 0)
    assert isinstance(failure.error, RunError)
    assert "stage sample, for the host's mask of token 1" in str(failure.error)


def test_what_no_kernel_does_is_refused_by_name():
    params = SamplingParams(temperature=0.0, logprobs=-1)
    ((failure,),) = serve(backend_of(ONE), Request(0, (3,), params, 0, 1))
    assert isinstance(failure.error, RequestError) and "logprobs" in str(failure.error)


@pytest.mark.parametrize("stalled", [1, 2])
@pytest.mark.parametrize("case", [ONE, LANES], ids=["one lane", "lanes"])
def test_a_wait_that_expires_says_where(case, stalled):
    """One block never starts: the others give up, leave, and name block, stage, layer, word, seen and wanted."""
    backend = backend_of(case, limit=5)
    with concurrent(0, "sc", stalled=stalled), pytest.raises(RunError) as caught:
        backend.forward_logits((3, 42, 12))
    said = (
        r".*rank 0, block \d, stage \w+, layer [01], for (word \d+ of \w+: seen 0x\w{8}, wanted phase 1"
        r"|words of \w+ that came after all), after 0 steps: the run is void$"
    )
    assert caught.match(said)


def test_a_stage_that_waits_in_vain_claims_no_steps_of_a_launch_before_it(monkeypatch):
    backend = backend_of(ONE, limit=5)
    backend.memory.pointers.mailbox[0, BEAT] = 17  # what a launch that served has left there
    monkeypatch.setattr(StageRun, "_give_pairs", lambda *_: None)
    zeros = torch.zeros(1, 1, ONE.spec.hidden_size)
    with concurrent(0, "sc"), pytest.raises(RunError) as caught:
        backend.run_stage("o_proj", 0, {"x": zeros, "attention": zeros})
    said = r"stage o_proj, layer 0, for (word|words) .*(phase \d|after all): the run is void$"
    assert re.search(said, str(caught.value))


def test_a_late_mask_is_named_before_those_that_waited_for_who_waits_for_it():
    tiles = backend_of(ONE).tiles
    mask, argmax = ([WAITS.index(f"sample {what}"), 0, 2] + [0] * 8 for what in ("mask", "argmax"))
    came = [0] * 11
    assert "block 2, stage sample, for the host's mask of token 2" in describe_wait([[2], came, argmax, mask], tiles, 3)
    said = describe_wait([[2], came, argmax], tiles, 3)
    assert "rank 0, block 1, stage sample, for candidates of pass 2, after 3 steps" in said
    assert describe_wait([[2], came, argmax], tiles, -9).endswith("after 9 steps of prompts")
    assert describe_wait([[0], came, came], tiles, 3) == ""
