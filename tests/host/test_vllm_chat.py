"""LLM.chat as vLLM's: template arguments, content in parts, a last message that is continued."""

import itertools

import pytest

from kog_triton.errors import RequestError
from tests.lib.fake_backend import GREEDY, open_llm
from tests.lib.fake_checkpoint import END

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is  "}]


def test_a_template_gets_its_arguments(llm):
    template = "{{ 'think' if enable_thinking else 'answer' }}{{ messages|length }}"
    for thinking, want in ((True, "think2"), (False, "answer2")):
        how = {"chat_template_kwargs": {"enable_thinking": thinking}, "chat_template": template}
        assert llm.chat(TALK, GREEDY, **how)[0].prompt == want
        assert llm.chat_prompt(TALK, **how)["prompt"] == want
    with pytest.raises(RequestError, match="chat_template is 5: it must be a template's text"):
        llm.chat(TALK, GREEDY, chat_template=5)


def test_an_llm_may_have_a_template_of_the_callers(folder, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}")
    for given in (file, str(file), "{{ messages[0].content }}"):
        with open_llm(folder, chat_template=given) as llm:
            assert llm.chat(TALK, GREEDY)[0].prompt == "2 + 2?"
    with pytest.raises(RequestError, match=r"chat_template is 'gone.jinja': neither"):
        open_llm(folder, chat_template="gone.jinja")


def test_a_last_message_is_continued_as_transformers_does(llm):
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}",
    )
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "<end> it is "}]}]
    of_parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<end>{% endfor %}"
    for talk, template in [*itertools.product([TALK], templates), (parts, of_parts)]:
        (want,), _ = render_jinja_template([talk], chat_template=template, continue_final_message=True)
        how = {"chat_template": template, "continue_final_message": True}
        prompt = llm.chat_prompt(talk, add_generation_prompt=False, **how)
        assert prompt["prompt"] == want
        ids = prompt["prompt_token_ids"]
        assert llm.tokenizer.decode(ids, skip_special_tokens=False) == want
        assert ids.count(END) == len(talk) - 1  # the template's, not what the last message holds
    continued = llm.chat(TALK, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert continued[0].prompt == "[user]2 + 2?\n[assistant]It is  "
    for talk, how, says in (
        (TALK, {}, "needs add_generation_prompt=False"),
        (TALK, {"chat_template": "x", "add_generation_prompt": False}, "leaves the last message out"),
        ([{"role": "user"}], {"add_generation_prompt": False}, "no content to continue"),
    ):
        with pytest.raises(RequestError, match=says):
            llm.chat(talk, GREEDY, continue_final_message=True, **how)


JOINS = "{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}"
LOOPS = "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %};{% endfor %}"
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
]


@pytest.mark.parametrize(
    "template, how, want",
    [
        (JOINS, {}, "user:a\nb;assistant:;"),
        (LOOPS, {}, "<a><b>;;"),
        (LOOPS, {"chat_template_content_format": "openai"}, "<a><b>;;"),
        ("{{ messages[0].content }}", {"chat_template_content_format": "string"}, "a\nb"),
    ],
)
def test_content_in_parts_is_what_the_template_reads(llm, template, how, want):
    how |= {"chat_template": template, "add_generation_prompt": False}
    assert llm.chat(PARTS, GREEDY, **how)[0].prompt == want


def test_a_part_that_is_no_text_is_refused(llm):
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    talk = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}]
    for template in (JOINS, LOOPS):  # the second would leave it out
        with pytest.raises(RequestError, match=r"messages\[0\].content has a part of type 'image_url'"):
            llm.chat(talk, GREEDY, chat_template=template)
    for part in (5, {"type": "refusal", "refusal": "no"}):
        with pytest.raises(RequestError, match="the chat template reads text alone"):
            llm.chat([{"role": "user", "content": [part]}], GREEDY, chat_template=JOINS)
    with pytest.raises(RequestError, match="chat_template_content_format is 'x': it must be one of"):
        llm.chat(talk, GREEDY, chat_template_content_format="x")


def test_what_transformers_does_besides_a_template_is_refused(llm):
    tokenizer = llm.get_tokenizer()
    for name in ("return_tensors", "return_dict", "padding", "truncation", "max_length"):
        with pytest.raises(RequestError, match=f"gives a list of ids: leave out {name}"):
            tokenizer.apply_chat_template(TALK, **{name: "pt"})
        assert tokenizer.apply_chat_template(TALK, **{name: None}) == tokenizer.apply_chat_template(TALK)
