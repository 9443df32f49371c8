"""Conversations of an agent on the reference backend: what was computed stays, and changes no answer."""

import json
import os
import time

import pytest

from tests.lib.served import served

QUESTIONS = 10
SYSTEM = "You are an agent with tools. " * 150
RESULT = "line of a file that a tool has read\n" * 5
PRINTABLE = list(range(32, 127))


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """A model with room for long conversations, on the reference backend with faults."""
    from tests.lib.fake_checkpoint import make_checkpoint

    folder = make_checkpoint(tmp_path_factory.mktemp("roomy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    place = tmp_path_factory.mktemp("agents")
    faults = place / "faults"
    faults.mkdir()
    flags = ("--backend", "faulty", "--max-num-seqs", "2")
    with served(place / "server", folder, *flags, KOG_FAULTS=str(faults)) as running:
        running.faults = faults
        yield running


def ask(server, messages, **fields):
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": 24,
        "allowed_token_ids": PRINTABLE,
    }
    answer = server.post("/v1/chat/completions", body | fields).json()
    usage = answer["usage"]
    return (
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
    )


def test_an_agents_prefix_is_computed_once(agents, figure):
    """Ten turns with tool results: of all tokens after the first prompt 95 % are cached; answers are those of a cold
    engine, which a salt of its own makes of each."""
    messages = [{"role": "system", "content": SYSTEM}]
    cached = prompts = 0
    for number in range(QUESTIONS):
        messages.append(
            {"role": "user" if number == 0 else "tool", "content": f"{number}: {RESULT}"}
        )
        warm, held, tokens = ask(agents, messages)
        cold, none, _ = ask(agents, messages, cache_salt=f"cold {number}")
        assert (warm, none) == (cold, 0)
        assert len(warm) == 24
        if number:
            cached, prompts = cached + held, prompts + tokens
        messages.append({"role": "assistant", "content": warm})
    assert cached >= 0.95 * prompts
    figure(
        "A16",
        f"{QUESTIONS} turns: {100 * cached / prompts:.1f} % of prompt tokens cached; answers as cold",
    )


def test_a_prefix_survives_an_answer_that_was_cut_off(agents):
    messages = [{"role": "user", "content": SYSTEM}]
    first, _, tokens = ask(agents, messages, max_tokens=400, stop=["e"])
    again = [
        *messages,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "go on"},
    ]
    warm, cached, _ = ask(agents, again)
    assert cached >= tokens
    assert warm == ask(agents, again, cache_salt="cold")[0]


@pytest.mark.parametrize(("fault", "status"), [("nan", 500), ("inf", 500), ("memory", 503)])
def test_a_pass_that_went_wrong_fails_its_request_alone(agents, figure, fault, status):
    """Its keys and values are gone: the next answer computes all, and is what a clean engine says."""
    messages = [{"role": "user", "content": f"{fault} {RESULT}"}]
    clean = ask(agents, messages)[0]
    assert ask(agents, messages)[1] > 0
    (agents.faults / fault).touch()
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    response = agents.post("/v1/chat/completions", body)
    assert response.status_code == status
    again, cached, _ = ask(agents, messages)
    assert (again, cached) == (clean, 0)
    figure(
        "R4",
        f"{fault} in a layer of the reference: {status}, nothing cached after it, next answer as clean",
    )


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
        said, _, _ = ask(agents, messages, allowed_token_ids=None, **fields)
        found = json.loads(said)
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
    assert (
        share < 0.1
    )  # the 2 % are the figures command's to show: a tick of the clock is 10 ms
    assert ask(agents, messages)[1] > 0
    figure("idle", f"{100 * share:.1f} % of a core")
