"""Hold a chat: a template of one's own, arguments for it, an answer of the asked length."""

from kog_triton import LLM, SamplingParams

TEMPLATE = """{% for m in messages %}# {{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}# {{ name }}:{% endif %}"""

with LLM(chat_template=TEMPLATE) as llm:
    (out,) = llm.chat(
        [{"role": "user", "content": "write a function"}],
        SamplingParams(temperature=0, max_tokens=12),
        chat_template_kwargs={"name": "helper"},
    )
    assert out.prompt == "# user: write a function\n# helper:", out.prompt
    assert len(out.outputs[0].token_ids) <= 12 and out.outputs[0].finished()
    text = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, chat_template=TEMPLATE
    )
    assert text == "# user: hi\n", text
