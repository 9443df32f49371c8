"""The Triton kernel's sampling: `choose` alone on given logits, bit for bit the definition's tokens.

Three blocks own 70 ids, which divides by nothing. The oracle is kog_triton/sampling, in numpy, which gets there by
another way: it sorts where the kernel searches, and rounds where the kernel counts.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

import triton
import triton.language as tl

from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.backends.triton.kernel import head, sample
from kog_triton.backends.triton.kernel.noise import gumbel, random_word
from kog_triton.backends.triton.kernel.pointers import given
from kog_triton.backends.triton.kernel.slots import advance, ask_host, state_of
from kog_triton.errors import RequestError, RunError
from kog_triton.sampling import History, SamplingParams, fixed
from kog_triton.sampling import sample as define
from kog_triton.sampling.definition import rank_of, raw_logprobs
from kog_triton.sampling.philox import random_words
from tests.lib.concurrent_interpreter import Deadlock, concurrent
from tests.lib.planting import plant
from tests.lib.slow import some_always
from tests.lib.triton_cases import Case, backend_of, plain

VOCAB = 70
CASE = Case(plain(vocab_size=VOCAB), 3)


@triton.jit
def choose_kernel(p, S: tl.constexpr, RULES: tl.constexpr):
    """Slot 0 chooses token after token of the same logits, as decode_kernel does after a pass."""
    p = given(p, S)
    slot = p.block * 0
    alive, passes = slot + 1, slot
    going = alive
    while going != 0:
        passes += 1
        control = ask_host(p, S)
        position = tl.load(state_of(slot, p, S)) + 1
        best, best_id, alive = head.choose(position, passes, slot, alive, p, S, RULES)
        token, control, alive = sample.argmax(best, best_id, control, passes, alive, p, S)
        if RULES:
            alive = head.keep(token, passes, slot, alive, p, S)
        going = (advance(token, alive, slot, p, S) == 0).to(tl.int32)


@pytest.fixture(scope="module")
def backend():
    return backend_of(CASE)


def draw(backend, logits, request: Request, seed: int = 0, memory: str = "sc", patch=None):
    """Steps of a request whose every pass has these logits; the prompt but for its last token is in the cache."""
    request = replace(request, cached=len(request.prompt) - 1)
    backend.memory.pointers.logits[0] = torch.from_numpy(logits)
    grid = (backend.tiles.num_blocks,)

    def launch(pointers, rules, chunks, columns):
        assert columns == 1
        pointers.words.zero_()
        pointers.error.zero_()
        choose_kernel[grid](pointers, backend.tiles, rules)
        return lambda: True

    mailbox = Mailbox()
    mailbox.post(request)
    before, backend._launch = backend._launch, launch
    try:
        with concurrent(seed, memory, backend.poll):
            backend.generate(mailbox)
    finally:
        backend._launch = before
    return mailbox.read(0)


# ---- tokens ----


def logits_of(seed: int, step: float = 0.0) -> np.ndarray:
    """Spread logits; with a `step` many are equal, negative zero among them."""
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    return np.round(logits / step).astype(np.float32) * np.float32(step) if step else logits


def expected(logits, params: SamplingParams, prompt, count: int, sample_idx=0, mask=None):
    history, out = History(prompt), []
    for i in range(count):
        bits = mask(history.output) if mask else None
        out.append(define(logits, params, history, len(prompt) + i, sample_idx, bits))
        history.append(out[-1].token)
    return out


PROMPT = (3, 42, 12, 3)
ALL = tuple(range(VOCAB))
RULES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.3},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7, "logit_bias": dict.fromkeys(PROMPT, 6.0)},
    "repetition below one": {"repetition_penalty": 0.37, "temperature": 0.8},
    "frequency and presence": {"temperature": 0.0, "frequency_penalty": 0.71, "presence_penalty": 1.9},
    "negative penalties": {"frequency_penalty": -1.3, "presence_penalty": -0.3, "temperature": 2.0},
    "bias": {"logit_bias": {0: 7.5, 69: -100.0, 31: 3.3}, "repetition_penalty": 1.2},
    "allowed": {"allowed_token_ids": (1, 24, 25, 69), "logit_bias": {24: 2.0, 3: 100.0}},
    "min_tokens": {"temperature": 0.0, "min_tokens": 2, "end_token_ids": ALL[::2]},
    "bad words": {"bad_words_token_ids": ((5,), (7, 9), (60, 61, 62)), "temperature": 3.0},
    "min_p": {"min_p": 0.07, "temperature": 1.7},
    "top_k": {"top_k": 5, "temperature": 9.0},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.83, "temperature": 2.5},
    "a tiny top_p": {"top_p": 1e-9, "temperature": 5.0},
    "all cuts": {"top_p": 0.6, "top_k": 20, "min_p": 0.01, "temperature": 3.0},
    "cuts, flat": {"top_p": 0.5, "top_k": 30, "temperature": 30.0},
    "cuts of edited logits": {"top_p": 0.9, "top_k": 8, "repetition_penalty": 1.5, "logit_bias": {8: 9.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_tokens_are_the_definitions(name, backend):
    params = replace(SamplingParams(seed=2**63 + 11), **RULES[name])
    for step in (0.0, 1.5):
        logits = logits_of(len(name), step)
        request = Request(0, PROMPT, params, params.seed, 3, sample_idx=5)
        steps = draw(backend, logits, request)
        want = expected(logits, params, PROMPT, 3, 5)
        assert [s.token for s in steps] == [s.token for s in want]


# The last all-reduce of a token: of a first check, of a second, or one of a search at least.
ONE, TWO, CUT = 1, 3, 16
WAYS = {
    "min_p": ({"min_p": 0.3, "temperature": 3.0}, {ONE, TWO}),
    "top_p": ({"top_p": 0.6, "temperature": 3.0}, {ONE, TWO, CUT}),
    "top_k": ({"top_k": 9, "temperature": 3.0}, {ONE, TWO, CUT}),
    "top_k of all": ({"top_k": VOCAB, "min_p": 1e-30}, {ONE}),
    "top_p, steep": ({"top_p": 0.5, "temperature": 0.01}, {ONE}),
    "top_k, top_p": ({"top_k": 30, "top_p": 0.8, "temperature": 3.0}, {ONE, TWO, CUT}),
}  # fmt: skip


@pytest.mark.parametrize("name", some_always(WAYS, "top_p", "top_k"))
def test_a_cut_is_searched_where_checks_do_not_settle_it(name, backend):
    settings, ways = WAYS[name]
    seen = set()
    for seed in range(30):
        params = replace(SamplingParams(seed=seed), **settings)
        logits = logits_of(seed % 3, 0.5)
        (step,) = draw(backend, logits, Request(0, PROMPT, params, seed, 1))
        assert step.token == expected(logits, params, PROMPT, 1)[0].token
        rounds = backend.memory.pointers.wide[backend.tiles.region("all_reduce") // 2 :][:48] >> 32
        last = int(rounds.max()) % 64
        seen.add(min(last, CUT))
    assert seen == ways


def test_a_bad_word_of_several_ids_is_banned_where_the_output_ends_with_its_beginning(backend):
    """Greedy runs into the word again and again; the prompt's end is no part of the output."""
    logits = np.zeros(VOCAB, np.float32)
    logits[7], logits[9] = 3, 2
    words = ((7, 7, 7), (12, 7), (9, 7, 7))
    params = SamplingParams(temperature=0.0, seed=1, bad_words_token_ids=words)
    steps = draw(backend, logits, Request(0, (12,), params, 1, 7))
    assert [s.token for s in steps] == [7, 7, 9, 7, 9, 7, 9]
    assert [s.token for s in steps] == [s.token for s in expected(logits, params, (12,), 7)]


def test_a_mask_is_waited_for(backend):
    logits = logits_of(4)
    params = SamplingParams(temperature=1.1, seed=3)

    def mask(output):
        if len(output) == 2:
            return None
        bits = np.zeros(3, np.uint32)
        bits[len(output) % 2 * 2] = 0b101010 << len(output)
        return bits

    steps = draw(backend, logits, Request(0, PROMPT, params, 3, 4, mask=mask))
    want = expected(logits, params, PROMPT, 4, mask=mask)
    assert [s.token for s in steps] == [s.token for s in want]
    assert {s.token // 32 for s in steps[:2]} == {0, 2}


def test_a_failing_mask_is_the_requests_error(backend):
    def mask(output):
        if output:
            raise ValueError("no grammar allows this")

    params = SamplingParams(temperature=0.0, seed=3)
    first, last = draw(backend, logits_of(4), Request(0, PROMPT, params, 3, 4, mask=mask))
    assert first.token == logits_of(4).argmax()
    assert isinstance(last, Failure) and "no grammar" in str(last.error)


def test_log_probabilities(backend):
    """Raw ones, whatever is edited: the chosen token's and the best, ties by id."""
    logits = logits_of(7, 1.5)
    params = SamplingParams(seed=9, logprobs=6, temperature=4.0, top_k=30, logit_bias={3: 5.0})
    steps = draw(backend, logits, Request(0, PROMPT, params, 9, 2), 3, "stale")
    for step in steps:
        logprob, top = raw_logprobs(logits, step.token, 6)
        assert step.logprob == pytest.approx(logprob, abs=2e-7)
        assert [i for i, _ in step.top] == [i for i, _ in top]
        assert step.rank == rank_of(logits, step.token)
        np.testing.assert_allclose([v for _, v in step.top], [v for _, v in top], atol=2e-7)
    assert [s.token for s in steps] == [s.token for s in expected(logits, params, PROMPT, 2)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_void_the_request(value, backend):
    logits = logits_of(1)
    logits[33] = value
    for params in (SamplingParams(seed=1, top_p=0.5), SamplingParams(temperature=0.0, seed=1)):
        (failure,) = draw(backend, logits, Request(0, PROMPT, params, 1, 2))
        assert isinstance(failure.error, RunError) and "NaN or +inf" in str(failure.error)


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"temperature": 0.0}])
def test_where_nothing_is_allowed_the_request_says_so(changes, backend):
    params = replace(SamplingParams(seed=1, allowed_token_ids=(5,)), **changes)
    params = replace(params, bad_words_token_ids=((5,),))
    (failure,) = draw(backend, logits_of(1), Request(0, PROMPT, params, 1, 2))
    assert isinstance(failure.error, RequestError) and "position 4" in str(failure.error)


# ---- planted faults ----

FAULTS = {
    "a negative logit is divided": (
        "edits", "tl.where(wide > 0.0, wide / factor, wide * factor)", "wide / factor", "repetition",
    ),
    "the prompt is not seen": ("edits", "(marks & (SEEN | COUNT)) != 0", "(marks & COUNT) != 0", "repetition"),
    "presence counts": (
        "edits", 'tl.where(count > 0, logit - real(request, "presence"), logit)',
        'logit - real(request, "presence") * count', "frequency and presence",
    ),
    "min_tokens are one too many": ("edits", "number <= tl.load", "number < tl.load", "min_tokens"),
    "candidates have one buffer": (
        "sample", "(epoch & 1) * (4 * S.num_blocks)", "(epoch & 0) * (4 * S.num_blocks)", "greedy",
    ),
    "a cut loses its first digit": (
        "all_reduce", "for step in range(DIGITS)", "for step in range(1, DIGITS)", "top_k",
    ),
    "a cut is too high": ("all_reduce", ">= target) &", "> target) &", "top_k"),
    "every argmax survives": ("all_reduce", "(before >= share_of(total, share))", "(before < 0)", "top_p"),
    "as many before the argmax as top_k": ("all_reduce", "(first >= k)", "(first > k)", "top_k of one"),
    "a share of all, not of the top_k": (
        "all_reduce", "where(is_open, OPEN,", "where(is_open, SURVIVES,", "cuts, flat",
    ),
    "weights ignore the cut before": (
        "all_reduce", "tl.where(left, weight(distance), 0)", "weight(distance)", "all cuts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name, backend, monkeypatch, tmp_path):
    module, before, after, rule = FAULTS[name]
    plant(monkeypatch, tmp_path, module, before, after)
    params = replace(SamplingParams(seed=2**63 + 11), **RULES[rule])
    for seed in range(12):
        logits = logits_of(seed) - np.float32(9)
        try:
            steps = draw(backend, logits, Request(0, PROMPT, params, params.seed, 3), seed)
        except Exception as error:  # Triton wraps what a program raises
            assert Deadlock.__name__ in repr(error)
            return
        if [s.token for s in steps] != [s.token for s in expected(logits, params, PROMPT, 3)]:
            return
    pytest.fail("nobody noticed")


# ---- random numbers ----


@triton.jit
def noise_kernel(ids, at, words, noise, N: tl.constexpr):
    """`at`: position, sample index, seed (low, high)."""
    i = tl.arange(0, N)
    r = random_word(tl.load(ids + i), tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    tl.store(words + i, r.to(tl.int64))
    tl.store(noise + i, gumbel(r))


@triton.jit
def gumbel_kernel(words, noise, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(noise + i, gumbel(tl.load(words + i).to(tl.uint32)))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("position, sample_idx", [(0, 0), (131071, 3), (2**31 - 1, 2**16)])
def test_random_words_are_the_definitions_own(seed, position, sample_idx):
    ids = torch.cat([torch.arange(60), torch.tensor([151935, 2**17, 2**31 - 4, 2**31 - 1])]).int()
    at = np.array([position, sample_idx, seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    words, noise = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    with concurrent():
        noise_kernel[(1,)](ids, torch.from_numpy(at), words, noise, 64)
    want = random_words(ids.numpy().astype(np.int64), position, sample_idx, seed)
    np.testing.assert_array_equal(words.numpy(), want)
    np.testing.assert_array_equal(noise.numpy(), fixed.gumbel(want))


def test_gumbel_on_edge_words():
    """Powers of two, where the series takes over from the logarithm, both ends, and many between."""
    edges = [0, 2**32 - 1 - 2**22, *(2**k for k in range(32)), *(2**32 - 2**k for k in range(33))]
    near = {(e + d) % 2**32 for e in edges for d in (-2, -1, 0, 1, 2)}
    random = np.random.default_rng(0).integers(0, 2**32, 1024 - len(near))
    words = np.concatenate([np.array(sorted(near)), random]).astype(np.int64)
    noise = torch.zeros(1024, dtype=torch.int64)
    with concurrent():
        gumbel_kernel[(1,)](torch.from_numpy(words), noise, 1024)
    np.testing.assert_array_equal(noise.numpy(), fixed.gumbel(words.astype(np.uint32)))
