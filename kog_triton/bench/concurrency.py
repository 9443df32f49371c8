"""`kog bench concurrency`: the tokens/s of all requests that one backend serves at a time, over that of one.

Within a round, each number of requests is measured once, so that drift meets all alike. Every request's tokens
must be those that it gets alone; the text of the first is compared with the fp32 reference before.

tokens/s = (tokens of all requests - 1) / (last stamp of any - first stamp of any)
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.choose import Choice
from kog_triton.bench.check import Judge, open_oracle
from kog_triton.bench.engines import BackendUnderTest, Run, Sampling
from kog_triton.bench.task import Common, Row, Say
from kog_triton.bench.timing import roofline, times
from kog_triton.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ConcurrencyTask(Common):
    """What to measure: each number of `requests`, of so many prompt tokens and tokens each."""

    requests: Sequence[int]
    prompt_tokens: int
    tokens: int
    sampling: Sampling


@dataclass
class _Measurement:
    """One number of requests on one backend."""

    requests: int
    rounds: list[list[Run]] = field(default_factory=list)


def measure_concurrency(task: ConcurrencyTask, say: Say) -> dict[str, Any]:
    """The parts of a record that this measurement makes: bandwidth, conditions, rows, failures."""
    bandwidth = task.read_bandwidth(say)
    return task.measure(bandwidth, lambda choice, row: _rows(task, choice, row, bandwidth, say))


def _rows(task: ConcurrencyTask, choice: Choice, row: Row, bandwidth: dict[str, Any], say: Say) -> list[Row]:
    """A row a number of requests, or one that says what is wrong."""
    most = max(task.requests)
    options = BackendOptions(
        max_context=task.room(task.prompt_tokens + task.tokens),
        num_gpus=task.num_gpus,
        device=task.device_word,
        num_slots=most,
    )
    say(f"open {choice.name}")
    started = time.perf_counter()
    engine = BackendUnderTest(choice.backend, task.model.weights, options)
    load_s = time.perf_counter() - started
    try:
        prompts = [task.model.prompt(task.prompt_tokens, i) for i in range(most)]
        say("the reference's logits")
        judge = Judge(
            open_oracle(task.model.weights, replace(options, num_slots=1)), task.judged_ids(), prompts[0], task.tokens
        )
        try:
            check = asdict(judge.examine(engine, task.kl_limit(judge, say)))
        finally:
            judge.close()
        common = {"check": check, "load_s": load_s, "version": engine.version}
        common["dtype"] = engine.spec.dtype.name.lower()
        engine.settle()
        common["memory_bytes"] = engine.memory_bytes()
        if not check["passed"]:
            return [row | common | {"status": "wrong", "note": "its text is wrong: not timed"}]
        alone = [
            engine.generate_all([prompt], task.tokens, task.sampling, seed)[0].tokens
            for seed, prompt in enumerate(prompts)
        ]
        measurements = _time(task, engine, prompts, say)
        row |= common
        rows = [row | _measured(task, engine.spec, m, alone, bandwidth) for m in measurements]
        one = next((r["host"]["tokens_per_s"] for r in rows if r["requests"] == 1), None)
        for r in rows:
            r["over_one"] = r["host"]["tokens_per_s"] / one if one else None
        return rows
    finally:
        engine.close()
        if task.device.type == "cuda":
            torch.cuda.empty_cache()


def _time(task: ConcurrencyTask, engine: BackendUnderTest, prompts: list[list[int]], say: Say) -> list[_Measurement]:
    measurements = [_Measurement(n) for n in task.requests]
    for index in range(task.warmup + task.rounds):
        timed = index >= task.warmup
        say(f"round {index + 1 - task.warmup} of {task.rounds}" if timed else "warm up")
        for m in measurements:
            runs = engine.generate_all(prompts[: m.requests], task.tokens, task.sampling)
            if timed:
                m.rounds.append(runs)
            if index == 0:
                engine.settle()  # without its kernel until then: the warm-up after it is as the rounds are
    return measurements


def _measured(
    task: ConcurrencyTask, spec: ModelSpec, m: _Measurement, alone: list[list[int]], bandwidth: dict[str, Any]
) -> dict[str, Any]:
    """What one number of requests adds to the row of its backend."""
    same = all([run.tokens for run in one] == alone[: m.requests] for one in m.rounds)
    row = times(m.rounds) | {"requests": m.requests, "repeatable": same}
    # a step reads the weights once, and the keys and values of every request
    weights = spec.bytes_per_token
    num_bytes = spec.decode_bytes(task.prompt_tokens, task.tokens) - weights
    num_bytes = weights + m.requests * num_bytes
    steps_per_s = row["host"]["tokens_per_s"] / m.requests
    row["floor"] = roofline(num_bytes, steps_per_s, bandwidth["datasheet"], bandwidth["measured"])
    if not row["repeatable"]:
        note = f"{m.requests} at a time give other tokens than each alone"
        row |= {"status": "wrong", "note": note}
    return row
