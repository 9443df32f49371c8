"""R17 in its short form: all kinds of requests, one after the other, without an error; and where memory lies."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from kog_triton.server.arenas import MOST
from tests.server.soak import Soak, soak

SECONDS = 8.0


def test_everything_clients_do_for_a_while_is_without_an_error(server, figure):
    found = soak(server, SECONDS)
    assert found["errors"] == 0
    assert found["requests"] >= 24  # each kind twice, on a loaded machine
    figure("R17", json.dumps(found))


ARENA = (
    64 << 20
)  # bytes of address space that glibc takes for one, at a multiple of that; the first one is the heap


def arenas(pid):
    """How many a process has beside the first: the used part of one is followed by the part that may not be touched."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    spans = [([int(end, 16) for end in words[0].split("-")], words[1]) for words in lines]
    found = 0
    for ((start, middle), mode), ((after, end), rest) in pairwise(spans):
        whole = middle == after and end - start == ARENA and start % ARENA == 0
        found += whole and mode == "rw-p" and rest == "---p"
    return found


def test_threads_share_an_arena(server):
    """Answers by grammars, that come at once, would grow one arena after the other, and nothing of it is in use."""
    run = Soak(server)
    with ThreadPoolExecutor(4) as clients:
        assert all(clients.map(run.grammar, [f"arena {number} " for number in range(16)]))
    assert arenas(server.process.pid) == arenas(server.engine_pid()) == MOST - 1
