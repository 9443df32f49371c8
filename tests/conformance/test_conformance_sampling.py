"""The conformance suite's third part: which token a backend chooses, and what it tells of it.

Tokens are what the definition chooses from the backend's own logits, which the reference confirms;
log-probabilities are computed here, in float64.
"""

import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kog_triton.backends.mailbox import Mailbox
from kog_triton.errors import RequestError
from kog_triton.sampling import History, sample
from tests.lib.conformance_backends import BACKENDS, IN_LOGITS, LIMITS, OF_FIBERS, SLOW
from tests.lib.conformance_requests import (
    GREEDY,
    SEED,
    SHORT,
    alone,
    every_backend,
    marked,
    opened,
    planted,
    reference,
    request,
    resolved,
    said,
    served,
    sizes_of,
)


def assert_told(row, said, count):
    """The log-probabilities of a token, and of the best `count`, are those of a row of logits."""
    wide = row.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    best = np.argsort(-wide, kind="stable")[:count]
    assert [i for i, _ in said.top] == best.tolist()
    assert said.rank == 1 + np.argsort(-wide, kind="stable").tolist().index(said.token)
    told = [said.logprob, *(value for _, value in said.top)]
    assert np.abs(told - expected[[said.token, *best]]).max() < 1e-5


def assert_defined(backend, model, prompt, steps, params, sample_idx=0, mask=None):
    """Tokens and log-probabilities are those of the backend's logits, and these near the reference's."""
    sequence = [*prompt, *(step.token for step in steps[:-1])]
    logits, confirmed = (b.forward_logits(sequence) for b in (backend, reference(model)))
    assert np.sqrt(((logits - confirmed) ** 2).mean()) < IN_LOGITS * LIMITS[backend.spec.dtype]
    history = History(prompt)
    for position, (row, step) in enumerate(zip(logits[len(prompt) - 1 :], steps, strict=True), len(prompt)):
        bits = mask(history.output) if mask else None
        assert step.token == sample(row, params, history, position, sample_idx, bits).token
        history.append(step.token)
        if params.logprobs is None:
            assert (step.logprob, step.top, step.rank) == (None, (), None)
        else:
            assert_told(row, step, params.logprobs)


SETTINGS = {
    "temperature": {},
    "top_k": {"top_k": 7, "temperature": 30.0},
    "top_p": {"top_p": 0.6, "temperature": 3.0},
    "min_p": {"min_p": 0.1, "temperature": 8.0},
    "penalties, greedy": {"repetition_penalty": 0.8, "frequency_penalty": 1.9, "temperature": 0},
    "rewards": {"presence_penalty": -2.0, "repetition_penalty": 1.5, "top_k": 30},
    "bias, greedy": {"logit_bias": {3: 30.0, 90: 30.0}, "temperature": 0, "logprobs": 2},
    "allowed ids": {"allowed_token_ids": [3, 5, 31, 32, 63, 64, 90], "logprobs": 0},
    "bans": {"allowed_token_ids": [3, 5, 90], "bad": ((3, 3), (5, 3)), "min_tokens": 2, "end": (3,)},
    "all at once": {
        "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.002, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {5: 3.0, 60: -100.0},
        "logprobs": 4, "min_tokens": 3, "end": (11, 19), "bad": ((7,), (42, 45)),
    },
}  # fmt: skip
CASES = [
    marked(name, model, settings)
    for name in BACKENDS
    for model, settings in [*(("one lane", s) for s in SETTINGS), ("lanes", "all at once")]
    if name not in SLOW or settings == "all at once"
]


@pytest.mark.parametrize(("name", "model", "settings"), CASES)
def test_tokens_are_the_definitions(name, model, settings):
    backend = opened(name, model)
    params = resolved(backend.spec.vocab_size, **SETTINGS[settings])
    r = request(0, SHORT, params, sizes_of(name).count, sample_idx=3)
    assert_defined(backend, model, SHORT, alone(backend, r), params, 3)


@every_backend
def test_a_seed_or_a_sample_of_its_own_draws_tokens_of_its_own(name):
    backend, count = opened(name), sizes_of(name).count
    hot = request(0, SHORT, resolved(101, temperature=9.0), count)
    changes = {}, {}, {"seed": SEED + (1 << 32)}, {"seed": SEED + 1}, {"sample_idx": 1}
    drawn = []
    for change in changes:
        r = replace(hot, **change)
        r = replace(r, params=replace(r.params, seed=r.seed))
        drawn.append(tuple(step.token for step in alone(backend, r)))
    assert drawn[0] == drawn[1] and len(set(drawn)) == len(drawn) - 1


def words_of(ids):
    """A mask that allows these of 101 ids; the bits beyond them are set, and mean nobody."""
    bits = np.zeros(128, bool)
    bits[[*ids, *range(101, 128)]] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        marked(name, settings)
        for name in BACKENDS
        for settings in ("temperature", "penalties, greedy", "all at once")
        if name not in SLOW or settings == "penalties, greedy"
    ],
)
def test_a_mask_decides_who_is_allowed(name, settings):
    """Of 101 ids, in words of 32: every third, one alone in the last word, all, by turns."""
    backend, count = opened(name), sizes_of(name).count
    sets, heard = (range(1, 101, 3), [100], range(101)), []

    def mask(output):
        return None if len(output) % 3 == 2 else words_of(sets[len(output) % 3])

    def overheard(output):
        time.sleep(0.1 if len(output) == 1 else 0)  # the kernel is there first, and waits
        heard.append(list(output))
        return mask(output)

    params = resolved(101, **SETTINGS[settings])
    (steps,) = served(backend, request(0, SHORT, params, count, mask=overheard))
    tokens = [step.token for step in steps]
    assert all(token in sets[n % 3] for n, token in enumerate(tokens))
    assert heard == [tokens[:n] for n in range(count)]
    assert_defined(backend, "one lane", SHORT, steps, params, mask=mask)


BANNED, OTHER = 7, 96
BANS = {
    "a bad word": {"bad": ((BANNED,), (OTHER, OTHER, OTHER))},
    "an end too early": {"end": (BANNED,), "min_tokens": 3},
    "not among the allowed": {"allowed_token_ids": [i for i in range(101) if i != BANNED]},
}


@every_backend
@pytest.mark.parametrize("ban", BANS)
def test_a_ban_holds_among_those_whom_a_mask_allows(name, ban):
    """Though a bias is for the banned id; and where the mask has it alone, nobody is chosen in its place."""
    backend, most = opened(name), {BANNED: 100.0}
    greedy, drawn = (resolved(101, temperature=t, logit_bias=most, **BANS[ban]) for t in (0.0, 2.0))
    params = resolved(101, logit_bias=most), greedy, drawn

    def two(output):
        return words_of([BANNED, OTHER])

    def two_then_one(output):
        return words_of([BANNED] if output else [BANNED, OTHER])

    steps = served(backend, *(request(i, SHORT, p, 2, mask=two) for i, p in enumerate(params)))
    assert [[s.token for s in one] for one in steps] == [[BANNED] * 2, [OTHER] * 2, [OTHER] * 2]
    mailbox = Mailbox()
    for slot, p in enumerate(params):
        mailbox.post(request(slot, SHORT, p, 3, mask=two_then_one))
    backend.generate(mailbox)
    assert [step.token for step in said(mailbox, 0)] == [BANNED] * 3
    for slot in (1, 2):
        step, failure = mailbox.read(slot, 0)
        assert step.token == OTHER and isinstance(failure.error, RequestError)
        assert "no token is allowed at position 5" in str(failure.error)


@every_backend
def test_what_the_prompt_says_is_told_with_its_probability(name):
    backend = opened(name)
    mailbox = Mailbox()
    mailbox.post(request(0, SHORT, GREEDY, 2, prompt_logprobs=2))
    backend.generate(mailbox)
    told = mailbox.read_prompt(0)
    assert [one.token for one in told] == [*SHORT[1:]]
    for row, one in zip(backend.forward_logits(SHORT), told, strict=False):
        assert_told(row, one, 2)
    assert said(mailbox, 0) == alone(backend, request(0, SHORT, GREEDY, 2))


# ---- planted faults ----

# header, before, after, who must see it
FAULTS = {
    "half of a seed": (
        "sample.h", "r[Request::kSeed + 1]", "0u",
        partial(test_tokens_are_the_definitions, model="one lane", settings="temperature"),
    ),
    "logits a little off": (
        "outputs.h", "exp2_fast(v * -1.4426950408889634f)", "exp2_fast(v * -1.42f)",
        partial(test_tokens_are_the_definitions, model="one lane", settings="temperature"),
    ),
    "the mask of the token before": (
        "edit.h", "static_cast<u64>(made + 1)", "static_cast<u64>(made)",
        partial(test_a_mask_decides_who_is_allowed, settings="penalties, greedy"),
    ),
    "a mask that makes up for a bad word": (
        "edit.h", "    ban(completes(b, i, made));",
        "    if ((flags & kMasked) == 0) ban(completes(b, i, made));",
        partial(test_a_ban_holds_among_those_whom_a_mask_allows, ban="a bad word"),
    ),
    "ends that a mask may choose": (
        "edit.h", "made < static_cast<int>(r[Request::kMinTokens]);",
        "(flags & kMasked) == 0 && made < static_cast<int>(r[Request::kMinTokens]);",
        partial(test_a_ban_holds_among_those_whom_a_mask_allows, ban="an end too early"),
    ),
    "allowed by one is allowed": (
        "edit.h", "banned |= (flags & kAllowed) != 0 && !has_bit(allowed, id);",
        "banned &= (flags & kAllowed) == 0 || !has_bit(allowed, id);",
        partial(test_a_ban_holds_among_those_whom_a_mask_allows, ban="not among the allowed"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FIBERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, name):
    *edit, test = FAULTS[fault]
    with planted(name, "one lane", *edit), pytest.raises(AssertionError):
        test(name)
