"""What sampling does to logits before it draws: bans, masks, penalties, bias; greedy, errors and log-probabilities."""

import math

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from kog_triton.errors import RequestError, RunError
from kog_triton.sampling import History, SamplingParams, raw_logprobs, sample
from kog_triton.sampling.definition import adjust
from tests.lib.sampling_cases import VOCAB, bitmask, make_logits, params_of

# ---- greedy, bans, errors ----


def test_greedy_takes_the_lowest_of_ties():
    logits = np.array([0, 7, 3, 7, -np.inf], np.float32)
    assert sample(logits, params_of(5, temperature=0, top_k=1), History([]), 0).token == 1


def test_mask_and_allowed_ids_decide_greedy_too():
    logits = np.arange(VOCAB, dtype=np.float32)
    greedy = params_of(temperature=0)
    assert sample(logits, greedy, History([]), 0, mask=bitmask([3, 31, 32, 35])).token == 35
    only = params_of(temperature=0, allowed_token_ids=[2, 6])
    assert sample(logits, only, History([]), 0).token == 6
    assert logits.tolist() == list(range(VOCAB))
    with pytest.raises(RequestError, match="no token is allowed at position 8"):
        sample(logits, only, History([]), 8, mask=bitmask([3]))
    with pytest.raises(RunError, match="the mask has 32 bits"):
        sample(logits, greedy, History([]), 0, mask=np.ones(1, np.uint32))


@pytest.mark.parametrize(("bad", "word"), [(np.nan, "NaN"), (np.inf, "inf")])
def test_a_computed_nan_or_infinity_is_an_error_with_its_place(bad, word):
    logits = make_logits(3)
    logits[17] = bad
    for fields in ({"temperature": 0}, {}, {"allowed_token_ids": [1, 2]}):
        with pytest.raises(RunError, match=f"position 55 hold .*{word} at id 17"):
            sample(logits, params_of(**fields), History([]), 55)


def test_min_tokens_hides_every_end():
    logits = np.zeros(6, np.float32)
    logits[4], logits[5], logits[2] = 9, 8, 1
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[5])
    params = params.resolve(6, eos_token_ids=[4])
    history, tokens = History([1]), []
    for position in range(3):
        tokens.append(sample(logits, params, history, 1 + position).token)
        history.append(tokens[-1])
    assert tokens == [2, 2, 4]


def test_bad_words_of_one_and_of_several_tokens():
    encode = {"x": [3], " x": [3], "y z": [1, 2, 4], " y z": [1, 2, 4]}
    params = SamplingParams(temperature=0, bad_words=["x", "y z"]).resolve(6, (), encode.__getitem__)
    logits = np.array([0, 1, 2, 9, 5, 4], np.float32)

    def after(prompt, output):
        history = History(prompt)
        for token in output:
            history.append(token)
        return sample(logits, params, history, 9).token

    assert after([], []) == 4
    assert after([], [2]) == 4
    assert after([], [0, 1, 2]) == 5
    assert after([1], [2]) == 4  # words are looked for in the output only
    assert after([], [1, 2, 0]) == 4


# ---- penalties ----


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3])
def test_repetition_penalty_equals_transformers(penalty):
    logits, prompt = make_logits(8), [3, 3, 30, 1]
    history = History(prompt)
    for token in [7, 1]:
        history.append(token)
    ids = torch.tensor([[*prompt, 7, 1]])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    expected = processors(ids, torch.from_numpy(logits)[None])[0].numpy()
    assert adjust(logits, params_of(repetition_penalty=penalty), history).tolist() == expected.tolist()


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_extreme_penalties_keep_every_logit_finite(penalty):
    logits = np.float32([-3e4, -1.0, 0.0, 1.0, 3e4])
    params = params_of(5, repetition_penalty=penalty, frequency_penalty=2, presence_penalty=2)
    edited = adjust(logits, params, History(range(5)))
    assert np.isfinite(edited).all() and (np.sign(edited) == np.sign(logits)).all()


def test_penalties_and_bias_step_by_step_in_float32():
    f32 = np.float32
    fields = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": -0.7}
    params = params_of(**fields, logit_bias={2: 0.1, 3: -0.2, 30: 5})
    logits, history = make_logits(9), History([1, 2])
    for token in [2, 3, 3]:
        history.append(token)
    expected = logits.copy()
    for token, count in {1: 0, 2: 1, 3: 2}.items():
        x = logits[token]
        x = x / f32(1.1) if x > 0 else x * f32(1.1)
        x = f32(float(x) - float(f32(0.3)) * count)
        x = x - f32(-0.7) if count else x
        expected[token] = x
    for token, bias in {2: 0.1, 3: -0.2, 30: 5}.items():
        expected[token] += f32(bias)
    assert adjust(logits, params, history).tolist() == expected.tolist()


def test_history_grows_with_its_tokens():
    rng = np.random.default_rng(2)
    prompt, output = rng.integers(0, 50, 20).tolist(), rng.integers(0, 200, 300).tolist()
    history = History(prompt)
    for token in output:
        history.append(token)
    counts = dict(zip(history.seen.tolist(), history.counts.tolist(), strict=True))
    assert counts == {t: output.count(t) for t in set(prompt) | set(output)}
    assert history.ends_with(output[-4:])
    assert history.ends_with([])
    assert not history.ends_with([*output[-4:], 1000])


# ---- log-probabilities ----


def test_logprobs_are_of_the_raw_logits():
    logits = make_logits(21)
    params = params_of(temperature=0.3, top_k=2, logit_bias={6: 50.0}, logprobs=3)
    out = sample(logits, params, History([]), 4)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0).numpy()
    best = np.argsort(-expected)[:3]
    assert out.token == 6
    assert out.logprob == pytest.approx(expected[6], abs=1e-12)
    assert [i for i, _ in out.top] == best.tolist()
    assert [x for _, x in out.top] == pytest.approx(expected[best].tolist(), abs=1e-12)
    assert sample(logits, params_of(), History([]), 4).logprob is None
    assert sample(logits, params_of(logprobs=0), History([]), 4).top == ()
    assert len(sample(logits, params_of(logprobs=-1), History([]), 4).top) == VOCAB


def test_logprob_ties_are_listed_by_id():
    logits = np.array([1, 2, 2, -np.inf, 2, 2], np.float32)
    assert [i for i, _ in raw_logprobs(logits, 0, 3)[1]] == [1, 2, 4]
    assert raw_logprobs(logits, 3, 6)[0] == -math.inf
