"""Requests, masks and log-probabilities as the words that kernels and host exchange."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kog_triton.backends.logprob_words import RECORD_WORDS, TOP, read_record
from kog_triton.backends.mailbox import Request
from kog_triton.backends.request_words import (
    FIELDS,
    HEAD_WORDS,
    LIST_WORDS,
    LISTS,
    MOST_LOGPROBS,
    OFFSETS,
    Flag,
    capacity,
    decode,
    encode,
    encode_logits,
    flags_of,
    mask_words,
)
from kog_triton.errors import RequestError, RunError
from kog_triton.sampling import SamplingParams, raw_logprobs

VOCAB = 101


def request(bad=(), end=(), **params):
    params = {"temperature": 0.5, "seed": 1, "max_tokens": None} | params
    asked = replace(SamplingParams(**params), bad_words_token_ids=bad, end_token_ids=end)
    return Request(0, (1, 2, 3), asked, (7 << 40) + 9, 4, frozenset({9, 2}), 1, sample_idx=3)


def test_places_do_not_overlap():
    places = sorted(OFFSETS.values())
    ends = [*places[1:], HEAD_WORDS]
    wide = {name for name, form in FIELDS.items() if form in "Qd"} | set(LISTS)
    at = {place: name for name, place in OFFSETS.items()}
    for first, last in zip(places, ends, strict=True):
        assert last - first == (2 if at[first] in wide else 1)


def test_fields_and_lists_come_back():
    asked = request(
        bad=((5,), (6, 7, 8)), end=(9, 30), min_tokens=2, logit_bias={50: 1.5, 4: -2.25},
        allowed_token_ids=[0, 31, 32, 100], top_k=7, top_p=0.25, min_p=0.125, logprobs=3,
        repetition_penalty=1.25, frequency_penalty=-0.5, presence_penalty=0.75,
    )  # fmt: skip
    fields, lists = decode(encode(asked, VOCAB))
    assert fields == {
        "first": 1, "prompt": 3, "most": 4, "seed": (7 << 40) + 9, "sample": 3, "scale": 2.0,
        "distance": 2.0 * math.log2(math.e) * 2.0**26, "min_p": 3 * 2.0**26 + 1, "top_k": 7,
        "top_p": 1 << 30, "repetition": 1.25, "frequency": -0.5, "presence": 0.75, "min_tokens": 2,
        "logprobs": 3, "flags": int(~Flag.GREEDY & ~Flag.ALL_LOGITS & ~Flag.MASKED),
    }  # fmt: skip
    assert {name: lists[name].tolist() for name in LISTS if name != "bias_values"} == {
        "stop_ids": [2, 9], "end_ids": [9, 30], "bias_ids": [4, 50], "bad_ends": [1, 4],
        "bad_ids": [5, 6, 7, 8], "allowed": [1 | 1 << 31, 1, 0, 1 << 4],
    }  # fmt: skip
    assert lists["bias_values"].view(np.float32).tolist() == [-2.25, 1.5]


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        ({}, Flag(0)),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, Flag.GREEDY),
        ({"top_k": VOCAB}, Flag(0)),
        ({"top_k": VOCAB - 1}, Flag.CUT),
        ({"min_p": 1e-9}, Flag.CUT),
        ({"top_p": 0.999}, Flag.CUT | Flag.TOP_P),
        ({"logit_bias": {}}, Flag(0)),
        ({"logit_bias": {1: 0.5}}, Flag.EDITED | Flag.BIASED),
        ({"min_tokens": 3}, Flag(0)),
        ({"min_tokens": 3, "end": (4,)}, Flag.EDITED | Flag.MIN_TOKENS),
        ({"min_tokens": 1, "end": (4,)}, Flag.EDITED | Flag.MIN_TOKENS),
        ({"end": (4,)}, Flag(0)),
        ({"bad": ((4, 5),)}, Flag.EDITED),
        ({"presence_penalty": 0.1}, Flag.EDITED | Flag.PENALIZED),
        ({"logprobs": 0}, Flag.LOGPROBS),
    ],
)
def test_what_changes_nothing_sets_no_flag(params, flags):
    assert flags_of(request(**params), VOCAB) == flags


def test_a_mask_and_its_words():
    asked = replace(request(), mask=lambda output: None)
    assert flags_of(asked, VOCAB) == Flag.EDITED | Flag.MASKED
    words = mask_words(np.array([5, 6, 7, 8, 9], np.uint32), VOCAB, 3)
    assert words.tolist() == [3 << 32 | w for w in (5, 6, 7, 8)]
    assert (mask_words(None, VOCAB, 1) == (1 << 32 | 0xFFFFFFFF)).all()
    with pytest.raises(RunError, match="96 bits"):
        mask_words(np.zeros(3, np.uint32), VOCAB, 1)


def test_min_p_and_top_p_at_their_ends():
    fields, _ = decode(encode(request(min_p=1.0, top_p=1 - 2.0**-53), VOCAB))
    assert (fields["min_p"], fields["top_p"]) == (1.0, 0xFFFFFFFF)
    fields, _ = decode(encode(request(top_p=1e-12), VOCAB))
    assert (fields["min_p"], fields["top_p"]) == (math.inf, 0)
    assert Flag.TOP_P in Flag(int(fields["flags"]))


def test_no_more_logprobs_are_asked_for_than_there_are_ids():
    few = request(logprobs=MOST_LOGPROBS)
    assert [decode(encode(few, vocab))[0]["logprobs"] for vocab in (7, VOCAB)] == [7, MOST_LOGPROBS]


def test_top_p_is_floored():
    """The definition's survivors sit where the words say: halfway between two shares the lower one counts."""
    for share in (12345, (1 << 31) - 1, (1 << 32) - 2):
        fields, _ = decode(encode(request(top_p=(share + 0.75) / 2.0**32), VOCAB))
        assert fields["top_p"] == share


def test_logits_of_every_position():
    fields, lists = decode(encode_logits(6))
    assert (fields["prompt"], fields["most"], fields["first"]) == (6, 6, 0)
    assert fields["flags"] == Flag.GREEDY | Flag.ALL_LOGITS
    assert not any(len(ids) for ids in lists.values())


def test_every_request_fits_or_is_refused():
    largest = request(
        logit_bias=dict.fromkeys(range(VOCAB), 1.0), allowed_token_ids=range(VOCAB), bad=((1,) * (LIST_WORDS - 3),)
    )
    assert encode(largest, VOCAB).size == capacity(VOCAB) - capacity_slack(VOCAB)
    with pytest.raises(RequestError, match="bad_words"):
        encode(request(bad=((1,) * LIST_WORDS,)), VOCAB)


def capacity_slack(vocab):
    return capacity(vocab) - (HEAD_WORDS + LIST_WORDS + 2 * vocab + -(-vocab // 32))


@pytest.mark.parametrize("k", [-1, MOST_LOGPROBS + 1])
def test_too_many_logprobs_are_refused(k):
    with pytest.raises(RequestError, match=f"logprobs is {k}"):
        encode(request(logprobs=k), VOCAB)


def test_a_record_is_read_once_it_is_whole():
    logits = np.random.default_rng(0).normal(0, 30, VOCAB).astype(np.float32)
    token, k, number = 17, 3, 5
    bits = logits.view(np.uint32).astype(np.uint64)
    total = np.exp2((logits - logits.max()).astype(np.float64) * math.log2(math.e)).sum() * 2.0**40
    best = np.argsort(-logits, kind="stable")[:k]
    record = np.zeros(RECORD_WORDS, np.uint64)
    rank = 1 + int((logits > logits[token]).sum())
    values = [bits[token], bits[best[0]], int(math.log2(total) * 2**24), rank]
    for i, value in enumerate(values):
        record[i] = number << 32 | int(value)
    for i, token_id in enumerate(best):
        assert read_record(record, number, k) is None
        record[TOP + i] = (int(token_id) + 1) << 32 | int(bits[token_id])
    assert read_record(record, number + 1, k) is None
    logprob, top, told = read_record(record, number, k)
    assert told == rank
    expected, expected_top = raw_logprobs(logits, token, k)
    assert abs(logprob - expected) < 1e-6
    assert [i for i, _ in top] == [i for i, _ in expected_top]
    assert np.allclose([v for _, v in top], [v for _, v in expected_top], atol=1e-6)
