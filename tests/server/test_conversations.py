"""Conversations of an agent on the reference backend: what was computed stays, and changes no answer."""

import json
import os
import time

import pytest

from tests.server import ten_questions
from tests.server.ten_questions import QUESTIONS, RESULT, SYSTEM, ask, converse, percent_cached

INJECTIONS = 1000


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    place = tmp_path_factory.mktemp("agents")
    with ten_questions.agents(place) as running:
        running.faults = place / "faults"
        yield running


def test_an_agents_prefix_is_computed_once(agents, figure):
    """Ten questions with tool results: of all tokens after the first prompt 95 % are cached; answers are as cold."""
    questions = converse(agents)
    assert all(question.warm == question.cold for question in questions)
    share = percent_cached(questions)
    assert share >= 95
    figure("A16", f"{QUESTIONS} questions: {share:.1f} % of prompt tokens cached; answers as cold")


def test_a_prefix_survives_an_answer_that_was_cut_off(agents):
    messages = [{"role": "user", "content": SYSTEM}]
    first = ask(agents, messages, max_tokens=400, stop=["e"])
    again = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": "go on"}]
    warm = ask(agents, again)
    assert warm.cached >= first.tokens
    assert warm.text == ask(agents, again, cache_salt="cold").text


@pytest.mark.parametrize(("fault", "status"), [("nan", 500), ("inf", 500), ("memory", 503)])
def test_a_pass_that_went_wrong_fails_its_request_alone(agents, figure, fault, status):
    """Its keys and values are gone: the next answer computes all, and is what a clean engine says."""
    messages = [{"role": "user", "content": f"{fault} {RESULT}"}]
    clean = ask(agents, messages)
    assert ask(agents, messages).cached > 0
    (agents.faults / fault).touch()
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    response = agents.post("/v1/chat/completions", body)
    assert response.status_code == status
    again = ask(agents, messages)
    assert (again.text, again.cached) == (clean.text, 0)
    figure("R4", f"{fault} in a layer of the reference: {status}, nothing cached after it, next answer as clean")


@pytest.mark.slow
def test_a_thousand_passes_that_went_wrong(agents, figure):
    """NaN and infinity by turns: none hangs, each fails its request, and what follows is as clean."""
    messages = [{"role": "user", "content": "a short question"}]
    clean = ask(agents, messages).text
    before = agents.metric("kog:corrupted_requests_total")
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    longest = 0.0
    for number in range(INJECTIONS):
        (agents.faults / ("nan", "inf")[number % 2]).touch()
        begun = time.monotonic()
        assert agents.post("/v1/chat/completions", body).status_code == 500
        longest = max(longest, time.monotonic() - begun)
        if number % 50 == 0:
            again = ask(agents, messages)
            assert (again.text, again.cached) == (clean, 0)
    assert agents.metric("kog:corrupted_requests_total") == before + INJECTIONS
    assert agents.metric("kog:engine_restarts_total") == 0
    assert ask(agents, messages).text == clean
    figure("R4", f"{INJECTIONS} injections: {INJECTIONS} errors, none took more than {longest:.2f} s")


def test_a_grammar_holds_what_a_model_says(agents):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "rain": {"type": "boolean"}},
        "required": ["city", "rain"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "Weather?"}]
    for seed in range(3):
        fields = {"temperature": 1, "seed": seed, "max_tokens": 200, "response_format": shape}
        found = json.loads(ask(agents, messages, allowed_token_ids=None, **fields).text)
        assert set(found) == {"city", "rain"}


def test_an_idle_server_costs_next_to_nothing(agents, figure):
    """Both processes together, in the share of one core; keys and values stay."""
    messages = [{"role": "user", "content": RESULT}]
    ask(agents, messages)
    time.sleep(1.5)  # the engine's thread lingers a second
    pids = (agents.process.pid, agents.engine_pid())

    def seconds():
        ticks = 0
        for pid in pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(") ")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    before, begun = seconds(), time.monotonic()
    time.sleep(3)
    share = (seconds() - before) / (time.monotonic() - begun)
    assert share < 0.1  # the 2 % are the figures command's to show: a tick of the clock is 10 ms
    assert ask(agents, messages).cached > 0
    figure("idle", f"{100 * share:.1f} % of a core")
