"""`kog bench serve` and `kog bench agent`: any server that speaks OpenAI's API, as one to eight clients see it.

serve  every client asks at once, again and again: tokens/s of a client and of all, time to the first token, between two
agent  one conversation that grows by tool calls and their results until so many tokens were made: what reuse of keys
       and values is worth, in wall time, beside a server of 100 tokens/s that reads its prompts in no time
"""

import argparse
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from kog_triton.bench.endpoint import Answer, Endpoint
from kog_triton.errors import KogError, RunError
from kog_triton.metrics import percentile

SCHEMA = "kog_triton.bench.serving/1"
BASELINE = 100  # tokens/s of the server that the agent's wall time stands beside
ROOM = 256  # positions left free by the agent, for what a template adds to a message
WORDS = (
    *("river", "stone", "light", "paper", "window", "garden", "letter", "number", "engine", "bridge"),
    *("morning", "winter", "travel", "question", "answer", "yellow", "simple", "heavy", "quiet"),
    *("early", "follow", "gather", "measure", "between", "under", "beyond", "seven", "twelve"),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file of the project.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
TASK = (
    "You mend a program, file by file. Read a file with the tool, say what you change in it and why, and go on with "
    "the next one."
)


def words(count: int, seed: int) -> str:
    """A text of so many words: nobody else's beginning."""
    drawn = random.Random(seed)
    return " ".join(drawn.choice(WORDS) for _ in range(count))


def endpoint_of(args: argparse.Namespace) -> tuple[Endpoint, str, int | None]:
    """Where, which model, and how many positions its context has, where the server tells."""
    endpoint = Endpoint(args.url.rstrip("/"), args.api_key or os.environ.get("KOG_API_KEY", ""))
    models = endpoint.models()
    name = args.model or str(models[0]["id"])
    told = next((one for one in models if one["id"] == name), {})
    return endpoint, name, told.get("max_model_len")


def serve(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The record: a row for each number of clients. RunError for an answer that failed."""
    endpoint, model, _ = endpoint_of(args)
    shared: dict[str, Any] = {"model": model, "max_tokens": args.max_tokens, "temperature": 0}
    if args.ignore_eos:
        shared["ignore_eos"] = True
    _ask(endpoint, shared, args, 0)  # warm
    rows, seed = [], 1
    for clients in sorted(set(args.clients)):
        answers: list[Answer] = []
        wall = 0.0
        for _ in range(args.rounds):
            begun = time.perf_counter()
            answers += _together(clients, partial(_ask, endpoint, shared, args), seed)
            wall += time.perf_counter() - begun
            seed += clients
        rows.append({"clients": clients, **_figures(answers), **_sum(answers, wall)})
        say(f"{clients} clients: {rows[-1]['tokens_per_s_all']:,.0f} tokens/s in all")
    return _record(args, model, rows)


def _ask(endpoint: Endpoint, shared: dict[str, Any], args: argparse.Namespace, seed: int) -> Answer:
    prompt = words(args.prompt_words, seed)
    return endpoint.chat({**shared, "messages": [{"role": "user", "content": prompt}]})


def _together(clients: int, ask: Callable[[int], Answer], seed: int) -> list[Answer]:
    found: list[Answer] = []
    failed: list[KogError] = []

    def one(i: int) -> None:
        try:
            found.append(ask(seed + i))
        except KogError as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def _figures(answers: list[Answer]) -> dict[str, Any]:
    """Of all answers: tokens/s of one client, ms to the first token, us between two; null where nothing tells."""
    rates = [rate for answer in answers if (rate := answer.rate) is not None]
    firsts = [1e3 * first for answer in answers if (first := answer.ttft_s) is not None]
    gaps = [1e6 * gap for answer in answers for gap in answer.gaps_s]
    whole = all(answer.gaps_s for answer in answers if answer.rate is not None)
    return {
        "tokens_per_s": _at(rates, 50),
        "ttft_ms_p50": _at(firsts, 50),
        "ttft_ms_p99": _at(firsts, 99),
        "itl_us_p50": _at(gaps, 50) if whole else None,
        "itl_us_p99": _at(gaps, 99) if whole else None,
    }


def _sum(answers: list[Answer], wall_s: float) -> dict[str, Any]:
    made = sum(answer.tokens for answer in answers)
    return {
        "tokens_per_s_all": round(made / wall_s, 1),
        "answers": len(answers),
        "output_tokens": made,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "wall_s": round(wall_s, 3),
    }


def _at(values: list[float], q: float) -> float | None:
    return round(percentile(values, q), 1) if values else None


def agent(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """The record: one row. A conversation that the context cannot hold any longer is followed by a new one."""
    endpoint, model, context = endpoint_of(args)
    shared = {"model": model, "max_tokens": args.call_tokens, "temperature": 0, "tools": [TOOL]}
    answers: list[Answer] = []
    messages: list[dict[str, Any]] = []
    conversations = tool_calls = made = held = 0
    begun = time.perf_counter()
    while made < args.tokens:
        if not messages or (context and held + args.call_tokens + ROOM > context):
            if messages and held == 0:
                raise RunError(f"a context of {context} positions holds no call: --call-tokens less")
            conversations += 1
            held = 0
            messages = [
                {"role": "system", "content": f"Task {conversations}. {TASK}"},
                {"role": "user", "content": words(args.result_words, conversations)},
            ]
        answer = endpoint.chat({**shared, "messages": messages})
        if answer.tokens == 0:
            raise RunError("an answer of no tokens: the loop would not end")
        answers.append(answer)
        made += answer.tokens
        tool_calls += len(answer.calls)
        result = words(args.result_words, len(answers) << 8)
        messages += _follow(answer, result)
        held = answer.prompt_tokens + answer.tokens + 2 * args.result_words
        say(f"{made:,} of {args.tokens:,} tokens, {answer.cached_tokens:,} of {answer.prompt_tokens:,} reused")
    wall = time.perf_counter() - begun
    row = {
        **_figures(answers),
        **_sum(answers, wall),
        "calls": len(answers),
        "tool_calls": tool_calls,
        "conversations": conversations,
        "baseline_tokens_per_s": BASELINE,
        "baseline_wall_s": round(made / BASELINE, 3),
    }
    return _record(args, model, [row])


def _follow(answer: Answer, result: str) -> Iterable[dict[str, Any]]:
    """The answer as it stands in the conversation, and what comes back."""
    said: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if not answer.calls:
        return said, {"role": "user", "content": f"Go on. {result}"}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in answer.calls]
    return said | {"tool_calls": answer.calls}, *results


def _record(args: argparse.Namespace, model: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    hidden = ("api_key", "json", "quiet", "kind")
    return {
        "schema": SCHEMA,
        "kind": args.kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model,
        "test": {name: value for name, value in vars(args).items() if name not in hidden},
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "rows": rows,
    }


def show(record: dict[str, Any]) -> None:
    """Print it on stdout."""
    from kog_triton.cli.console import Output, plain_table

    console = Output()
    names = ["clients"] if record["kind"] == "serve" else ["calls", "tool calls", "reused"]
    names += ["tokens/s", "all tokens/s", "TTFT ms p50", "p99", "between us p50", "p99", "tokens"]
    names += ["wall s"] + (["at 100 tokens/s"] if record["kind"] == "agent" else [])
    table = plain_table(names)
    for row in record["rows"]:
        if record["kind"] == "serve":
            cells = [f"{row['clients']}"]
        else:
            share = row["cached_tokens"] / row["prompt_tokens"]
            cells = [f"{row['calls']}", f"{row['tool_calls']}", f"{share:.0%}"]
        for name in (
            *("tokens_per_s", "tokens_per_s_all", "ttft_ms_p50", "ttft_ms_p99"),
            *("itl_us_p50", "itl_us_p99", "output_tokens", "wall_s"),
        ):
            cells.append("-" if row[name] is None else f"{row[name]:,}")
        if record["kind"] == "agent":
            cells.append(f"{row['baseline_wall_s']:,}")
        table.add_row(*cells)
    table.title = f"{record['model']} at {record['test']['url']}"
    console.write_table(table)
