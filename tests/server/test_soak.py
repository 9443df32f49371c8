"""R17 in its short form: all kinds of requests, one after the other, without an error; and where memory lies."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from pytest import approx

from kog_triton.server.arenas import MOST
from tests.lib import kept_rows
from tests.server import figures
from tests.server import soak as soak_command
from tests.server.asked import by_name
from tests.server.soak import SOAK_S, WARM_UP, Soak, mappings_kib, memory_kib, mib_per_minute, soak

SECONDS = 8.0


def test_everything_clients_do_for_a_while_is_without_an_error(server, figure):
    found = soak(server, SECONDS, warm_up=12)
    assert found["errors"] == 0
    assert found["requests"] >= 24  # each kind twice, on a loaded machine
    figure("R17", json.dumps(found))


@pytest.mark.parametrize(("command", "part"), [(figures, "figures"), (soak_command, "soak")])
def test_a_kept_record_is_of_what_is_asked_today(command, part):
    record = kept_rows.read(command.RECORD)
    assert record["asked"] == by_name(command.asked(record[part]))


def test_the_soak_that_is_kept_is_a_whole_one():
    """R17 has one meaning: five minutes behind the warm-up, and none of its figures in another record."""
    kept = kept_rows.read(soak_command.RECORD)["soak"]
    assert (kept["seconds"], kept["warm_up_requests"]) == (SOAK_S, WARM_UP)
    assert not any("R17" in what for what in kept_rows.read(figures.RECORD)["asked"])


def test_the_slope_is_in_mib_a_minute():
    assert mib_per_minute([(s, 5000 + 1024 * s) for s in range(0, 60, 7)]) == approx(60)
    assert mib_per_minute([(float(s), 5000 + s % 2) for s in range(601)]) == approx(0, abs=1e-3)


def test_what_is_mapped_adds_up_to_the_memory(server):
    """Each KiB has a mapping's name: a heap, files and the rest."""
    pid = server.engine_pid()
    found = mappings_kib(pid)
    assert found["[heap]"] > 0 and found["anonymous"] > 0
    assert any(".so" in name for name in found)
    assert sum(found.values()) == approx(memory_kib(pid), rel=0.05)


ARENA = 64 << 20  # bytes of address space that glibc takes for one, at a multiple of that; the first one is the heap


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
