"""What a GPU gives through the server's socket: `python -m tests.server.through_socket`.

    rates  tokens/s of one client and of eight beside the engine's own, greedy: engine, server, engine again, each in
           a process of its own; medians
    schema one client whose answer a JSON schema holds beside one whose answer is free: tokens/s, and the time to the
           first token, of a schema that was used before and of a new one
    agent  ten questions with results of tools (ten_questions.py): prompt tokens cached, time to compute a prompt warm
           and cold, and of both answers' tokens how far each lies below the fp32 reference's choice

Random weights of a published shape of Llama's family. A minute on an H200; --small is the same on a CPU, on a model of
a megabyte. --keep writes gpu_record.json.xz, part by part. What is missing on the machine is said before anything
starts, and --limit ends what hangs. Nothing is fetched: a machine without a network takes the server's packages from
a folder that was filled elsewhere,

    pip download -d WHEELS --only-binary=:all: --python-version 3.12 -c constraints/ci.txt NAMES
    pip install --no-index --find-links WHEELS NAMES && pip install --no-deps --no-build-isolation -e .

with NAMES fastapi uvicorn httptools uvloop msgspec prometheus-client llguidance httpx2.
"""

import argparse
import importlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kog_triton.backends import BackgroundCompiler, backend_names
from kog_triton.backends.choose import choose
from kog_triton.bench import machine
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import KogError
from kog_triton.model.families import read_spec, sources
from kog_triton.model.shapes import SHAPES
from tests import ROOT
from tests.lib import kept_rows
from tests.lib.fake_checkpoint import CHAT_TEMPLATE, bytes_to_signs

if TYPE_CHECKING:
    from tests.lib.served import Served

STARTED = time.perf_counter()
RECORD = Path(__file__).with_name("gpu_record.json.xz")
PROMPT, CONTEXT, WARM_UPS, REPEATS, CLIENTS = 32, 16384, 2, 5, 8
ASKED = 0.97  # of the engine's tokens/s
# Of an answer that a schema holds: of a free one's tokens/s, and ms that its first token may come later, by a schema
# that was used before and by a new one.
ASKED_HELD, LATER_MS, LATER_NEW_MS = 0.95, 10, 50
NEEDED = ("httpx2", "llguidance", "kog_triton.server.run")  # and what they import
SMALL = {
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


@dataclass(frozen=True)
class Task:
    config: Mapping[str, Any]  # config.json
    backend: str
    device: str  # torch's: of the weights, and of the reference that judges
    tokens: int  # of each request that is timed
    system: str  # an agent's instructions
    result: str  # of a tool, in each question


def small(backend: str = "reference") -> Task:
    """The whole on a CPU in less than two minutes."""
    return Task(SMALL, backend, "cpu", 64, "You are an agent. " * 150, "a line of a file\n" * 6)


def say(what: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {what}", file=sys.stderr, flush=True)


# ---- before anything starts ----


def missing(backend: str, num_bytes: int) -> str:
    """What this machine lacks, in a line; "" if it lacks nothing."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{error}: install the server's packages, as the head of {__file__} says"
    if "reference" not in backend_names():
        return "kog_triton is not installed: pip install --no-deps --no-build-isolation -e ."
    try:
        chosen = choose(backend).name
    except KogError as error:
        return str(error)
    say(f"backend {chosen}")
    place = tempfile.gettempdir()
    if (free := shutil.disk_usage(place).free) < 1.2 * num_bytes:
        return f"{place} has {free / 1e9:.1f} GB for {num_bytes / 1e9:.1f} GB of weights: set TMPDIR"
    return ""


@contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """TimeoutError in whatever runs then; what it has started is ended on the way out."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done after --limit {seconds} s: what was said last is what hangs")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


# ---- the model ----


def make_checkpoint(folder: Path, config: Mapping[str, Any], device: str) -> None:
    """A Llama of random weights with a vocabulary of its size: a token is a byte, or the text "w" and its number."""
    folder.mkdir(parents=True)
    # byte 0 ends an answer, where it is let: a grammar needs a token that does
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "eos_token_id": 0, **config}
    assert config["model_type"] == "llama", "Llama's family alone is written here"
    (folder / "config.json").write_text(json.dumps(config))
    weights = RandomWeights(read_spec(config), device=device)
    tensors = {}
    for name, source in sources(weights.spec).items():
        for layer in range(weights.spec.num_layers if "{}" in name else 1):
            stored = source.names[0].format(layer)
            tensors[stored] = weights.load(name.format(layer)).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    signs = bytes_to_signs()
    words = {f"w{i}": i for i in range(256, config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(signs)} | words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))


# ---- rates ----


def prompts(count: int) -> list[list[int]]:
    return [[(31 * i + 101 * j) % 250 + 1 for i in range(PROMPT)] for j in range(count)]


def engine(model: str, backend: str, tokens: int) -> dict[int, list[float]]:
    """tokens/s without first tokens of one request and of eight together, REPEATS times, once all is compiled."""
    from kog_triton import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found: dict[int, list[float]] = {}
    with LLM(model, backend=backend, num_slots=CLIENTS, max_model_len=CONTEXT) as llm:
        for count in (1, CLIENTS):
            asked = [{"prompt_token_ids": ids} for ids in prompts(count)]
            llm.generate(asked, params)
            if isinstance(llm.engine.backend, BackgroundCompiler):
                llm.engine.backend.settle()
            runs = [llm.generate(asked, params) for _ in range(WARM_UPS - 1 + REPEATS)]
            rates = [sum(one.metrics.decode_tokens_per_s for one in outputs) for outputs in runs]
            found[count] = rates[-REPEATS:]
    return found


def engine_process(model: Path, backend: str, tokens: int) -> dict[int, list[float]]:
    """What `engine` finds, in a process that leaves the device when it ends."""
    command = [sys.executable, "-m", "tests.server.through_socket", "--engine", str(model)]
    command += ["--backend", backend, "--tokens", str(tokens)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the engine alone ended with status {done.returncode}: see above")
    found = json.loads(done.stdout.splitlines()[-1])
    return {int(count): rates for count, rates in found.items()}


def stream(server: "Served", prompt: list[int], tokens: int, **fields: Any) -> tuple[int, list[tuple[int, int]]]:
    """When it was sent, and of each event its arrival and the tokens until then; in ns of this client's clock."""
    from tests.lib.raw_stream import raw_stream

    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **fields}
    sent, events = raw_stream(server, body, "/v1/completions")
    told = [(at, event["progress"]["completion_tokens"]) for at, event in events if event["choices"]]
    assert told[-1][1] == tokens
    return sent, told


def one_client(server: "Served", prompt: list[int], tokens: int, **fields: Any) -> float:
    """tokens/s from the first token's event to the last one's."""
    _, told = stream(server, prompt, tokens, **fields)
    (begun, first), (ended, last) = told[0], told[-1]
    return (last - first) / ((ended - begun) / 1e9)


def first_ms(server: "Served", prompt: list[int], **fields: Any) -> float:
    """From the request to the first token's event, with text of its own or not."""
    sent, told = stream(server, prompt, 2, stream_interval=1, **fields)
    return (told[0][0] - sent) / 1e6


def clients(server: "Served", count: int, tokens: int) -> list[float]:
    """tokens/s of all of them together, REPEATS times, warm."""
    rates = []
    with ThreadPoolExecutor(count) as pool:
        for _ in range(WARM_UPS + REPEATS):
            each = pool.map(lambda ids: one_client(server, ids, tokens, ignore_eos=True), prompts(count))
            rates.append(sum(each))
    return rates[-REPEATS:]


def integers(least: int, tokens: int) -> dict[str, Any]:
    """A schema that holds an answer for so many tokens: integers from `least` on."""
    number = {"type": "integer", "minimum": least, "maximum": least + 99}
    return {"structured_outputs": {"json": {"type": "array", "items": number, "minItems": tokens}}}


def held_by_a_schema(server: "Served", tokens: int) -> dict[str, Any]:
    """Free answers and held ones in turns, medians; first tokens by requests of their own, whose events tell each
    token: a free answer may begin with a part of a character, which has no text yet."""
    prompt = prompts(1)[0]
    rates: dict[str, list[float]] = {"free": [], "held": []}
    firsts: dict[str, list[float]] = {"free": [], "new": [], "held": []}
    for i in range(WARM_UPS + REPEATS):
        ways = {"free": {"ignore_eos": True}, "held": integers(100 * i, tokens)}
        for name, fields in (("free", ways["free"]), ("new", ways["held"]), ("held", ways["held"])):
            firsts[name].append(first_ms(server, prompt, **fields))
        for name, fields in ways.items():
            rates[name].append(one_client(server, prompt, tokens, **fields))
    rate = {name: statistics.median(each[-REPEATS:]) for name, each in rates.items()}
    first = {name: statistics.median(each[-REPEATS:]) for name, each in firsts.items()}
    later, later_new = (first[name] - first["free"] for name in ("held", "new"))
    return {
        "tokens_per_s": {"free": round(rate["free"], 1), "held": round(rate["held"], 1)},
        "share": round(rate["held"] / rate["free"], 4),
        "asked": ASKED_HELD,
        "held": rate["held"] >= ASKED_HELD * rate["free"],
        "first_token_later_ms": {
            "used_before": round(later, 2),
            "new": round(later_new, 2),
            "asked": [LATER_MS, LATER_NEW_MS],
            "held": later <= LATER_MS and later_new <= LATER_NEW_MS,
        },
    }


def share(before: list[float], through: list[float], after: list[float]) -> dict[str, Any]:
    medians = [statistics.median(rates) for rates in (before, through, after)]
    of_engine = medians[1] / ((medians[0] + medians[2]) / 2)
    return {
        "engine_tokens_per_s": [round(medians[0], 1), round(medians[2], 1)],
        "through_the_socket": round(medians[1], 1),
        "share": round(of_engine, 4),
        "asked": ASKED,
        "held": of_engine >= ASKED,
    }


# ---- the whole ----


def measure(task: Task) -> Iterator[tuple[str, Any]]:
    """(name, what was found) of each part, as it is done."""
    from tests.lib.served import served
    from tests.server.judged_answers import judge
    from tests.server.ten_questions import converse

    with tempfile.TemporaryDirectory() as place:
        model = Path(place, "model")
        say("weights")
        make_checkpoint(model, task.config, task.device)
        if task.device == "cuda":
            torch.cuda.empty_cache()
        say("the engine alone; its kernels are kept from here on")
        before = engine_process(model, task.backend, task.tokens)
        say("the server")
        flags = ["--backend", task.backend, "--max-num-seqs", str(CLIENTS)]
        flags += ["--max-model-len", str(CONTEXT)]
        with served(Path(place, "server"), model, *flags) as server:
            yield "backend", server.get("/props").json()["backend"]
            through = {}
            for count in (1, CLIENTS):
                say(f"{count} clients")
                through[count] = clients(server, count, task.tokens)
            say("an answer that a schema holds")
            schema = held_by_a_schema(server, task.tokens)
            say("an agent's ten questions")
            questions = converse(server, task.system, task.result)
        say("the engine alone again")
        after = engine_process(model, task.backend, task.tokens)
        for count in (1, CLIENTS):
            yield f"{count} clients", share(before[count], through[count], after[count])
        yield "schema", schema
        say("the reference judges the agent's answers")
        yield "agent", judge(model, questions, task.device, CONTEXT)


def weights_bytes(config: Mapping[str, Any]) -> int:
    return 2 * read_spec({"torch_dtype": "bfloat16", **config}).num_parameters


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.through_socket")
    parser.add_argument("--shape", default="llama-3.2-1b", choices=sorted(SHAPES))
    parser.add_argument("--backend", help="(default: auto; --small: reference)")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--small", action="store_true", help="the same on a CPU and a small model")
    parser.add_argument("--limit", type=int, default=180, metavar="S", help="(default: 180)")
    parser.add_argument("--keep", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(engine(args.engine, args.backend, args.tokens)))
        return
    if args.small:
        task = small(args.backend or "reference")
    elif torch.cuda.is_available():
        system, result = "You are an agent with tools. " * 280, "a line of a file\n" * 23
        backend = args.backend or "auto"
        task = Task(SHAPES[args.shape], backend, "cuda", args.tokens, system, result)
    else:
        parser.error("torch sees no GPU here: --small runs on a CPU")
    if args.keep and args.small:
        parser.error(f"--keep writes {RECORD.name}, which is a GPU's: leave out --small")
    if lack := missing(task.backend, weights_bytes(task.config)):
        parser.error(lack)
    record: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "shape": "small" if args.small else args.shape,
        "weights": "random",
        "tokens": task.tokens,
    }
    with ended_after(args.limit):
        for name, found in measure(task):
            record[name] = found
            if args.keep:
                kept_rows.write(RECORD, record)
    print(json.dumps(record, indent=2))
    say("done")


if __name__ == "__main__":
    main()
