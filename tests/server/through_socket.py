"""Tokens a second through the server's socket beside the engine's own: `python -m tests.server.through_socket`.

One client, then eight; random weights of a published shape of Llama's family, greedy. Engine, server, engine again,
each in a process of its own; medians. --keep writes gpu_record.json. Nothing is fetched: a machine without a
network takes the server's packages from a folder that was filled elsewhere,

    pip download -d WHEELS --only-binary=:all: --python-version 3.12 -c constraints/ci.txt NAMES
    pip install --no-index --find-links WHEELS NAMES

with NAMES fastapi uvicorn httptools uvloop msgspec prometheus-client llguidance httpx2.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.families import read_spec, sources
from kog_triton.model.shapes import SHAPES
from tests import ROOT
from tests.lib.fake_checkpoint import bytes_to_signs
from tests.lib.served import Served, served
from tests.server.figures import raw_stream

RECORD = Path(__file__).with_name("gpu_record.json")
PROMPT, CONTEXT, REPEATS, CLIENTS = 32, 4096, 5, 8
ASKED = 0.97  # of the engine's tokens/s


def make_checkpoint(folder: Path, config: Mapping[str, Any], device: str) -> None:
    """A Llama of random weights with a vocabulary of its size: a token is a byte, or the text "w" and its number."""
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **config}
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


def prompts(count: int) -> list[list[int]]:
    return [[(31 * i + 101 * j) % 250 + 1 for i in range(PROMPT)] for j in range(count)]


def engine(model: str, backend: str, tokens: int) -> dict[int, list[float]]:
    """tokens/s without first tokens of one request and of eight together, REPEATS times after a first one."""
    from kog_triton import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found: dict[int, list[float]] = {}
    with LLM(model, backend=backend, num_slots=CLIENTS, max_model_len=CONTEXT) as llm:
        for count in (1, CLIENTS):
            asked = [{"prompt_token_ids": ids} for ids in prompts(count)]
            runs = [llm.generate(asked, params) for _ in range(REPEATS + 1)]
            rates = [sum(one.metrics.decode_tokens_per_s for one in outputs) for outputs in runs]
            found[count] = rates[1:]
    return found


def engine_process(model: Path, backend: str, tokens: int) -> dict[int, float]:
    """Medians of `engine`, in a process that leaves the device when it ends."""
    command = [sys.executable, "-m", "tests.server.through_socket", "--engine", str(model)]
    command += ["--backend", backend, "--tokens", str(tokens)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {int(count): statistics.median(rates) for count, rates in found.items()}


def one_client(server: Served, prompt: list[int], tokens: int) -> float:
    """tokens/s by this client's clock, from the first token's event to the last one's."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    _, events = raw_stream(server, body, "/v1/completions")
    told = [
        (at, event["progress"]["completion_tokens"]) for at, event in events if event["choices"]
    ]
    (begun, first), (ended, last) = told[0], told[-1]
    assert last == tokens
    return (last - first) / ((ended - begun) / 1e9)


def clients(server: Served, count: int, tokens: int) -> float:
    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(lambda ids: one_client(server, ids, tokens), prompts(count)))


def measure(config: Mapping[str, Any], backend: str, device: str, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        model = Path(place, "model")
        make_checkpoint(model, config, device)
        before = engine_process(model, backend, tokens)  # and its kernels are kept from here on
        flags = (
            "--backend",
            backend,
            "--max-num-seqs",
            str(CLIENTS),
            "--max-model-len",
            str(CONTEXT),
        )
        with served(Path(place, "server"), model, *flags) as server:
            chosen = server.get("/props").json()["backend"]
            through = {}
            for count in (1, CLIENTS):
                rates = [clients(server, count, tokens) for _ in range(REPEATS + 1)]
                through[count] = statistics.median(rates[1:])
        after = engine_process(model, backend, tokens)
    found: dict[str, Any] = {"backend": chosen, "tokens": tokens}
    for count in (1, CLIENTS):
        own = (before[count] + after[count]) / 2
        found[f"{count} clients"] = {
            "engine_tokens_per_s": [round(before[count], 1), round(after[count], 1)],
            "through_the_socket": round(through[count], 1),
            "share": round(through[count] / own, 4),
            "asked": ASKED,
            "held": through[count] >= ASKED * own,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.through_socket")
    parser.add_argument("--shape", default="llama-3.2-1b", choices=sorted(SHAPES))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--keep", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(engine(args.engine, args.backend, args.tokens)))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "shape": args.shape,
        "weights": "random",
        **measure(SHAPES[args.shape], args.backend, device, args.tokens),
    }
    print(json.dumps(record, indent=2))
    if args.keep:
        RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
