"""Requests made from the server's own description, and beside it (fuzzing.py): no answer is a fault of the server.

$KOG_FUZZ_CASES bounds the cases of one run over all operations; a slow test takes ten times as many.
"""

import os

import pytest

from tests.lib.served import served
from tests.server.fuzzing import FLAGS, fuzz

CASES = 500


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory, checkpoint):
    with served(tmp_path_factory.mktemp("fuzzed"), checkpoint, *FLAGS) as running:
        yield running


def no_faults(server, cases, figure):
    statuses = fuzz(server, cases)
    assert sum(statuses.values()) >= cases
    assert all(status < 500 for status in statuses)
    figure("A11", f"{sum(statuses.values())} cases by schemathesis, by status {statuses}")


def test_no_request_is_a_fault_of_the_server(fuzzed, figure):
    no_faults(fuzzed, int(os.environ.get("KOG_FUZZ_CASES", CASES)), figure)


@pytest.mark.slow
def test_no_request_of_many_is_a_fault_of_the_server(fuzzed, figure):
    no_faults(fuzzed, 10 * CASES, figure)
