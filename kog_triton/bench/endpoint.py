"""One streamed answer of any server that speaks OpenAI's API, with the times at which its bytes came.

Events are parsed once the answer is complete, so that parsing delays no time. Tokens are counted by `usage`: a server
may send several in one event, or none.
"""

import http.client
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from kog_triton.errors import RequestError, RunError, first_line

TIMEOUT_S = 600.0  # without a byte
PIECE = 1 << 16


@dataclass(frozen=True)
class Endpoint:
    """url: up to /v1; key: sent as a bearer token, "" for none."""

    url: str
    key: str = ""

    def models(self) -> list[dict[str, Any]]:
        """What /models lists; RequestError if nobody answers there."""
        try:
            status, body = self._whole("GET", "/models", None)
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{self.url}: nobody answers: {first_line(error)}") from error
        if status != 200:
            raise RequestError(f"{self.url}/models: {status}: {_message(body)}")
        found = json.loads(body)["data"]
        if not found:
            raise RequestError(f"{self.url} serves no model")
        return list(found)

    def chat(self, body: dict[str, Any]) -> "Answer":
        """Stream one answer; RunError for one that fails or breaks off."""
        asked = body | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        try:
            return self._stream(asked)
        except (OSError, http.client.HTTPException) as error:
            raise RunError(f"{self.url}: {first_line(error) or type(error).__name__}") from error

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise RequestError(f"--url {self.url}: no http:// or https:// address")
        return kinds[parts.scheme](parts.hostname, parts.port, timeout=TIMEOUT_S)

    def _send(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> None:
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, urlsplit(self.url).path.rstrip("/") + path, data, headers)

    def _whole(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            self._send(connection, method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _stream(self, body: dict[str, Any]) -> "Answer":
        connection = self._connect()
        pieces: list[tuple[float, bytes]] = []
        try:
            connection.connect()
            sent = time.perf_counter()
            self._send(connection, "POST", "/chat/completions", body)
            response = connection.getresponse()
            if response.status != 200:
                raise RunError(f"{self.url}: {response.status}: {_message(response.read())}")
            while piece := response.read1(PIECE):
                pieces.append((time.perf_counter() - sent, piece))
        finally:
            connection.close()
        return read_answer(pieces)


@dataclass
class Answer:
    """Times in s since the request was sent.

    arrivals  (time, tokens until then) of events that brought something; None for tokens that no event told
    """

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    arrivals: list[tuple[float, int | None]] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def rate(self) -> float | None:
        """Tokens a second behind those of the first event; None for an answer of one event."""
        if len(self.arrivals) < 2:
            return None
        (first, told), (last, _) = self.arrivals[0], self.arrivals[-1]
        return (self.tokens - (told or 1)) / (last - first)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between tokens, an event's shared evenly by its tokens; none if nothing tells how many it has."""
        counts = [told for _, told in self.arrivals]
        if None in counts:
            if len(counts) != self.tokens:
                return []
            counts = list(range(1, len(counts) + 1))
        times = [at for at, _ in self.arrivals]
        totals = [total or 0 for total in counts]
        gaps: list[float] = []
        for (before, at), (old, new) in zip(pairwise(times), pairwise(totals), strict=True):
            gaps += [(at - before) / max(new - old, 1)] * (new - old)
        return gaps


def read_answer(pieces: list[tuple[float, bytes]]) -> Answer:
    """What the pieces of a stream say. RunError if it says an error, or ends without [DONE] or `usage`."""
    answer, rest, done = Answer(), b"", False
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data:
                continue
            if data == b"[DONE]":
                done = True
            else:
                _take(answer, at, json.loads(data))
        answer.end_s = at
    if not done:
        raise RunError("the stream ended without [DONE]")
    if "completion_tokens" not in answer.usage:
        raise RunError("the stream told no usage: the server ignores stream_options.include_usage")
    return answer


def _take(answer: Answer, at: float, event: dict[str, Any]) -> None:
    if event.get("error"):
        raise RunError(f"the server said: {_text(event['error'])}")
    usage = event.get("usage")
    if usage:
        answer.usage = usage
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        answer.finish = choice.get("finish_reason") or answer.finish
        answer.content += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            _add_call(answer.calls, call)
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            told = (usage or {}).get("completion_tokens")
            answer.arrivals.append((at, told))


def _add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    while len(calls) <= part.get("index", 0):
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[part.get("index", 0)], part.get("function") or {}
    call["id"] += part.get("id") or ""
    for name in ("name", "arguments"):
        call["function"][name] += function.get(name) or ""


def _message(body: bytes) -> str:
    try:
        return _text(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return first_line(body[:200].decode(errors="replace"))


def _text(error: Any) -> str:
    return first_line(str(error.get("message", error)) if isinstance(error, dict) else str(error))
