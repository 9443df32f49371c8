"""Go on with a talk: what was said before is not computed again."""

from kog_triton import LLM, SamplingParams

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
params = SamplingParams(temperature=0, max_tokens=16)
with LLM(chat_template=TEMPLATE) as llm:
    talk = [{"role": "user", "content": "write a function that adds two numbers"}]
    (first,) = llm.chat(talk, params)
    talk += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "and one that subtracts them"},
    ]
    (second,) = llm.chat(talk, params)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 1, second.num_cached_tokens
    private = llm.chat_prompt(talk) | {"cache_salt": "somebody else"}
    assert llm.generate(private, params)[0].num_cached_tokens == 0
