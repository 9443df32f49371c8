"""Slow: the field's other clients really run against a server, each in its own environment (real_clients.py)."""

import json

import pytest

from tests.server import real_clients

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with real_clients.servers(tmp_path_factory.mktemp("clients")) as both:
        yield both


@pytest.mark.parametrize("client", real_clients.SCRIPTED, ids=lambda client: client.__name__)
def test_a_client_gets_what_was_played(servers, figure, client):
    figure("clients", f"{client.__name__} {json.dumps(client(servers[0]))}")


def test_log_likelihoods_are_the_models_own(servers, figure):
    figure("clients", f"lm_eval {json.dumps(real_clients.lm_eval(servers[1]))}")
