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


@pytest.fixture
def figure(record_property):
    """Note a figure of a test, for the summary: a name of the reliability table, and what was measured."""

    def note(name, text):
        record_property("figure", f"{name}: {text}")

    return note


def pytest_terminal_summary(terminalreporter):
    found = [
        value
        for report in terminalreporter.getreports("passed")
        for key, value in report.user_properties
        if key == "figure"
    ]
    for line in sorted(set(found)):
        terminalreporter.write_line(line)
