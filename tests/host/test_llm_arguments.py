"""What `LLM` and its methods are given: each wrong thing is refused in one line, by name."""

from dataclasses import replace

import pytest

from kog_triton import LLM
from kog_triton.errors import ModelError, RequestError
from tests.lib.fake_backend import GREEDY, FakeBackend


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"num_slots": 0}, "num_slots is 0"),
        ({"devices": 0}, "devices is 0"),
        ({"devices": "cpu:x"}, "behind the colon belongs a number"),
        ({"devices": 1.5}, "devices is 1.5: it must be an integer"),
        ({"devices": "cpu:999999999"}, "behind the colon belongs a number"),
        ({"num_slots": 10**12}, "num_slots is 1000000000000: it must be an integer from 1 to"),
        ({"num_slots": True}, "num_slots is True"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"prefill": "x"}, "prefill is 'x': it must be one of auto, kernel, library"),
        ({"max_model_len": 513}, "max_model_len is 513: it must be an integer from 2 to 512"),
        ({"max_model_len": "9"}, "max_model_len is '9'"),
        ({"skip_tokenizer_init": 3}, "skip_tokenizer_init is 3"),
        ({"disable_log_stats": 3}, "disable_log_stats is 3"),
        ({"enable_prefix_caching": 3}, "enable_prefix_caching is 3"),
        ({"generation_config": "x"}, "generation_config is 'x': it must be auto or vllm"),
        ({"num_blocks": 0}, "num_blocks is 0: it must be an integer from 1 to"),
        ({"num_blocks": 4}, "4 blocks: backend fake chooses its own, hip takes a number"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0"),
    ],
)
def test_a_bad_argument_is_refused(folder, arguments, says):
    with pytest.raises(RequestError, match=says):
        LLM(folder, backend=FakeBackend, **arguments)


def test_a_backend_or_a_model_of_another_type_is_refused(folder):
    with pytest.raises(RequestError, match="backend is 3: it must be a name or a class"):
        LLM(folder, backend=3)
    with pytest.raises(ModelError, match="the model is 3: pass a folder"):
        LLM(3, backend=FakeBackend)


@pytest.mark.parametrize("messages", [5, None, "hello", {"role": "user", "content": "x"}])
def test_messages_that_are_no_list_are_refused(llm, messages):
    with pytest.raises(RequestError, match="messages must be a list"):
        llm.chat(messages, GREEDY)


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ("", GREEDY, "the prompt is empty"),
        ({"prompt_token_ids": []}, GREEDY, "the prompt is empty"),
        ({"prompt_token_ids": [1, 260]}, GREEDY, "prompt token 1 is 260: ids run from 0 to 259"),
        ({"prompt_token_ids": [-1]}, GREEDY, "prompt token 0 is -1"),
        ({"prompt_token_ids": ["a"]}, GREEDY, "prompt token 0 is 'a'"),
        ({"prompt_token_ids": [10**5000]}, GREEDY, "prompt token 0 is a huge number"),
        (5, GREEDY, "prompts is 5: it must be"),
        (None, GREEDY, "prompts is None: it must be"),
        ("a", {"temperature": 0}, "params must be a SamplingParams"),
        ("a", 5, "params must be a SamplingParams"),
        ({"text": "a"}, GREEDY, "a prompt has no key 'text': it has prompt, prompt_token_ids"),
        ({"prompt": "a", "prompt_tokens_ids": [1]}, GREEDY, "no key 'prompt_tokens_ids'"),
        ({"prompt": "a", 5: 6}, GREEDY, "no key 5"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, GREEDY, "prompt: multi_modal_data is"),
        ({"prompt": "a", "prompt_token_ids": [98]}, GREEDY, "disagree: .* \\(the ids read 'b'\\)"),
        ({"prompt": "a", "prompt_token_ids": [999]}, GREEDY, "prompt token 0 is 999"),
        ({"prompt": "a", "cache_salt": 5}, GREEDY, "cache_salt is 5: it must be text"),
        ({"prompt": "a", "cache_salt": ""}, GREEDY, "cache_salt is ''"),
        ({"prompt": 5}, GREEDY, "prompt is 5: it must be text"),
        ({}, GREEDY, "this one has neither"),
        ({"prompt_token_ids": "ab"}, GREEDY, "token ids or .* not str"),
        ([None], GREEDY, "a prompt is text, token ids or .* not NoneType"),
        ("x" * 512, replace(GREEDY, max_tokens=None), "prompt has 512 tokens"),
        ("x", replace(GREEDY, stop_token_ids=[260]), "stop_token_ids is 260"),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(llm, prompt, params, says):
    with pytest.raises(RequestError, match=says):
        llm.generate(["fine", prompt] if isinstance(prompt, str) else prompt, params)
    assert llm.engine.backend.computed == [] and llm.engine.num_free_slots == 2


def test_params_may_be_given_for_each_prompt(llm):
    outs = llm.generate(["a", "b"], [replace(GREEDY, max_tokens=2), replace(GREEDY, max_tokens=5)])
    assert [len(o.outputs[0].token_ids) for o in outs] == [2, 5]
    with pytest.raises(RequestError, match="1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
