"""A tokenizer.json that makes a text explode is refused when it is read, not when it is used."""

import base64
import json

import pytest

from kog_triton.errors import ModelError
from kog_triton.text import Tokenizer, tokenizer
from tests.lib.fake_checkpoint import byte_tokenizer
from tests.lib.text_samples import KINDS, make_tokenizer

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BETWEEN = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
END = {"SpecialToken": {"id": "<end>", "type_id": 0}}
PAIR = [TEXT, {"Sequence": {"id": "B", "type_id": 0}}]


def normalizers(*steps):
    return {"normalizer": {"type": "Sequence", "normalizers": [*steps]}}


def decoders(*steps):
    return {"decoder": {"type": "Sequence", "decoders": [BYTES, *steps]}}


def around(single, ids=1):
    token = {"id": "<end>", "ids": [256] * ids, "tokens": ["<end>"] * ids}
    return {"type": "TemplateProcessing", "single": single, "pair": PAIR, "special_tokens": {"<end>": token}}


def charsmap(longest: int) -> str:
    """A map of SentencePiece's form: the size of an empty trie, and one replacement."""
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"x" * longest + b"\0").decode()


def load(folder, change) -> Tokenizer:
    data = json.loads(byte_tokenizer().to_str()) | change
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        normalizers(*[DOUBLE] * 40),
        normalizers(*[BETWEEN] * 40),
        normalizers({"type": "Prepend", "prepend": "a" * 60_000}, *[DOUBLE] * 3),
        normalizers({"type": "Sequence", "normalizers": [DOUBLE] * 6}, *[DOUBLE] * 6),
        {"normalizer": DOUBLE | {"content": "a" * 2000}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(2000)}},
        decoders(*[DOUBLE] * 40),
        {"post_processor": around([TEXT] * 2000)},
        {"post_processor": around([TEXT, *[END] * 400], ids=400)},
        {"post_processor": {"type": "Sequence", "processors": [around([TEXT, TEXT])] * 30}},
    ],
)
def test_growth_without_bound_is_refused(tmp_path, change):
    with pytest.raises(ModelError, match=r"tokenizer\.json: its \w+ makes a text of n") as error:
        load(tmp_path, change)
    assert len(str(error.value).splitlines()) == 1 and next(iter(change)) in str(error.value)


def test_growth_is_told_as_a_line_of_the_length(tmp_path):
    with pytest.raises(ModelError, match=r"a text of n characters up to 2\.05e\+03 \* n \+ 0 long"):
        load(tmp_path, normalizers(*[DOUBLE] * 11))


def test_growth_in_bounds_is_what_the_library_does(tmp_path):
    assert len(load(tmp_path, normalizers(*[DOUBLE] * 10)).encode("a")) == 1 << 10
    assert load(tmp_path, decoders(*[DOUBLE] * 10)).decode([97]) == "a" * (1 << 10)
    ids = load(tmp_path, {"post_processor": around([END, TEXT, TEXT], ids=3)}).encode("ab")
    assert ids == [256, 256, 256, *b"ab", *b"ab"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_in_use_are_within_the_bound(tmp_path, kind):
    make_tokenizer(kind).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("a")


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(tokenizer, "MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(ModelError, match=r"tokenizer\.json is larger than"):
        Tokenizer.load(tmp_path)
