"""What the tests of leaks take for one."""

from tests.lib.process_memory import leaked

HELD: dict[str, int | None] = {"tensors": 5, "bytes": 1000, "pinned": 64, "driver": None}


def test_a_word_a_request_is_a_leak_and_a_late_copy_is_none():
    assert leaked(HELD, HELD | {"pinned": 72}, 900) == []
    assert leaked(HELD, HELD | {"pinned": 64 + 900}, 900) == ["pinned: 900 bytes more"]
    assert leaked(HELD, HELD | {"pinned": 56}, 900) == ["pinned: -8 bytes more"]
    assert leaked(HELD, HELD | {"bytes": 1004}, 900) == ["bytes: 1000 -> 1004"]
