"""What single ids stand for, how long a text may be, and what a template's helpers write: by hand."""

import json
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kog_triton.errors import ModelError, RequestError
from kog_triton.text import render_template, tokenizer
from kog_triton.text.tokenizer import Tokenizer, library_errors, text_of


def opened(folder, backend, **config):
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def pieces(folder, byte_fallback=True):
    """Of a vocabulary of pieces, with bytes to fall back to."""
    vocab = {"<unk>": 0, "<0x41>": 1, "\u2581a": 2, "<0xC3>": 3, "<0xZZ>": 4, "b": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=byte_fallback))
    steps = [decoders.Replace("\u2581", " "), decoders.Fuse()]
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), *steps] if byte_fallback else steps)
    return opened(folder, backend)


def byte_level(folder):
    vocab = {c: i for i, c in enumerate(["a", "\u0120", "\u0120a", "\u00c3"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("\u0120", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["\u4e16"])
    return opened(folder, backend)


def test_the_bytes_of_a_piece(tmp_path):
    ours = pieces(tmp_path)
    assert [ours.token_bytes(i) for i in range(7)] == [b"<unk>", b"A", b" a", b"\xc3", b"<0xZZ>", b"b", None]
    assert [ours.is_byte_token(i) for i in range(7)] == [False, True, False, True, False, False, False]
    assert ours.vocab_size == 6 and not ours.is_byte_level
    without = pieces(tmp_path, byte_fallback=False)
    assert without.token_bytes(1) == b"<0x41>" and not without.is_byte_token(1)


def test_the_bytes_of_a_byte_level_id(tmp_path):
    ours = byte_level(tmp_path)
    assert ours.is_byte_level and ours.vocab_size == 5
    # an added token holds a character that stands for no byte: it is plain text
    assert [ours.token_bytes(i) for i in range(6)] == [b"a", b" ", b" a", b"\xc3", "\u4e16".encode(), None]
    assert not any(ours.is_byte_token(i) for i in range(6))
    assert ours.decode([2, 0]) == " aa" and ours.encode("a a") == [0, 2]


def test_all_bytes_have_a_character():
    assert sorted(tokenizer.BYTE_OF.values()) == list(range(256)) and len(tokenizer.BYTE_OF) == 256
    known = {"!": 0x21, "~": 0x7E, "\u00a1": 0xA1, "\u00ac": 0xAC, "\u00ae": 0xAE, "\u00ff": 0xFF, "\u0100": 0,
             "\u0120": 0x20, "\u0121": 0x7F, "\u0122": 0x80, "\u0143": 0xAD}  # fmt: skip
    assert {c: tokenizer.BYTE_OF[c] for c in known} == known


@pytest.mark.parametrize(
    ("length", "a_token", "most", "said"),
    [
        (1600, 4, 100, None),  # 400 tokens, of which eight characters a token are 200
        (1601, 4, 100, 200),
        (800, 1, 100, None),  # no longer than eight characters a token: not looked at
        (801, 1, 100, 400),
        (801, 3, 100, 133),
        (801, 4, 100, None),
        (3200, 8, 100, None),
        (3300, 8, 100, 200),
        (3300, 7, 100, 114),
    ],
)
def test_a_text_of_far_too_many_tokens_is_not_read_to_its_end(length, a_token, most, said):
    seen = []

    def encode(beginning, add_special_tokens):
        assert not add_special_tokens  # they are the whole text's
        seen.append(len(beginning))
        return SimpleNamespace(ids=[0] * (len(beginning) // a_token))

    backend = SimpleNamespace(encode=encode)
    if said is None:
        tokenizer._check_length(backend, "x" * length, most)
    else:
        with pytest.raises(RequestError) as error:
            tokenizer._check_length(backend, "x" * length, most)
        assert str(error.value) == (
            f"the prompt has more than {said} tokens and the context holds {most}: "
            "shorten the prompt to leave room for an answer"
        )
    doubled = [8 * most << i for i in range(9)]
    assert seen == doubled[: len(seen)] and all(n < length for n in seen)
    if said is None:
        assert seen == [n for n in doubled if n < length]


def test_what_transformers_does_besides_is_refused(tmp_path):
    ours = opened(
        tmp_path,
        make_plain(),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    )
    said = [{"role": "user", "content": "ab"}]
    assert ours.has_chat_template
    assert ours.apply_chat_template(said) == ours.encode("ab", add_special_tokens=False)
    assert ours.apply_chat_template(said, tokenize=False) == "ab"
    assert ours.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == "ab>"
    assert ours.render_chat(said) == "ab>" and ours.encode_chat(said) == ours.encode("ab>", False)
    for name in ("return_tensors", "return_dict", "padding", "truncation", "max_length"):
        with pytest.raises(RequestError, match=f"leave out {name}"):
            ours.apply_chat_template(said, **{name: 1})
        assert ours.apply_chat_template(said, **{name: None}, tokenize=False) == "ab"
    with pytest.raises(RequestError, match="continue_final_message needs add_generation_prompt=False"):
        ours.render_chat(said, continue_final_message=True)
    answer = [*said, {"role": "assistant", "content": "c"}]
    assert ours.render_chat(answer, continue_final_message=True, add_generation_prompt=False) == "abc"
    assert ours.render_chat(said, chat_template="x{{ messages[0].content }}") == "xab"
    with pytest.raises(RequestError):
        ours.encode_chat([{"role": "user", "content": "a" * 500}], 10)


def make_plain():
    vocab = {c: i for i, c in enumerate("<>abcdefghijklmnopqrstuvwxyz")}
    return tokenizers.Tokenizer(models.BPE(vocab, []))


def test_a_tokenizer_without_a_template(tmp_path):
    ours = opened(tmp_path, make_plain())
    assert not ours.has_chat_template
    assert text_of("a") == "a" and text_of({"content": "b"}) == "b"


class PanicException(BaseException):
    """As the tokenizers library raises it."""


def test_whatever_the_library_raises_is_one_line():
    for error in (ValueError("a\nb"), PanicException("a\nb")):
        with pytest.raises(ModelError, match=r"^it cannot: a$"), library_errors("it cannot"):
            raise error
    for error in (KeyboardInterrupt(), RequestError("ours")):
        with pytest.raises(type(error)), library_errors("it cannot"):
            raise error


def rendered(source, **values):
    return render_template.compiled(source).render(**values)


def test_what_templates_of_transformers_have():
    assert rendered("{{ a | tojson }}", a={"b": "é", "a": 1}) == '{"b": "é", "a": 1}'
    assert rendered("{{ a | tojson(indent=1, sort_keys=true) }}", a={"b": 1, "a": 2}) == '{\n "a": 2,\n "b": 1\n}'
    assert rendered("{{ a | tojson(ensure_ascii=true) }}", a="é") == '"\\u00e9"'
    assert rendered("{{ a | tojson(separators=(',', ':')) }}", a=[1, {"b": 2}]) == '[1,{"b":2}]'
    assert rendered("x{% generation %}a{{ b }}{% endgeneration %}y", b=1) == "xa1y"
    assert rendered("{% for i in a %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", a=[1, 2, 3]) == "1"
    # blocks leave no line and no space of theirs behind
    assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert len(rendered("{{ strftime_now('%Y') }}")) == 4
    with pytest.raises(render_template.jinja2.TemplateError, match=r"^no$"):
        rendered("{{ raise_exception('no') }}")
    with pytest.raises(render_template.jinja2.exceptions.SecurityError):
        rendered("{{ a.append(1) }}", a=[])
