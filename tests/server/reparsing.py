"""A client that parses all of an answer again at each event, as chat pages do: bytes, events, text, calls, Markdown."""

import json
import time
from typing import Any

from markdown_it import MarkdownIt

from tests.lib.served import Served


class Reparsing:
    """`take` bytes as they come; every whole event has everything before it parsed again, and checked."""

    def __init__(self) -> None:
        self.events = 0
        self.text = ""
        self.calls: list[Any] = []
        self.html = ""
        self._body = b""
        self._whole = 0  # bytes of whole events

    def take(self, data: bytes) -> None:
        self._body += data
        while (end := self._body.find(b"\n\n", self._whole)) >= 0:
            self._whole = end + 2
            self.events += 1
            self._parse(self._body[: self._whole].decode())  # no event splits a character

    def _parse(self, body: str) -> None:
        before, calls, text = self.text, {}, ""
        for block in body.split("\n\n")[:-1]:
            if not block.startswith("data: ") or block == "data: [DONE]":
                continue
            event = json.loads(block.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    # no event splits a call: each comes once, and can be read at once
                    assert call["index"] not in calls
                    calls[call["index"]] = json.loads(call["function"]["arguments"])
        assert text.startswith(before)
        assert "\ufffd" not in text
        self.text, self.calls = text, [calls[index] for index in sorted(calls)]
        self.html = MarkdownIt().render(text)


def follow(server: Served, body: dict[str, Any]) -> tuple[Reparsing, float]:
    """The client at the end of a stream, and seconds from the request to its last parse."""
    client, begun = Reparsing(), time.perf_counter()
    with server.client() as http, http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for data in response.iter_raw():
            client.take(data)
    return client, time.perf_counter() - begun
