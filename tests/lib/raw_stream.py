"""A stream read from its socket as it comes and parsed afterwards, so that parsing delays no arrival."""

import json
import socket
import time
from typing import Any

from tests.lib.served import WAIT_S, Served


def request_head(length: int, path: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def raw_stream(
    server: Served, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> tuple[int, list[tuple[int, dict[str, Any]]]]:
    """When it was sent, and (arrival, event) of each event; in ns of time.perf_counter. It must be told to its end."""
    data = json.dumps(body | {"stream": True}).encode()
    pieces = []
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = time.perf_counter_ns()
        raw.sendall(request_head(len(data), path) + data)
        while piece := raw.recv(1 << 16):
            pieces.append((time.perf_counter_ns(), piece))
    whole, events, at = b"".join(piece for _, piece in pieces), [], 0
    assert whole.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in whole, whole[-2000:]
    ends, total = [], 0
    for arrived, piece in pieces:
        total += len(piece)
        ends.append((total, arrived))
    i = 0
    while (at := whole.find(b"data: {", at)) >= 0:
        end = whole.index(b"\n\n", at)
        while ends[i][0] < end:
            i += 1
        events.append((ends[i][1], json.loads(whole[at + 6 : end])))
        at = end
    return sent, events
