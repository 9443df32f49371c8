"""The definition of sampling: distribution, seeds, survivors.

The oracle is float64 mathematics written straight from the meaning of each parameter; Gumbel noise
for many positions at once goes through the exact integers, so that `draw`'s shortcuts are judged too.
"""

import math

import numpy as np
import pytest

from kog_triton.errors import RequestError
from kog_triton.sampling import History, SamplingParams, definition, fixed, sample
from kog_triton.sampling.definition import adjust, inverse_temperature, rank_of, survivors
from kog_triton.sampling.philox import random_words
from tests.lib.sampling_cases import VOCAB, bitmask, make_logits, params_of

# ---- the oracle ----


def plain_adjust(logits, params, prompt, output, mask_ids=None) -> np.ndarray:
    out = [float(x) for x in logits]
    for token in set(prompt) | set(output):
        r = params.repetition_penalty
        out[token] = out[token] / r if out[token] > 0 else out[token] * r
    for token in set(output):
        out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    for token in range(len(out)):
        outside = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        early = len(output) < params.min_tokens and token in params.end_token_ids
        if outside or early or (mask_ids is not None and token not in mask_ids):
            out[token] = -math.inf
    return np.array(out)


def plain_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    keep = p >= params.min_p * p.max()
    p = np.where(keep, p, 0)
    if params.top_k > 0:
        kth = sorted(p, reverse=True)[min(params.top_k, len(p)) - 1]
        p = np.where(p >= kth, p, 0)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    total, chosen = 0.0, set()
    for i in order:
        if total >= params.top_p:
            break
        total += p[i]
        chosen.add(i)
    p = np.array([p[i] if i in chosen else 0 for i in range(len(p))])
    return p / p.sum()


def draw_many(edited: np.ndarray, params: SamplingParams, positions: np.ndarray) -> np.ndarray:
    """One token a position by exact keys for every survivor: the definition without shortcuts."""
    ids = survivors(edited, params)
    ids = np.flatnonzero(edited > -np.inf) if ids is None else ids
    words = random_words(ids[None], positions[:, None], 0, params.seed)
    keys = edited[ids].astype(np.float64) * inverse_temperature(params)
    return ids[(keys[None] + fixed.gumbel(words) * fixed.NOISE_SCALE).argmax(axis=1)]


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail by Wilson and Hilferty's cube root; cells below 5 expected are pooled."""
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    dof = len(expected) - 1
    chi = ((counts - expected) ** 2 / expected).sum()
    z = ((chi / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))
    return 0.5 * math.erfc(z / math.sqrt(2))


PROMPT, OUTPUT = [0, 5, 9, 5], [9, 12, 12, 3]
SETTINGS = {
    "plain": ({}, None),
    "cold": ({"temperature": 0.4}, None),
    "hot": ({"temperature": 1.8}, None),
    "top_k": ({"top_k": 7}, None),
    "top_p": ({"top_p": 0.8}, None),
    "min_p": ({"min_p": 0.08, "temperature": 1.3}, None),
    "all three": ({"min_p": 0.01, "top_k": 15, "top_p": 0.9, "temperature": 1.2}, None),
    "penalties": ({"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}, None),
    "bias": ({"logit_bias": {4: 3.0, 6: -100.0, 12: 1.5}}, None),
    "allowed": ({"allowed_token_ids": [1, 2, 3, 20, 36]}, None),
    "mask": ({"top_p": 0.95}, [0, 4, 8, 15, 16, 23, 31, 32, 36]),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_distribution(setting):
    fields, mask_ids = SETTINGS[setting]
    params, logits = params_of(**fields), make_logits(11)
    history = History(PROMPT)
    for token in OUTPUT:
        history.append(token)
    mask = None if mask_ids is None else bitmask(mask_ids)
    draws = draw_many(adjust(logits, params, history, mask), params, np.arange(50_000))
    counts = np.bincount(draws, minlength=VOCAB)
    p = plain_probabilities(plain_adjust(logits, params, PROMPT, OUTPUT, mask_ids), params)
    assert counts[p == 0].sum() == 0
    assert chi_square_p(counts, p * draws.size) > 0.001


def test_the_chi_square_sees_a_wrong_temperature():
    logits, params = make_logits(11), params_of(temperature=1.03)
    counts = np.bincount(draw_many(logits, params, np.arange(50_000)), minlength=VOCAB)
    assert chi_square_p(counts, plain_probabilities(logits, params_of()) * 50_000) < 0.001


@pytest.mark.parametrize("vocab", [1, 3, 37, 1000, 4099])
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.05}, {"temperature": 5.0}, {"top_k": 5}, {"top_p": 0.7, "min_p": 1e-4}]
)
def test_sample_equals_the_definition_without_shortcuts(vocab, fields):
    params = params_of(vocab, **fields)
    positions = np.arange(40) + 7
    logits = make_logits(vocab, vocab, 3.0)
    expected = draw_many(logits, params, positions)
    got = [sample(logits, params, History([]), int(p)).token for p in positions]
    assert got == expected.tolist()


def test_near_ties_are_settled_by_the_exact_keys():
    # equal logits at a high temperature: only noise decides, and thousands of ids are close
    logits = np.zeros(50_000, np.float32)
    params = params_of(50_000, temperature=3.0)
    positions = np.arange(12)
    expected = draw_many(logits, params, positions).tolist()
    assert [sample(logits, params, History([]), int(p)).token for p in positions] == expected


def test_keys_closer_than_floating_point_are_compared_exactly():
    """Two ids whose logits make up for their noise to the last bit or two of float32."""
    params, float_is_wrong = params_of(2), 0
    for position in range(300):
        words = random_words(np.arange(2), position, 0, params.seed)
        gap = (fixed.gumbel(words) * fixed.NOISE_SCALE) @ [1, -1]
        rough = -np.log(-np.log((words + 0.5) / 2.0**32))
        for step in (-2, -1, 0, 1, 2):
            logits = np.array([0, gap], np.float32)
            logits[1] += np.float32(step) * np.spacing(logits[1])
            expected = int(draw_many(logits, params, np.array([position]))[0])
            assert sample(logits, params, History([]), position).token == expected
            float_is_wrong += int((logits + rough).argmax()) != expected
    assert float_is_wrong > 100


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_rarest_noise_can_make_up_for_any_gap_it_spans(temperature, monkeypatch):
    """Of two ids the likelier one draws the smallest noise that there is, the other one the largest."""
    words = np.array([0, 0xFFFFFFFF], np.uint32)
    for name in ("random_words", "vocab_words"):
        monkeypatch.setattr(definition, name, lambda *arguments: words)
    span = float(fixed.gumbel(words) @ [-1, 1]) * fixed.NOISE_SCALE
    assert 26.0 < span < definition.NOISE_SPAN
    params = params_of(2, temperature=temperature)
    for gap, token in ((span - 1e-3, 1), (span + 1e-3, 0)):
        logits = np.array([0, -gap * temperature], np.float32)
        assert sample(logits, params, History([]), 0).token == token


def test_same_seed_same_token_and_order_does_not_matter():
    logits, params = make_logits(5, 500), params_of(500, temperature=1.5)
    first = [sample(logits, params, History([]), p).token for p in range(100)]
    again = [sample(logits, params, History([]), p).token for p in reversed(range(100))]
    assert first == again[::-1]
    other_seed = [sample(logits, params_of(500, seed=9), History([]), p).token for p in range(100)]
    other_sample = [sample(logits, params, History([]), p, sample_idx=1).token for p in range(100)]
    assert first != other_seed
    assert first != other_sample


def test_sampling_without_a_seed_is_refused():
    with pytest.raises(RequestError, match="resolve"):
        sample(make_logits(0), SamplingParams(), History([]), 0)


# ---- who survives ----


@pytest.mark.parametrize("seed", range(30))
def test_survivors_equal_plain_float64(seed):
    rng = np.random.default_rng(100 + seed)
    logits = make_logits(seed, 211, float(rng.uniform(0.5, 6)))
    fields = {
        "temperature": float(rng.uniform(0.2, 2)),
        "min_p": float(rng.choice([0, 0.01, 0.2])),
        "top_k": int(rng.choice([0, 1, 13, 500])),
        "top_p": float(rng.choice([1.0, 0.2, 0.9, 0.999])),
    }
    params = params_of(211, **fields)
    got = survivors(logits, params)
    got = np.arange(211) if got is None else got
    wide = logits.astype(np.float64)
    assert got.tolist() == np.flatnonzero(plain_probabilities(wide, params)).tolist()


def test_ties_of_a_cut_all_survive():
    logits = np.array([1, 3, 2, 3, 2, 2, 0], np.float32)
    assert survivors(logits, params_of(7, top_k=1)).tolist() == [1, 3]
    assert survivors(logits, params_of(7, top_k=3)).tolist() == [1, 2, 3, 4, 5]
    assert survivors(logits, params_of(7, top_p=1e-9)).tolist() == [1, 3]
    assert survivors(logits, params_of(7, min_p=1.0)).tolist() == [1, 3]
    assert survivors(logits, params_of(7, top_p=0.7)).tolist() == [1, 2, 3, 4, 5]


def test_top_p_sits_exactly_on_its_boundary():
    # two equal weights: half the total is reached by the first tie, so both stay; and a hair above
    # one of four equal pairs takes the next pair in
    flat = np.zeros(2, np.float32)
    assert survivors(flat, params_of(2, top_p=0.5)).tolist() == [0, 1]
    stairs = np.array([5, 4, 5, 4], np.float32)
    share = math.exp(5) / (math.exp(5) + math.exp(4))
    assert survivors(stairs, params_of(4, top_p=share - 1e-6)).tolist() == [0, 2]
    assert survivors(stairs, params_of(4, top_p=share + 1e-6)).tolist() == [0, 1, 2, 3]


def test_the_share_of_top_p_is_rounded_up():
    # look for a second weight and a top_p that ask for a fraction of one more than the first
    second = -np.linspace(0.1, 3, 20_000).astype(np.float32)
    distance = (-second.astype(np.float64) * (math.log2(math.e) * 2.0**26)).astype(np.int64)
    totals = [(1 << 40) + w for w in fixed.weight(distance).tolist()]
    shares = [-(-(1 << 72) // total) for total in totals]
    over = [t * p - (1 << 72) for t, p in zip(totals, shares, strict=True)]
    tight = [i for i, rest in enumerate(over) if 0 < rest < 1 << 32]
    assert len(tight) > 10
    for i in tight[:10]:
        logits = np.array([0, second[i]], np.float32)
        params = params_of(2, top_p=shares[i] / 2.0**32)
        assert survivors(logits, params).tolist() == [0, 1]


def test_top_p_itself_is_rounded_down():
    """The largest share that the first weight alone reaches; what lies above it by less than a step is that share."""
    logits = np.array([0, -1], np.float32)
    distances = np.array([0, int(math.log2(math.e) * 2.0**26)])
    first, second = fixed.weight(distances).tolist()
    share = (first << 32) // (first + second)
    for part, left in ((0.0, [0]), (0.75, [0]), (1.0, [0, 1])):
        params = params_of(2, top_p=(share + part) / 2.0**32)
        assert survivors(logits, params).tolist() == left


def test_min_p_is_compared_with_distances_that_are_rounded_down():
    """ln 2 as a float32 is a little more than ln 2: its distance is that of 1/2, and a fraction."""
    logits = np.array([0, -np.float32(math.log(2)), -0.7], np.float32)
    distance = -float(logits[1]) * definition.LOG2E_SCALE
    assert 2.0**26 < distance < 2.0**26 + 1
    assert survivors(logits, params_of(3, min_p=0.5)).tolist() == [0, 1]


def test_top_p_is_over_what_top_k_left():
    # the two best hold 0.6 and 0.3 of all, 2/3 and 1/3 of the two: 0.65 keeps one, not two
    logits = np.log(np.array([0.6, 0.3, 0.1])).astype(np.float32)
    assert survivors(logits, params_of(3, top_k=2, top_p=0.65)).tolist() == [0]
    assert survivors(logits, params_of(3, top_p=0.65)).tolist() == [0, 1]


def test_far_logits_and_large_vocabularies_keep_integers_in_range():
    logits = np.full(1 << 20, 80.0, np.float32)
    logits[5] = -3e38
    params = params_of(1 << 20, top_p=0.5, temperature=1e-5)
    assert survivors(logits, params).size == (1 << 20) - 1
    spiked = np.full(100, -3e38, np.float32)
    spiked[42] = 3e38
    assert sample(spiked, params_of(100, temperature=1e-5), History([]), 3).token == 42
    assert sample(spiked, params_of(100, top_p=0.99, temperature=100), History([]), 3).token == 42


def test_a_rank_counts_the_likelier_and_the_lower_of_those_as_likely():
    logits = np.array([2.0, 5.0, 2.0, -1.0, 5.0, 2.0], np.float32)
    assert [rank_of(logits, token) for token in range(6)] == [3, 1, 4, 6, 2, 5]
