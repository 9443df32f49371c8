"""An agent's conversation of ten questions, each with what a tool has read, on a model that computes its answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import Served, served

QUESTIONS = 10
SYSTEM = "You are an agent with tools. " * 150
RESULT = "line of a file that a tool has read\n" * 5
PRINTABLE = list(range(32, 127))
ANSWER_TOKENS = 24


@contextmanager
def agents(place: Path) -> Iterator[Served]:
    """A model with room for long conversations, on the reference backend with faults (faulty_reference.py)."""
    model = make_checkpoint(place / "model", max_context=16384)
    faults = place / "faults"
    faults.mkdir()
    flags = ("--backend", "faulty", "--max-num-seqs", "2")
    with served(place / "server", model, *flags, KOG_FAULTS=str(faults)) as running:
        yield running


@dataclass(frozen=True)
class Answer:
    text: str
    cached: int  # tokens of the prompt
    tokens: int
    prompt_ms: float


def ask(server: Served, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    """A greedy answer of printable bytes."""
    body = {"messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS, "allowed_token_ids": PRINTABLE}
    response = server.post("/v1/chat/completions", body | fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    return Answer(
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
        answer["timings"]["prompt_ms"],
    )


@dataclass(frozen=True)
class Question:
    """One question and its answers: with the conversation's keys and values kept, and cold, under a salt of its own."""

    prompt: str  # as the model's template writes it
    warm: str
    cold: str
    cached: int  # tokens of the prompt
    tokens: int
    warm_ms: float  # of the prompt
    cold_ms: float


def converse(server: Served, system: str = SYSTEM, result: str = RESULT) -> list[Question]:
    """Ten questions, each with a result of a tool behind it; the conversation goes on from the warm answers."""
    messages = [{"role": "system", "content": system}]
    questions = []
    for number in range(QUESTIONS):
        role = "user" if number == 0 else "tool"
        messages.append({"role": role, "content": f"{number}: {result}"})
        warm = ask(server, messages)
        cold = ask(server, messages, cache_salt=f"cold {number}")
        assert cold.cached == 0 and len(warm.text) == len(cold.text) == ANSWER_TOKENS
        prompt = "".join(f"[{m['role']}]{m['content']}\n" for m in messages) + "[assistant]"
        assert len(prompt) == warm.tokens == cold.tokens
        times = warm.prompt_ms, cold.prompt_ms
        questions.append(Question(prompt, warm.text, cold.text, warm.cached, warm.tokens, *times))
        messages.append({"role": "assistant", "content": warm.text})
    return questions


def percent_cached(questions: list[Question]) -> float:
    """Of all prompts' tokens but the first one's."""
    return 100 * sum(t.cached for t in questions[1:]) / sum(t.tokens for t in questions[1:])
