"""An agent's conversation of ten questions, each with what a tool has read, on a model that computes its answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import Served, served

QUESTIONS = 10
SYSTEM = "You are an agent with tools. " * 150
RESULT = "line of a file that a tool has read\n" * 5
PRINTABLE = list(range(32, 127))


@contextmanager
def agents(place: Path) -> Iterator[Served]:
    """A model with room for long conversations, on the reference backend with faults (faulty_reference.py)."""
    model = make_checkpoint(place / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    faults = place / "faults"
    faults.mkdir()
    flags = ("--backend", "faulty", "--max-num-seqs", "2")
    with served(place / "server", model, *flags, KOG_FAULTS=str(faults)) as running:
        yield running


def ask(server: Served, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, int, int]:
    """The answer, and of its prompt the tokens that were cached and all."""
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


def percent_cached(server: Served) -> float:
    """Of all prompts' tokens but the first one's. An AssertionError if an answer is not a cold engine's, which
    a salt of its own makes of each."""
    messages = [{"role": "system", "content": SYSTEM}]
    cached = prompts = 0
    for number in range(QUESTIONS):
        role = "user" if number == 0 else "tool"
        messages.append({"role": role, "content": f"{number}: {RESULT}"})
        warm, held, tokens = ask(server, messages)
        cold, none, _ = ask(server, messages, cache_salt=f"cold {number}")
        assert (warm, none) == (cold, 0)
        assert len(warm) == 24
        if number:
            cached, prompts = cached + held, prompts + tokens
        messages.append({"role": "assistant", "content": warm})
    return 100 * cached / prompts
