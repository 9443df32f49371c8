"""Ids that are kept of a text's beginning: equal to those of the whole text, whatever went before; nobody else's."""

from random import Random

import pytest
import tokenizers

from kog_triton.errors import RequestError
from kog_triton.text import Tokenizer, kept_ids
from kog_triton.text.kept_ids import KeptIds, special_ends
from tests import DATA
from tests.lib.text_samples import CORPUS, KINDS, PLAIN_TOKENS, SPECIAL_TOKENS, make_tokenizer

TEMPLATES = {path.stem: path.read_text() for path in (DATA / "chat_templates").glob("*.jinja")}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PIECES = [*SPECIAL_TOKENS, *PLAIN_TOKENS, *CORPUS, " ", "  \n", "\t", "a", "<", "|>", "</S>", "é", "e\u0301", "▁"]


class Counting:
    """A tokenizer that notes what it is asked to encode."""

    def __init__(self, backend):
        self.backend, self.asked = backend, []

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def encode(self, text, add_special_tokens):
        self.asked.append(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens)


def whole(backend, text):
    return backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_grow_and_part_have_the_ids_of_the_whole(kind):
    backend = Counting(make_tokenizer(kind))
    kept, draw, text, saved = KeptIds(backend), Random(7), "", 0
    for _ in range(300):
        grown = "".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 12)))
        text = text[: draw.randrange(len(text) + 1)] + grown if draw.random() < 0.3 else text + grown
        text = text if len(text) < 4000 else ""
        backend.asked.clear()
        assert kept.encode(text, draw.choice(["", "another"])) == whole(backend.backend, text)
        saved += sum(len(asked) < len(text) for asked in backend.asked)
    assert saved > 100 if special_ends(backend.backend) else saved == 0


@pytest.mark.parametrize("kind", ["byte_level", "llama_bpe"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_that_goes_on_has_the_ids_of_the_whole(name, kind):
    ours = Tokenizer(make_tokenizer(kind), NAMED, {"default": TEMPLATES[name]})
    plain = Tokenizer(make_tokenizer(kind), NAMED, {"default": TEMPLATES[name]})
    messages = []
    for i in range(6):
        text = CORPUS[i] if i % 3 else f"{CORPUS[i]} typed: <|im_end|></s> "
        messages.append({"role": "user", "content": text})
        try:
            expected = plain.encode_chat(messages)
        except RequestError:
            pytest.skip("not a conversation of this template's")
        assert ours.encode_chat(messages, whose="") == expected
        messages.append({"role": "assistant", "content": f"answer {i}: {CORPUS[-1]}"})


def test_what_is_not_new_is_not_encoded_again():
    backend = Counting(make_tokenizer("byte_level"))
    kept = KeptIds(backend)
    text = "<|im_start|>user\nhello<|im_end|>\n"
    kept.encode(text, "")
    kept.encode(text + "<|im_start|>assistant\n", "")
    kept.encode(text + "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user", "")
    kept.encode("<|im_start|>user\nhello<|im_end|>other", "")
    kept.encode("<|im_start|>use", "")
    assert backend.asked == [
        text,
        "\n<|im_start|>assistant\n",
        "assistant\nyes<|im_end|>\n<|im_start|>user",
        "other",
        "use",
    ]


def test_nobodys_text_begins_with_another_ones():
    backend = Counting(make_tokenizer("byte_level"))
    kept, text = KeptIds(backend), "<|im_start|>user\nhello<|im_end|>\n"
    for whose in ("", "one", "two"):
        kept.encode(text, whose)
    assert backend.asked == [text] * 3
    kept.encode(text, "one")
    assert backend.asked[3:] == ["\n"]


def added(tokens, **kinds):
    backend = make_tokenizer("byte_level")
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, **kinds) for t in tokens])
    return backend


def test_a_token_that_looks_around_it_ends_nothing():
    ids = set(special_ends(make_tokenizer("byte_level")).values())
    assert ids == set(SPECIAL_TOKENS)
    for kind in ("lstrip", "rstrip", "normalized"):
        assert set(special_ends(added(["<new>"], **{kind: True})).values()) == ids
    assert special_ends(added(["<new>"], single_word=True)) == {}
    assert set(special_ends(added(["</s>!", "<new>"])).values()) == ids - {"</s>"} | {"</s>!", "<new>"}


def test_a_first_piece_that_is_another_one_keeps_nothing():
    backend = make_tokenizer("byte_level")
    for scheme, ends in (("first", False), ("always", True), ("never", True)):
        space = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([space])
        assert bool(special_ends(backend)) == ends


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(kept_ids, "MOST_TEXTS", 3)
    monkeypatch.setattr(kept_ids, "MOST_CHARACTERS", 100)
    monkeypatch.setattr(kept_ids, "MOST_ENDS", 4)
    backend = Counting(make_tokenizer("byte_level"))
    kept = KeptIds(backend)
    for i in range(6):
        kept.encode(f"<s>{i}</s>", str(i))
    assert [one.whose for one in kept._kept.values()] == ["3", "4", "5"]
    kept.encode("<s>3</s>", "3")  # used again
    kept.encode("<s>" + "x" * 85, "long")
    assert {one.whose for one in kept._kept.values()} == {"3", "long"}
    kept.encode("<s>" + "x" * 200, "too long")
    assert kept._characters == sum(len(one.text) for one in kept._kept.values()) <= 100
    kept.encode("<s>" * 20, "ends")
    (ends,) = [one.ends for one in kept._kept.values() if one.whose == "ends"]
    assert ends == [51, 54, 57, 60]


def test_no_text_is_an_error_as_it_was():
    ours = Tokenizer(make_tokenizer("byte_level"), NAMED, {"default": "{{ messages[0].content }}"})
    with pytest.raises(RequestError, match="lone surrogate"):
        ours.encode_chat([{"role": "user", "content": "\ud800"}], whose="")
