"""Log-probabilities of the prompt: vLLM's shape, the values of transformers, one pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kog_triton import LLM, SamplingParams
from kog_triton.backends.host_serving import HostServing
from kog_triton.backends.mailbox import Failure, Mailbox, Request
from tests.lib.demo_cases import LLAMA
from tests.lib.fake_backend import FakeBackend, next_logits
from tests.lib.fake_checkpoint import VOCAB_SIZE, make_checkpoint

ASKED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)


@pytest.fixture
def llm(tmp_path):
    with LLM(make_checkpoint(tmp_path), backend=FakeBackend, num_slots=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def trained():
    with LLM(LLAMA, backend="reference") as llm:
        yield llm


@pytest.mark.parametrize("length", [1, 2, 300])  # 300 is more than one chunk of the prefill
def test_values_are_those_of_transformers(trained, length):
    transformers = pytest.importorskip("transformers")
    ids = np.random.default_rng(length).integers(1, 512, length).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()
    got = trained.generate({"prompt_token_ids": ids}, ASKED)[0].prompt_logprobs
    assert len(got) == length and got[0] is None
    for i, candidates in enumerate(got[1:], 1):
        token, row = ids[i], want[i - 1]
        assert next(iter(candidates)) == token
        best = np.argsort(-row)[:2]
        assert set(candidates) == {token, *best.tolist()}
        for rank, t in enumerate(best.tolist(), 1):
            assert candidates[t].rank == rank
        for t, candidate in candidates.items():
            assert candidate.logprob == pytest.approx(row[t], abs=2e-3)
            assert candidate.decoded_token == trained.tokenizer.decode([t], skip_special_tokens=False)


def test_the_prompt_is_run_once_and_the_answer_is_the_same(trained, monkeypatch):
    backend, sizes = trained.engine.backend, []
    forward = backend.forward

    def counting(slot, token_ids, start, last_only):
        sizes.append(len(token_ids))
        return forward(slot, token_ids, start, last_only)

    monkeypatch.setattr(backend, "forward", counting)
    prompt = {"prompt_token_ids": list(range(100, 130))}
    trained.engine.forget()
    asked = trained.generate(prompt, ASKED)[0]
    assert sizes == [30, 1, 1]
    again = trained.generate(prompt, replace(ASKED, prompt_logprobs=None))[0]
    assert again.prompt_logprobs is None and again.metrics.cached_tokens == 29
    assert again.outputs[0].token_ids == asked.outputs[0].token_ids


def test_what_a_slot_remembers_is_computed_again(llm):
    first, second = (llm.generate("Hello", ASKED)[0] for _ in range(2))
    assert [o.metrics.cached_tokens for o in (first, second)] == [0, 0]
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate("Hello", replace(ASKED, prompt_logprobs=None))[0].metrics.cached_tokens == 4


def test_of_several_samples_one_looks_at_the_prompt(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=0)
    out = llm.generate("Hello", params)[0]
    assert len(out.outputs) == 3
    assert [len(c) for c in out.prompt_logprobs[1:]] == [1] * 4
    for i, candidates in enumerate(out.prompt_logprobs[1:], 1):
        logits = next_logits(list(b"Hello"[:i]), i)
        want = logits[b"Hello"[i]] - np.log(np.exp(logits).sum())
        assert candidates[b"Hello"[i]].logprob == pytest.approx(want)


def test_minus_one_is_the_whole_vocabulary(trained):
    prompt = {"prompt_token_ids": [7, 8, 9]}
    out = trained.generate(prompt, replace(ASKED, prompt_logprobs=-1))[0].prompt_logprobs
    assert [len(c) for c in out[1:]] == [512] * 2
    total = sum(np.exp(c.logprob) for c in out[1].values())
    assert total == pytest.approx(1)


def test_a_stream_brings_them_with_its_output(llm):
    deltas = list(llm.stream("Hello", ASKED))
    assert len(deltas[-1].output.prompt_logprobs) == 5


def test_a_request_that_is_cancelled_on_the_way_has_none(llm):
    with llm.engine.paused():
        stream = llm.stream("slow " + "x" * 400, ASKED)
        stream.cancel()
    stream.close()
    assert stream.output().prompt_logprobs is None
    assert llm.engine.num_free_slots == 2


def test_logits_that_are_not_numbers_void_the_run():
    class Broken:
        def forward(self, slot, token_ids, start, last_only):
            rows = np.zeros((len(token_ids), VOCAB_SIZE), np.float32)
            rows[1, 5] = np.nan
            return rows[-1:] if last_only else rows

    mailbox = Mailbox()
    params = replace(ASKED, seed=1)
    mailbox.post(Request(0, (1, 2, 3, 4), params, 1, 3, prompt_logprobs=2))
    HostServing(Broken(), mailbox, 8).run()
    (failure,) = mailbox.read(0)
    assert isinstance(failure, Failure)
    assert str(failure.error) == "the logits of position 2 hold NaN or +inf: the run is void"
