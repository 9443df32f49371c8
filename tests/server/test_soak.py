"""R17 in its short form: all kinds of requests, one after the other, without an error."""

import json

from tests.server.soak import soak

SECONDS = 8.0


def test_everything_clients_do_for_a_while_is_without_an_error(server, figure):
    found = soak(server, SECONDS)
    assert found["errors"] == 0
    assert found["requests"] >= 24  # each kind twice, on a loaded machine
    figure("R17", json.dumps(found))
