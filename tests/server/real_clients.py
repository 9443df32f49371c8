"""Clients of the field on a server of ours, each in an environment of its own: `python -m tests.server.real_clients`.

Prints what each of them found; with --keep into clients.json.xz. $KOG_TESTS_CACHE keeps their environments; the first
run fetches them (clients/requirements.txt, clients/package-lock.json).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from tests.lib import kept_rows
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import Served, served
from tests.lib.wheel_files import cache

HERE = Path(__file__).parent / "clients"
RECORD = Path(__file__).with_name("clients.json.xz")
CALLS = 10  # of the agent's tool
TOKENS, REQUESTS = 300, 20  # of guidellm's prompts
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CITY = {"city": "Zürich"}
QUESTIONS = (
    ("The sky is", (" blue", " green", " a kind of cheese")),
    ("def add(a, b):\n    return", (" a + b", " a - b", " None")),
    ("Zürich liegt in", (" der Schweiz", " Frankreich")),
    ("1, 2, 3,", (" 4", " 7", " x")),
)
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


# ---- their environments ----


def kept(name: str, files: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    """The folder that `make` has filled once for these files and this Python."""
    told = b"".join((HERE / file).read_bytes() for file in files) + sys.version.encode()
    folder = cache() / f"{name}-{sha256(told).hexdigest()[:12]}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        make(folder)
        (folder / "ready").touch()
    return folder


def python() -> Path:
    """The Python that has the packages of requirements.txt."""

    def make(folder: Path) -> None:
        venv.create(folder, with_pip=True)
        (site,) = folder.glob("lib/python*/site-packages")
        # behind its own packages: torch, which guidellm loads prompts with
        (site / "zz_tests.pth").write_text(str(Path(torch.__file__).parents[1]))
        command = ["bin/python", "-m", "pip", "install", "-q", "--no-deps", "-r"]
        subprocess.run([*command, HERE / "requirements.txt"], cwd=folder, check=True, timeout=1800)

    return kept("clients", ("requirements.txt",), make) / "bin" / "python"


def node() -> Path:
    """The folder that has the packages of package-lock.json."""

    def make(folder: Path) -> None:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, folder)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(command, cwd=folder, check=True, timeout=600)

    return kept("ai-sdk", ("package.json", "package-lock.json"), make)


def run(command: list[Any], given: Any = None, cwd: Path | None = None) -> str:
    """What a client writes; an AssertionError with what it says if it fails."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [str(part) for part in command],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def told_by(command: list[Any], given: Any, cwd: Path | None = None) -> Any:
    """What a client's script found: the last line that it writes."""
    return json.loads(run(command, given, cwd).splitlines()[-1])


def versions(*names: str) -> dict[str, str]:
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return {name: found for name, _, found in (line.partition("==") for line in lines) if name in names}


def prompts(server: Served) -> dict[str, str]:
    return {
        "plain": server.play("plain", "Grüße 🙂"),
        "fast": server.play("fast", "word " * 600, tokens_per_s=3000),
        "call": server.play("call", CALL),
        "after_call": server.play("after", "Sun."),
        "json": server.play("json", '{"name": "Bern"}'),
        "thinks": server.play("thinks", "<think>hm</think>Yes."),
    }


MADE = len("word ") * 600 + 1  # tokens of the fast answer


# ---- one function a client: figures, or an AssertionError ----


def ai_sdk(server: Served) -> dict[str, Any]:
    folder = node()
    shutil.copy(HERE / "ai_sdk.mjs", folder)
    given = {"url": server.url, "prompts": prompts(server)}
    told = told_by(["node", "ai_sdk.mjs"], given, folder)
    assert told["plain"] == ["Grüße 🙂", "stop", len("Grüße 🙂".encode()) + 1]
    assert told["fast"][:3] == ["word " * 600, "stop", MADE]
    assert told["thinks"] == ["hm", "Yes."]
    assert told["called"] == [[[CITY], []], "Sun."]
    assert told["streamed"] == ["Sun.", 1, False]
    assert told["json"] == {"name": "Bern"}
    assert told["refused"][0] == 400 and "temperature" in told["refused"][1]
    packages = json.loads((HERE / "package.json").read_text())["dependencies"]
    return {"versions": packages, "events_of_3000_tokens": told["fast"][3]}


def litellm(server: Served) -> dict[str, Any]:
    given = {"url": server.url, "prompts": prompts(server)}
    told = told_by([python(), HERE / "litellm_client.py"], given)
    assert told["plain"] == ["Grüße 🙂", "stop", len("Grüße 🙂".encode()) + 1]
    assert told["fast"] == ["word " * 600, MADE]
    assert told["called"] == told["streamed"] == [["weather", CITY]]
    assert told["thinks"] == ["hm", "Yes."]
    assert told["errors"] == [[400, True], [400, True]]
    return {"versions": versions("litellm")}


def langchain(server: Served) -> dict[str, Any]:
    given = {"url": server.url, "prompts": prompts(server)}
    told = told_by([python(), HERE / "langchain_client.py"], given)
    assert told["plain"] == ["Grüße 🙂", len("Grüße 🙂".encode()) + 1]
    assert told["fast"] == ["word " * 600, MADE]
    assert told["called"] == told["forced"] == [["weather", CITY]]
    assert told["after"] == "Sun."
    assert told["json"] == {"name": "Bern"}
    return {"versions": versions("langchain-openai")}


def agent(server: Served) -> dict[str, Any]:
    """Ten calls of a tool and an answer, twice: whole answers, and streams, which find the first run's prefix."""
    for i in range(1, CALLS + 1):
        arguments = json.dumps({"number": i})
        call = f'<tool_call>\n{{"name": "read_file", "arguments": {arguments}}}\n</tool_call>'
        server.play(f"step{i}", call)
    server.play(f"step{CALLS + 1}", "All are read.")
    given = {"url": server.url, "first": "play:step1 please", "calls": CALLS}
    told = told_by([python(), HERE / "agent.py"], given)
    shares = {}
    for kind, one in told.items():
        assert one["answer"] == "All are read."
        assert one["asked"] == list(range(1, CALLS + 1))
        assert len(one["prompt_tokens"]) == CALLS + 1
        cached, prompted = sum(one["cached_tokens"][1:]), sum(one["prompt_tokens"][1:])
        # what is not cached is the result of the last call and the answer before it
        new = [b - a for a, b in zip(one["prompt_tokens"], one["prompt_tokens"][1:], strict=False)]
        assert cached >= prompted - sum(new) - len(new) * len("[assistant]")
        shares[f"percent_cached_{kind}"] = round(100 * cached / prompted, 1)
    return {"versions": versions("openai-agents"), "calls": CALLS, **shares}


def lm_eval(server: Served) -> dict[str, Any]:
    """Log-likelihoods of a local task through /v1/completions, and those of the model's own logits."""
    from kog_triton import LLM

    model = Path(server.get("/props").json()["model_path"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = [{"question": q, "choices": c, "answer": 0} for q, c in QUESTIONS]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "task.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
        arguments = (
            f"base_url={server.url}/v1/completions,model={model},tokenizer={model},"
            "tokenized_requests=True,num_concurrent=1,max_retries=1"
        )
        command = [python().with_name("lm_eval"), "run", "--model", "local-completions"]
        command += ["--model_args", arguments, "--tasks", "local_choices", "--include_path", folder]
        run([*command, "--log_samples", "--output_path", folder / "out", "--batch_size", "1"])
        (samples,) = (folder / "out").rglob("samples_*.jsonl")
        found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(QUESTIONS)
    worst = 0.0
    with LLM(str(model), backend="reference") as llm:
        for sample in found:
            question, choices = QUESTIONS[sample["doc_id"]]
            for choice, ((told, greedy),) in zip(choices, sample["resps"], strict=True):
                ids = list((question + choice).encode())
                logprobs = torch.tensor(llm.forward_logits(ids)).double().log_softmax(1)
                first = len(question.encode())
                ours = sum(float(logprobs[i - 1, ids[i]]) for i in range(first, len(ids)))
                best = all(int(logprobs[i - 1].argmax()) == ids[i] for i in range(first, len(ids)))
                worst = max(worst, abs(float(told) - ours))
                assert greedy == str(best)
    assert worst < 1e-4
    choices = sum(len(c) for _, c in QUESTIONS)
    return {"versions": versions("lm_eval"), "choices": choices, "largest_difference": worst}


def guidellm(server: Served) -> dict[str, Any]:
    """Its time a token beside ours, of as many requests each: medians, us."""
    model = server.get("/props").json()["model_path"]
    prompt = server.play("flow", "x" * TOKENS, tokens_per_s=3000)
    ended = 'kog:request_success_total{finished_reason="length"}'
    before = server.metric(ended)
    rows = [{"prompt": f"{i} {prompt}", "output_tokens_count": TOKENS} for i in range(REQUESTS)]
    with tempfile.TemporaryDirectory() as place:
        data, out = Path(place, "prompts.jsonl"), Path(place, "out.json")
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [python().with_name("guidellm"), "run"]
        command += ["--backend", f"kind=openai_http,target={server.url},request_format=/v1/chat/completions"]
        command += ["--profile", "kind=synchronous", "--data", f"kind=json_file,path={data}"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--disable-console"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={model}"]
        run([*command, "--output", f"kind=json,path={out}"])
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert server.metric(ended) - before == REQUESTS
    # On a busy machine its report lacks the last one now and then, counted as neither done, failed nor cut off.
    assert len(requests["successful"]) in (REQUESTS, REQUESTS - 1)
    assert not requests["errored"] and not requests["incomplete"]
    assert {one["output_tokens"] for one in requests["successful"]} == {TOKENS}
    theirs = 1e3 * benchmark["metrics"]["inter_token_latency_ms"]["successful"]["median"]
    own = [server.stream_chat(row["prompt"], max_tokens=TOKENS)[-1]["timings"] for row in rows]
    ours = 1e3 * statistics.median(one["predicted_per_token_ms"] for one in own)
    return {
        "versions": versions("guidellm"),
        "requests": len(requests["successful"]),
        "their_us_a_token": round(theirs, 1),
        "our_us_a_token": round(ours, 1),
        "difference_us": round(abs(theirs - ours), 1),
        "within_5_percent_or_30_us": abs(theirs - ours) <= max(30, 0.05 * ours),
    }


SCRIPTED = (ai_sdk, litellm, langchain, agent, guidellm)


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Served, Served]]:
    """One that plays scripts, one with the reference backend; the same model."""
    model = make_checkpoint(folder / "model", max_context=1 << 16)
    flags = ("--max-num-seqs", "4", "--tool-call-parser", "hermes", "--reasoning-parser", "think")
    with (
        served(folder / "scripted", model, *flags, "--served-model-name", "kog") as scripted,
        served(folder / "reference", model, "--backend", "reference") as reference,
    ):
        yield scripted, reference


def main() -> None:
    clients = {client.__name__: client for client in (*SCRIPTED, lm_eval)}
    parser = argparse.ArgumentParser(prog="python -m tests.server.real_clients")
    parser.add_argument("names", nargs="*", choices=[*clients, []], help="(default: all)")
    parser.add_argument("--keep", action="store_true", help=f"write {RECORD.name}")
    args = parser.parse_args()
    kept_before = kept_rows.read(RECORD) if RECORD.exists() else {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place, servers(Path(place)) as (scripted, reference):
        for name in args.names or clients:
            client = clients[name]
            figures = client(reference if client is lm_eval else scripted)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            found[name] = {"created": now, **figures}
            print(name, json.dumps(found[name]), flush=True)
            if args.keep:
                kept_rows.write(RECORD, kept_before | found)


if __name__ == "__main__":
    main()
