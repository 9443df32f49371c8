"""Incremental detokenization: the deltas join to what decoding all ids at once gives."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from kog_triton.text import Detokenizer, Tokenizer
from tests.lib.text_samples import KINDS, SPECIAL_TOKENS, make_tokenizer

LOADED = {kind: Tokenizer(make_tokenizer(kind)) for kind in KINDS}
TEXTS = [
    "plain words, and more words.",
    "  two leading spaces\tand tabs  ",
    "emoji 😀👩‍👩‍👧🇩🇪 in a row 😃😃",
    "今日は良い天気 안녕하세요 नमस्ते e\u0301 Ω",
    "a<|im_end|>b </s> <think>x</think>",
    "\x00\x7f\ufffd\u200d\ufeff",
]


def stream(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.finish()]


def joined_equals_decode(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool) -> None:
    ids = [i for piece in pieces for i in piece]
    expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, pieces, skip)) == expected


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_one_id_at_a_time(kind, text, skip):
    tokenizer = LOADED[kind]
    joined_equals_decode(tokenizer, [[i] for i in tokenizer.encode(text)], skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_cut_anywhere(kind, data):
    tokenizer = LOADED[kind]
    any_id = st.integers(0, tokenizer.vocab_size + 3)  # a model may have more rows than ids
    pieces = data.draw(st.lists(st.lists(any_id, max_size=5), max_size=20))
    joined_equals_decode(tokenizer, pieces, data.draw(st.booleans()))


@pytest.mark.parametrize("kind", ["llama_bpe", "unigram"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_runs_of_byte_tokens(kind, data):
    tokenizer = LOADED[kind]
    of_byte = [tokenizer._backend.token_to_id(f"<0x{b:02X}>") for b in range(256)]
    spaces = tokenizer._backend.token_to_id("▁")
    end = tokenizer._backend.token_to_id("</s>")
    a_byte = st.sampled_from([0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF])
    token = a_byte.map(of_byte.__getitem__) | st.sampled_from([spaces, end, 300])
    ids = data.draw(st.lists(token, max_size=30))
    joined_equals_decode(tokenizer, [[i] for i in ids], data.draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=40))
def test_any_bytes_of_a_byte_level_vocabulary(raw):
    tokenizer = LOADED["byte_level"]
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    pieces = [[of_byte[bytes([b])]] for b in raw]
    deltas = stream(tokenizer, pieces, True)
    assert "".join(deltas) == raw.decode("utf-8", errors="replace")


def test_half_a_character_is_never_shown():
    tokenizer = LOADED["byte_level"]
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [[of_byte[bytes([b])]] for b in "a😀é".encode()]
    assert stream(tokenizer, ids, True) == ["a", "", "", "", "😀", "", "é", ""]
    assert stream(tokenizer, ids[:3], True) == ["a", "", "", "\ufffd"]


def test_a_token_without_text_still_parts_its_neighbors():
    tokenizer = LOADED["suffix"]
    a, b, space = (tokenizer._backend.token_to_id(piece) for piece in ("a", "b", "</w>"))
    assert tokenizer.decode([a, space, b]) == "a b"
    joined_equals_decode(tokenizer, [[a], [space], [b], [space], [space], [b]], True)


def test_text_comes_as_soon_as_it_is_certain():
    tokenizer = LOADED["llama_bpe"]
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False)
    deltas = stream(tokenizer, [[i] for i in ids], True)
    waits = [tokenizer.is_byte_token(i) for i in ids]
    assert [delta == "" for delta in deltas] == [*waits, True]
    assert not all(waits)


def test_finish_ends_once():
    detokenizer = Detokenizer(LOADED["byte_level"])
    tokenizer = LOADED["byte_level"]
    lead = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    assert detokenizer.feed(lead) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_cost_per_token_does_not_grow(kind):
    tokenizer = LOADED[kind]
    # the hardest stream for each: a token that on its own has no text, or half a character
    hard = tokenizer._backend.token_to_id("▁") or tokenizer.encode("é", add_special_tokens=False)[0]
    started = time.process_time()
    stream(tokenizer, [[hard]] * 20_000, True)
    assert time.process_time() - started < 5  # quadratic would take minutes


def test_token_bytes_join_to_the_text():
    text = "Grüße, 世界 😀\n  x"
    for kind in ("byte_level", "unigram"):
        tokenizer = LOADED[kind]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(i) or b"" for i in ids).decode() == text
    tokenizer = LOADED["byte_level"]
    assert tokenizer.token_bytes(tokenizer.vocab_size) is None
    user = tokenizer._backend.token_to_id("<｜User｜>")
    assert tokenizer.token_bytes(user) == "<｜User｜>".encode()
    assert len(tokenizer.special_ids) == len(SPECIAL_TOKENS)


def test_the_librarys_own_stream_would_lose_text():
    """Why there is one of ours. If this fails, tokenizers can do it: then ours may go."""
    backend, theirs = LOADED["byte_level"]._backend, DecodeStream(skip_special_tokens=True)
    half = [backend.token_to_id(piece) for piece in ("a", "ð", "Ł")]  # the beginning of an emoji
    assert [theirs.step(backend, i) for i in half] == ["a", None, None]
    assert [name for name in dir(theirs) if not name.startswith("_")] == ["step"]  # no end
    assert stream(LOADED["byte_level"], [half], True) == ["a", "\ufffd"]
    assert backend.decode(half) == "a\ufffd"
    unigram = LOADED["unigram"]
    ids = [unigram._backend.token_to_id(piece) for piece in ("<0x3C>", "<0xAF>", "い")]
    theirs = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [theirs.step(unigram._backend, i) for i in ids]
    joined_equals_decode(unigram, [[i] for i in ids], True)
