"""What the CUDA monokernel samples: its own C++ on a CPU, against the definition on its own logits.

Requests go through the backend's mailbox to fibers (cuda_walk.py). Every token, and every
log-probability, is what kog_triton.sampling makes of the logits that the same kernel computes for
the same sequence. Faults planted in the headers must be seen.
"""

import time

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions, serving
from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.request_words import MOST_LOGPROBS
from kog_triton.backends.token_words import Outcome
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import RequestError, RunError
from kog_triton.model.spec import DType
from kog_triton.sampling import History, SamplingParams, raw_logprobs, sample
from kog_triton.sampling.definition import adjust, survivors
from tests.lib import cuda_walk
from tests.lib.cuda_planting import plant
from tests.lib.cuda_sampling import (
    EVERY,
    LANES,
    SETTINGS,
    Triplets,
    assert_defined,
    odd_or_even_of,
    post,
    resolved,
    steps_of,
)
from tests.lib.cuda_walk import INCLUDE, FiberBackend, Walk, compile_walk, header
from tests.lib.ring_walker import spec_of
from tests.lib.slow import some_always

VOCAB = 331
SMALL = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24}


class Alike(RandomWeights):
    """All logits are equal."""

    def load(self, name):
        tensor = super().load(name)
        return tensor[:1].expand_as(tensor).contiguous() if name == "lm_head" else tensor


MODELS = {
    "odd": (RandomWeights, {"vocab_size": VOCAB}, 3),
    "ties": (Triplets, {"vocab_size": VOCAB}, 2),
    "all equal": (Alike, {"vocab_size": 97}, 2),
    "several rows a thread": (RandomWeights, {"vocab_size": 1531}, 1),
    "vocabulary by lane": (RandomWeights, LANES | {"vocab_size": 336}, 4),
}


def backend_of(model, seed=0, include=INCLUDE, slots=1):
    """A backend on fibers; `include` holds its headers."""
    weights, changes, blocks = MODELS[model]
    options = BackendOptions(max_context=48, num_slots=slots)
    spec = spec_of(dtype=DType.F16, **(SMALL | changes))
    backend = FiberBackend(weights(spec), options, blocks, seed)
    if include is not INCLUDE:  # planted, for a few tokens
        backend.kernel.library = compile_walk(backend.layout, ("-O0",), include)
    return backend


@pytest.fixture(scope="module")
def backends():
    made = {}

    def get(model):
        if model not in made:
            made[model] = backend_of(model, seed=len(made))
        return made[model]

    return get


PROMPT = [1, 2, 3, 2]


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_the_definitions(backends, name):
    backend, params = backends("odd"), resolved(VOCAB, **SETTINGS[name])
    assert_defined(backend, PROMPT, steps_of(backend, PROMPT, 5, params), params)


@pytest.mark.parametrize("model", [m for m in MODELS if m != "odd"])
@pytest.mark.parametrize("name", ["top_k", "top_p, flat", "all at once"])
def test_other_vocabularies(backends, model, name):
    backend = backends(model)
    params = resolved(backend.spec.vocab_size, **SETTINGS[name])
    assert_defined(backend, PROMPT, steps_of(backend, PROMPT, 3, params), params)


def test_the_best_of_more_blocks_than_registers_hold(tmp_path):
    """As four GPUs have: a thread asks for a block's next best once it has taken one, of two blocks of three."""
    edits = (
        ("kMostHeldRanks = 16;", "kMostHeldRanks = 0;"),
        ("kLists = (kAllBlocks + kConsumers - 1) / kConsumers;", "kLists = 2;"),
    )
    include = plant(tmp_path, *(("logprob.h", before, after) for before, after in edits))
    backend, params = backend_of("odd", include=include), resolved(VOCAB, logprobs=MOST_LOGPROBS)
    assert_defined(backend, PROMPT, steps_of(backend, PROMPT, 5, params), params)


def test_warps_that_lag_change_nothing(monkeypatch):
    """A warp may still be at the cut when others rank: they share their place in shared memory."""
    monkeypatch.setattr(cuda_walk, "MOST", 20_000)
    spec = spec_of(dtype=DType.F16, vocab_size=VOCAB, **SMALL)
    walk = Walk(spec, RandomWeights(spec))
    words = walk.words([1, 2], 12, SamplingParams(temperature=1, top_p=0.3, logprobs=2, seed=5))
    said = []
    for seed in (0, *range(-4, 0)):
        assert walk.run(words, [1, 2], seed) > 0, f"blocks wait for ever under seed {seed}"
        said.append((walk.tokens(), walk.memory.logprobs.clone()))
    tokens, records = said[0]
    assert len(tokens) == 12
    assert all(t == tokens and torch.equal(r, records) for t, r in said[1:])


def test_ties_of_a_cut_survive(backends):
    """The case that the test above needs: cuts that fall among equal logits."""
    backend, params = backends("ties"), resolved(VOCAB, top_k=4, temperature=500.0)
    edited = adjust(backend.forward_logits(PROMPT)[-1], params, History(PROMPT))
    assert survivors(edited, params).size == 6
    steps = steps_of(backend, PROMPT, 12, params)
    assert_defined(backend, PROMPT, steps, params)


@pytest.mark.parametrize("block", range(4))
def test_settings_drawn_at_random(backends, block):
    rng = np.random.default_rng(block)
    backend = backends(("odd", "ties")[block % 2])
    for _ in range(5):
        params = resolved(
            VOCAB,
            temperature=float(10 ** rng.uniform(-1, 2.5)),
            top_k=int(10 ** rng.uniform(0, 2.6)) * int(rng.integers(2)),
            top_p=float(rng.choice([1.0, 0.999, 0.9, 0.5, rng.uniform(0.01, 1)])),
            min_p=float(rng.choice([0.0, 0.5, 10 ** rng.uniform(-9, 0)])),
            repetition_penalty=float(rng.choice([1.0, rng.uniform(0.5, 2)])),
            logit_bias={int(i): float(rng.uniform(-9, 9)) for i in rng.integers(0, VOCAB, 4)},
            seed=int(rng.integers(1 << 60)),
        )
        prompt = rng.integers(0, VOCAB, 2).tolist()
        sample_idx = int(rng.integers(3))
        steps = steps_of(backend, prompt, 2, params, sample_idx=sample_idx)
        assert_defined(backend, prompt, steps, params, sample_idx=sample_idx)


# ---- draws that are tried before a cut is looked for ----


@pytest.fixture(scope="module")
def one_layer():
    spec = spec_of(dtype=DType.F16, vocab_size=VOCAB, **SMALL)
    return Walk(spec, RandomWeights(spec), 3)


def way_of(walk, params):
    """How a token came about: draws that were tried, and whether the cut was found. It is the definition's."""
    assert walk.run(walk.words(PROMPT, 1, params), PROMPT) > 0
    tokens = walk.tokens()
    tried, cut = (int(walk.memory.words[walk.layout.regions[name].offset + 1]) for name in ("top_p_check", "bin"))
    row = walk.forward_logits(PROMPT)[-1]
    assert tokens == [sample(row, params, History(PROMPT), len(PROMPT)).token]
    return max(0, tried - 1), cut > 0


ALL_WAYS = {(1, False), (2, False), (2, True)}  # the second behind a cut is the last
WAYS = {
    "none": ({}, {(0, False)}),
    "penalties": ({"presence_penalty": 0.5}, {(0, False)}),
    "greedy, top_p": ({"temperature": 0, "top_p": 0.5}, {(0, False)}),
    "min_p": ({"min_p": 0.1, "temperature": 4.0}, {(1, False), (2, False)}),
    "top_p": ({"top_p": 0.6, "temperature": 4.0}, ALL_WAYS),
    "top_p, penalties": (
        {"top_p": 0.6, "temperature": 4.0, "presence_penalty": 0.5, "logprobs": 2}, ALL_WAYS
    ),
    "top_k": ({"top_k": 40, "temperature": 4.0}, ALL_WAYS),
    "top_k of all": ({"top_k": VOCAB, "min_p": 1e-30}, {(1, False)}),
    "top_p, steep": ({"top_p": 0.5, "temperature": 0.01}, {(1, False)}),
    "top_k, top_p": ({"top_k": 40, "top_p": 0.8, "temperature": 4.0}, ALL_WAYS | {(1, True)}),
}  # fmt: skip


@pytest.mark.parametrize("name", some_always(WAYS, "none", "greedy, top_p", "top_p, penalties", "top_k, top_p"))
def test_a_cut_is_looked_for_where_draws_do_not_settle_it(one_layer, name):
    settings, ways = WAYS[name]
    params = (resolved(VOCAB, **settings | {"seed": seed}) for seed in range(40))
    assert {way_of(one_layer, one) for one in params} == ways


@pytest.mark.parametrize("name", ["top_p, steep", "top_p", "top_k, top_p"])
def test_the_hosts_word_comes_with_every_way(one_layer, name):
    for seed in range(8):
        params = resolved(VOCAB, **WAYS[name][0] | {"seed": seed})
        words = one_layer.words(PROMPT, 4, params)
        assert one_layer.run(words, PROMPT, control=Outcome.YIELD) > 0
        assert (len(one_layer.tokens()), one_layer.outcome) == (1, Outcome.YIELD)


@pytest.fixture(scope="module")
def many_blocks():
    """A walk of more blocks than a warp has lanes, and what it says in step."""
    spec = spec_of(dtype=DType.F16, vocab_size=1531, **(SMALL | {"hidden_size": 768}))
    walk = Walk(spec, RandomWeights(spec), 48)
    assert walk.layout.lowering.num_blocks == 48
    params = resolved(1531, top_k=700, temperature=40.0, logprobs=1, seed=2)
    words = walk.words([1, 2], 3, params)
    assert walk.run(words, [1, 2]) > 0 and len(walk.tokens()) == 3
    found = walk.memory.words[walk.layout.regions["bin"].offset + 1]
    assert found > 0, "no cut was looked for: draws settled it every time"
    tokens, records, history = walk.tokens(), walk.memory.logprobs.clone(), History([1, 2])
    for n, row in enumerate(walk.forward_logits([1, 2, *tokens[:-1]])[1:]):
        history.append(sample(row, params, history, 2 + n).token)
    assert history.output == tokens
    return walk, words, tokens, records


@pytest.mark.parametrize("seed, late", some_always([(-1, None), (-2, None), (3, "top_p_check"), (4, "shares")], -1, 3))
def test_many_blocks_say_the_same_out_of_step(many_blocks, seed, late):
    """Winners and sums meet by several warps, of which some lag behind; or words land late."""
    walk, words, tokens, records = many_blocks
    if late:
        walk.store_late(late, rounds=100)
    assert walk.run(words, [1, 2], seed=seed) > 0
    assert walk.tokens() == tokens and torch.equal(walk.memory.logprobs, records)


# ---- masks ----


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "logprobs": 2}, {"temperature": 0}])
def test_a_mask_decides_who_is_allowed(backends, settings):
    backend, params = backends("odd"), resolved(VOCAB, **settings)
    mask = odd_or_even_of(VOCAB)
    steps = steps_of(backend, PROMPT, 7, params, mask=mask)
    assert [s.token % 2 for s in steps][:2] == [0, 1]
    assert_defined(backend, PROMPT, steps, params, mask)


def test_a_mask_hook_that_fails_ends_its_request_alone():
    backend, params = backend_of("odd", slots=2), resolved(VOCAB, temperature=0)

    def hook(output):
        if len(output) == 2:
            time.sleep(0.3)  # the kernel waits, and asks for more before it hears of the error
            raise RequestError("the grammar allows nothing")

    mailbox = Mailbox()
    post(mailbox, PROMPT, 6, params, mask=hook)
    post(mailbox, PROMPT, 6, params, slot=1)
    backend.generate(mailbox)
    *steps, failure = mailbox.read(0, 0)
    assert len(steps) == 2 and "grammar" in str(failure.error)
    others = mailbox.read(1, 0)
    assert len(others) == 6 and [s.token for s in others[:2]] == [s.token for s in steps]


def test_a_mask_that_never_comes_is_an_error_with_a_name():
    spec = spec_of(dtype=DType.F16, **SMALL)
    walk = Walk(spec, RandomWeights(spec), 2)
    words = walk.words(PROMPT, 3, resolved(spec.vocab_size), mask=lambda output: None)
    assert walk.run(words, PROMPT, limit=2000) > 0
    flag, _, step, _, _, seen, wanted = walk.memory.error.tolist()[:7]
    assert (flag, header.STEPS[step], seen, wanted) == (1, "mask", 0, 1)


# ---- errors, several requests, resuming ----


@pytest.mark.parametrize("settings", [EVERY, {"logprobs": 1}, {"logit_bias": {3: -1.0}}])
def test_a_nan_is_an_error_of_the_request(backends, settings):
    backend = backends("odd")
    embed, backend.memory.embed = backend.memory.embed, backend.memory.embed.clone()
    backend.memory.embed[5] = torch.nan
    with pytest.raises(RunError, match="NaN"):
        steps_of(backend, [1, 5], 3, resolved(VOCAB, **settings))
    backend.memory.embed = embed


@pytest.mark.parametrize("at_once", [3, 64])
def test_prompt_logprobs_are_those_of_the_logits(backends, monkeypatch, at_once):
    """In pieces as in one, and the answer is that of a request without."""
    monkeypatch.setattr(serving, "SCORED", at_once)
    backend, params = backends("odd"), resolved(VOCAB, temperature=0)
    prompt = [4, 9, 300, 2, 9, 17, 5]
    mailbox = Mailbox()
    post(mailbox, prompt, 3, params, prompt_logprobs=2)
    backend.generate(mailbox)
    logits = backend.forward_logits(prompt)
    scored = mailbox.read_prompt(0)
    assert [p.token for p in scored] == prompt[1:]
    for row, one in zip(logits[:-1], scored, strict=True):
        assert (one.logprob, one.top) == raw_logprobs(row, one.token, 2)
    plain = steps_of(backend, prompt, 3, params)
    assert [s.token for s in mailbox.read(0, 0)] == [s.token for s in plain]


# ---- planted faults ----

WARPS = "b.in_warp < kWarps ? scratch[kCount"
FIRST_WARP = ("exchange.h", WARPS, f"b.in_warp > 0 && {WARPS}")
FAULTS = {
    "a cut one id late": ("cut.h", "target = by_count ? k :", "target = by_count ? k + 1 :",
                          "odd", SETTINGS["top_k"]),
    "ties of a cut fall": ("cut.h", "ordered(f.top) - cut - 1", "ordered(f.top) - cut", "ties",
                           SETTINGS["top_k"]),
    "ties come before the argmax": ("top_p_check.h", "> logit;", ">= logit;", "ties", SETTINGS["top_k"]),
    "every argmax survives": (
        "top_p_check.h", "share)) return Verdict::kFalls;", "share)) return Verdict::kSurvives;", "odd",
        {"top_p": 0.3, "temperature": 4.0}),
    "a share of all ids, not of the top_k": (
        "top_p_check.h", "? Verdict::kSurvives : Verdict::kOpen", "? Verdict::kSurvives : Verdict::kSurvives", "odd",
        {"top_k": 150, "top_p": 0.5, "temperature": 30.0}),
    "as many before the argmax as top_k": (
        "top_p_check.h", "s.before.count >= k", "s.before.count > k", "odd", {"top_k": 1, "temperature": 0.7}),
    "output counted once too often": ("edit.h", "step * (seen - 1)", "step * seen", "odd",
                                      {"frequency_penalty": 1.0, "temperature": 0,
                                       "allowed_token_ids": [50, 60, 70, 80]}),
    "a bad word that completes too early": ("edit.h", "if (made < last - first) return -1;", "",
                                            "odd", {"allowed_token_ids": [3, 90], "bad": ((3, 90),)}),
    "the wrong id of a tie": ("logprob.h", "0xffffffffu - static_cast<u32>(rank)",
                              "0xfffffffeu - static_cast<u32>(rank)", "ties", {"logprobs": 3}),
    "the token is ahead of itself": ("logprob.h", "rank_of(raw[id], id) > rank", "rank_of(raw[id], id) >= rank",
                                     "odd", {"logprobs": 0}),
    "the rank of a tie": ("logprob.h", "rank_of(raw[id], id) > rank", "ordered(raw[id]) > rank >> 32", "ties",
                          {"logprobs": 0, "temperature": 500.0}),
    "a block's counts without its first warp's": (*FIRST_WARP, "odd", {"top_k": 1, "temperature": 0.7}),
    "a block's probabilities without its first warp's": (*FIRST_WARP, "odd", {"logprobs": 2}),
    "candidates of half of the threads": ("threads.h", "mask = kThreads / 2", "mask = kThreads / 4", "odd",
                                          {"temperature": 4.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, tmp_path):
    file, before, after, model, settings = FAULTS[name]
    include = plant(tmp_path, (file, before, after))
    backend, params = backend_of(model, include=include), resolved(VOCAB, **settings)
    prompt = [3, 3, 3] if "bad" in settings else PROMPT
    with pytest.raises((AssertionError, RequestError)):
        assert_defined(backend, prompt, steps_of(backend, prompt, 8, params), params)
