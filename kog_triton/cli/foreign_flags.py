"""Flags that a command has under other names, or has not, said by name: of llama.cpp, mlx_lm and other commands, and
for the server of vLLM, whose arguments vllm_names.py knows.
"""

import sys
from collections.abc import Collection, Mapping, Sequence

from kog_triton.cli.arguments import Parser
from kog_triton.vllm_names import IGNORED, names
from kog_triton.vllm_names import INSTEAD as OF_VLLM

WHOLE = "leave it out: a model is in a GPU whole, or not at all"
THREADS = "set the environment variable OMP_NUM_THREADS"
MERGE = "merge the adapter into the checkpoint"
PROXY = "put a proxy in front of the server"
SILENT = "leave it out: requests are not logged"
COMMON = {
    "--adapter-path": MERGE,
    "--ctx-size": "--max-model-len N",
    "--gpu-layers": WHOLE,
    "--hf-repo": "--model org/name",
    "--lora": MERGE,
    "--model-path": "--model",
    "--n-gpu-layers": WHOLE,
    "--threads": THREADS,
    "-c": "--max-model-len N",
    "-hf": "--model org/name",
    "-ngl": WHOLE,
    "-t": THREADS,
}
INSTEAD = COMMON | {
    "--chat-template-config": "--chat-template-kwargs JSON",
    "--chat-template-file": "--chat-template FILE",
    "--conversation": "--interactive",
    "--extra-eos-token": "--stop TEXT",
    "--file": "-p @FILE",
    "--grammar-file": "--grammar FILE",
    "--ignore-chat-template": "leave it out: without --chat there is none",
    "--max-kv-size": "--max-model-len N",
    "--max-num-seqs": "--num-slots N",
    "--n-predict": "-m N",
    "--predict": "-m N",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt": "--system TEXT",
    "--tensor-parallel-size": "--gpus N",
    "-cnv": "--interactive",
    "-f": "-p @FILE",
    "-i": "--interactive",
    "-j": "--json-schema",
    "-n": "-m N (tokens) or --n N (samples)",
    "-s": "--seed N",
    "-sys": "--system TEXT",
    "-tp": "--gpus N",
}


SERVERS = COMMON | {
    "--alias": "--served-model-name NAME",
    "--allow-credentials": PROXY,
    "--allowed-headers": PROXY,
    "--allowed-methods": PROXY,
    "--allowed-origins": PROXY,
    "--api-key-file": "--api-key KEY, or the environment variable KOG_API_KEY",
    "--api-server-count": "leave it out: one process speaks HTTP",
    "--data-parallel-size": "run a server on each GPU",
    "--disable-log-requests": SILENT,
    "--disable-uvicorn-access-log": SILENT,
    "--enable-log-requests": "requests are not logged: /metrics counts them",
    "--enable-per-request-metrics": "leave it out: every answer has timings",
    "--enable-prompt-tokens-details": "leave it out: usage always tells cached_tokens",
    "--enable-request-id-headers": "leave it out: an answer's id is in its body",
    "--flash-attn": "leave it out: there is one attention",
    "--h11-max-header-count": "leave it out: 256 headers are taken",
    "--h11-max-incomplete-event-size": "leave it out: 64 KiB of headers are taken",
    "--jinja": "leave it out: a model's own chat template is always used",
    "--lora-modules": MERGE,
    "--metrics": "leave it out: /metrics is always there",
    "--middleware": PROXY,
    "--num-slots": "--max-num-seqs N",
    "--parallel": "--max-num-seqs N",
    "--pipeline-parallel-size": "--tensor-parallel-size N",
    "--response-role": "leave it out: answers are the assistant's",
    "--root-path": PROXY,
    "--ssl-ca-certs": PROXY,
    "--ssl-certfile": PROXY,
    "--ssl-keyfile": PROXY,
    "--trust-request-chat-template": "leave it out: no request brings a template of its own",
    "--uvicorn-log-level": SILENT,
    "-fa": "leave it out: there is one attention",
    "-m": "--model",
    "-np": "--max-num-seqs N",
}


def of_servers(own: Collection[str]) -> dict[str, str]:
    """What there is instead of each flag of `vllm serve`, llama-server and mlx_lm.server that is not among `own`."""
    found = {}
    for name in (*names()["LLM"], *IGNORED["LLM"], *OF_VLLM["LLM"]):
        ignored = IGNORED["LLM"].get(name)
        instead = OF_VLLM["LLM"].get(name, "leave it out")
        found["--" + name.replace("_", "-")] = f"leave it out: {ignored}" if ignored else instead
    found |= SERVERS
    return {flag: instead for flag, instead in found.items() if flag not in own}


def foreign_flag(words: Sequence[str], table: Mapping[str, str]) -> str | None:
    """What to say of the first of the table's flags among the words of a command line.

    None of them can be another flag's value: those that begin with - are given as FLAG=VALUE.
    """
    for word in words:
        flag = word.partition("=")[0]
        if flag in table:
            instead = table[flag]
            is_ours = instead.startswith("-")
            return f"{flag} is {instead} here" if is_ours else f"there is no {flag}: {instead}"
    return None


def own_words(parser: Parser, argv: Sequence[str] | None, table: Mapping[str, str]) -> Sequence[str]:
    """The words of a command line, if none of them is in the table."""
    words = sys.argv[1:] if argv is None else argv
    if (foreign := foreign_flag(words, table)) is not None:
        parser.error(foreign)
    return words
