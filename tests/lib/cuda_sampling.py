"""What is asked of a CUDA backend that samples, on a CPU or a GPU: the definition on the backend's own logits."""

from dataclasses import replace

import numpy as np
import torch

from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import Head, Reduce
from kog_triton.sampling import History, SamplingParams, sample

SEED = (5 << 33) + 7
LANES = {
    "num_layers": 3,
    "hidden_size": 48,
    "head_dim": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 88,
    "num_lanes": 4,
    "delay": 2,
    "reduce_attention": (Reduce.OWN, Reduce.NOW, Reduce.DELAYED),
    "reduce_mlp": (Reduce.OWN, Reduce.OWN, Reduce.DELAYED),
    "head": Head.VOCAB_PARALLEL,
}


class Triplets(RandomWeights):
    """Every three rows of the head are one, and one such row is zero: logits tie all over."""

    def load(self, name):
        tensor = super().load(name)
        if name != "lm_head":
            return tensor
        tensor = tensor[torch.arange(len(tensor)) // 3 * 3].clone()
        tensor[30:36] = 0
        return tensor


def resolved(vocab, bad=(), end=(), **params):
    """Parameters of one request; bad words are given as ids."""
    params = {"temperature": 2.0, "seed": SEED, "max_tokens": None} | params
    out = SamplingParams(**params).resolve(vocab)
    return replace(out, bad_words_token_ids=tuple(bad), end_token_ids=tuple(sorted({*out.end_token_ids, *end})))


def post(mailbox, prompt, count, params, slot=0, **fields):
    mailbox.post(Request(slot, tuple(prompt), params, params.seed, count, **fields))


def steps_of(backend, prompt, count, params, **fields):
    mailbox = Mailbox()
    post(mailbox, prompt, count, params, **fields)
    backend.generate(mailbox)
    steps = mailbox.read(0, 0)
    if isinstance(steps[-1], Failure):
        raise steps[-1].error
    return steps


def assert_defined(backend, prompt, steps, params, mask=None, sample_idx=0):
    """Every step is the definition's on the kernel's logits."""
    logits = backend.forward_logits([*prompt, *(s.token for s in steps[:-1])])
    history = History(prompt)
    for step in steps:
        position = len(prompt) + len(history.output)
        bits = mask(history.output) if mask else None
        row = logits[position - 1]
        expected = sample(row, params, history, position, sample_idx, bits)
        assert step.token == expected.token
        assert (step.logprob is None) == (expected.logprob is None)
        if step.logprob is not None:
            assert abs(step.logprob - expected.logprob) < 1e-5
            assert step.rank == expected.rank
            assert [i for i, _ in step.top] == [i for i, _ in expected.top]
            ours, theirs = (np.array([v for _, v in s.top]) for s in (step, expected))
            assert np.abs(ours - theirs).max(initial=0) < 1e-5
        history.append(step.token)


def assert_sampled(ranks, prompt, count, params):
    """Tokens that a walk of ranks generates are the definition's on its own logits, which all ranks have made together;
    how the request ended is given back."""
    tokens, outcome = ranks.generate(prompt, count, params)
    logits = ranks.forward_logits([*prompt, *tokens])
    history = History(tuple(prompt))
    assert tokens
    for position, token in enumerate(tokens, len(prompt)):
        assert token == sample(logits[position - 1], params, history, position).token
        history.append(token)
    return outcome


EVERY = {
    "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.002, "repetition_penalty": 1.2,
    "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {5: 3.0, 60: -100.0},
    "logprobs": 4, "min_tokens": 3, "end": (11, 19), "bad": ((7,), (42, 45)),
}  # fmt: skip
SETTINGS = {
    "plain": {},
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 7, "temperature": 30.0},
    "top_k of nearly all": {"top_k": 90, "temperature": 30.0},
    "top_k beyond the vocabulary": {"top_k": 5000},
    "top_p": {"top_p": 0.9, "temperature": 3.0},
    "top_p near 0": {"top_p": 1e-12},
    "top_p near 1": {"top_p": 0.9999999, "temperature": 40.0},
    "top_p, flat": {"top_p": 0.5, "temperature": 1e5},
    "top_p, steep": {"top_p": 0.999, "temperature": 1e-5},
    "min_p": {"min_p": 0.1, "temperature": 8.0},
    "min_p 1": {"min_p": 1.0},
    "min_p, top_k, top_p": {"min_p": 0.01, "top_k": 20, "top_p": 0.8, "temperature": 6.0},
    "penalties": {
        "repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.7,
        "temperature": 0.3,
    },
    "penalties, greedy": {"repetition_penalty": 0.8, "frequency_penalty": 1.9, "temperature": 0},
    "rewards": {"presence_penalty": -2.0, "frequency_penalty": -2.0, "top_k": 30},
    "bias": {"logit_bias": {3: 9.5, 90: 10.25, 17: -100.0}, "top_p": 0.7},
    "bias, greedy": {"logit_bias": {3: 30.0, 90: 30.0}, "temperature": 0, "logprobs": 2},
    "allowed ids": {"allowed_token_ids": [3, 5, 31, 32, 63, 64, 90], "top_p": 0.95},
    "bad words": {"allowed_token_ids": [3, 5, 90], "bad": ((3, 3), (5, 3, 90), (90,) * 9)},
    "min_tokens": {"allowed_token_ids": [3, 5, 90], "min_tokens": 4, "end": (3, 96)},
    "logprobs 0": {"logprobs": 0},
    "logprobs 20": {"logprobs": 20, "top_k": 3},
    "logprobs, greedy": {"logprobs": 5, "temperature": 0},
    "all at once": EVERY,
}  # fmt: skip


def odd_or_even_of(vocab):
    """A hook: ids as even as the number of tokens; every third time, all."""

    def hook(output):
        if len(output) % 3 == 2:
            return None
        bits = np.zeros(-(-vocab // 32) * 32, bool)
        bits[len(output) % 2 : vocab : 2] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    return hook


def assert_histories_are_apart(backend, prompt, count):
    """Of two requests at once, each judged by its own tokens."""
    vocab = backend.spec.vocab_size
    first = resolved(vocab, frequency_penalty=1.9, repetition_penalty=1.5, temperature=0.4)
    second = resolved(vocab, **EVERY)
    mailbox = Mailbox()
    post(mailbox, prompt, count, first)
    post(mailbox, [9, 1], count, second, slot=1)
    backend.generate(mailbox)
    assert_defined(backend, prompt, mailbox.read(0, 0), first)
    assert_defined(backend, [9, 1], mailbox.read(1, 0), second)
