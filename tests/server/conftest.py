"""Servers that the tests of this folder share: one process each for a run of them."""

import pytest

pytest.importorskip("fastapi")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The scripted backend's: bytes as tokens, and a chat template that knows tools and reasoning."""
    from tests.lib.fake_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def server(tmp_path_factory, checkpoint):
    from tests.lib.served import served

    flags = ("--max-num-seqs", "4", "--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with served(tmp_path_factory.mktemp("server"), checkpoint, *flags) as running:
        yield running
