"""Stop strings: the same text and the same match however the stream is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kog_triton.text import StopMatcher
from kog_triton.text.stop import overlap


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.finish(), matcher.matched


def plain(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, by the definition."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=6), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_any_stream_any_stops(pieces, stops, include):
    assert run(pieces, stops, include) == plain("".join(pieces), stops, include)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_only_what_could_be_a_stop_is_held_back(pieces, stops):
    matcher, shown, seen = StopMatcher(stops), "", ""
    for piece in pieces:
        shown += matcher.feed(piece)
        seen += piece
        if matcher.matched:
            break
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@settings(max_examples=500, deadline=None)
@given(
    skipped=st.lists(st.text("ab", max_size=4), max_size=4),
    pieces=st.lists(st.text("ab", max_size=4), max_size=6),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_a_stop_may_begin_in_skipped_text_but_not_end_there(skipped, pieces, stops, include):
    matcher = StopMatcher(stops, include)
    text = "".join(matcher.skip(piece) for piece in skipped)
    text += "".join(matcher.feed(piece) for piece in pieces) + matcher.finish()
    whole, exempt = "".join([*skipped, *pieces]), len("".join(skipped))
    for end in range(exempt + 1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            want = whole[: end if include else end - len(stop)]
            assert (text, matcher.matched) == (want, stop)
            return
    assert (text, matcher.matched) == (whole, None)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", " wor", "ld"], ["lo w"], ("Hel", "lo w")),
        (["abcd"], ["abcd", "bc"], ("a", "bc")),
        (["xab"], ["b", "ab"], ("x", "ab")),
        (["a\n", "\nb"], ["\n\n"], ("a", "\n\n")),
        (["aab"], ["ab"], ("a", "ab")),
        (["no stop<|"], ["<|end|>"], ("no stop<|", None)),
        (["text"], [], ("text", None)),
    ],
)
def test_examples(pieces, stops, expected):
    assert run(pieces, stops) == expected


def test_the_stop_string_is_kept_if_asked():
    assert run(["one. t", "wo"], [". two"], include=True) == ("one. two", ". two")


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["x"])
    assert matcher.feed("axb") == "a"
    assert matcher.feed("more") == ""
    assert matcher.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "held"),
    [("xab", "abc", 2), ("abc", "abc", 0), ("aa", "aa", 1), ("aba", "aba", 1), ("x", "abc", 0), ("", "a", 0)],
)
def test_only_what_may_begin_a_stop_string_is_held_and_never_the_whole(text, stop, held):
    assert overlap(text, stop) == held
